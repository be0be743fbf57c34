"""Small models and helpers for the tests of saving and layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import actnn


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.LeakyReLU(0.1),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.ReLU6(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, 5),
    )


def conv_input(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """A Transformer block on functional attention."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        q, k, v = (
            part.view(n, t, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of x and of all parameters, for one loss."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    (y.float() * weights.to(y.device)).sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def gradient(value: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The whole gradient of a value, flat."""
    found = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([each.flatten() for each in found])


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference, relative to that of `exact`."""
    return float((found - exact).norm() / exact.norm())


def has_node(y: torch.Tensor, name: str) -> bool:
    """Whether a node of the graph of `y` has this in its name."""
    left = [y.grad_fn]
    while left:
        node = left.pop()
        if name in type(node).__name__:
            return True
        left += [each for each, _ in node.next_functions if each is not None]
    return False


def run_by(way: str, model: nn.Module, **settings: Any) -> Callable[..., torch.Tensor]:
    """The compressed model as a function: by "model", "context", or the backend of a compiler."""
    if way == "context":
        saving = actnn.compressed(model=model, **settings)

        def run(*batch: torch.Tensor) -> torch.Tensor:
            with saving:
                return model(*batch)

        return run
    actnn.compress(model, **settings)
    return model if way == "model" else torch.compile(model, backend=way)


def compressed_copy(model: nn.Module, **settings: object) -> nn.Module:
    import copy

    settings.setdefault("min_bytes", 0)
    return actnn.compress(copy.deepcopy(model), **settings)
