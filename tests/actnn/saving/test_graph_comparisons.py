"""Compiled backward does not compare decoded numbers, nor what it makes of them again."""

import pytest
import torch
from actnn_models import distance, gradient
from torch import nn
from torch.nn import functional as F

import actnn
from sweeps import first_of

COMPARING = {
    "relu": F.relu,
    "relu6": F.relu6,
    "relu6 in place": lambda x: F.relu6(x * 1, inplace=True),
    "leaky relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "abs": torch.abs,
    "sgn": lambda x: x * x.sgn(),
    "where": lambda x: torch.where((x > 0) & (x < 1), x, 0.1 * x),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
}


class Net(nn.Module):
    """Each function follows on a norm, so that backward makes its operand again."""

    def __init__(self, function, images):
        super().__init__()
        self.function = function
        layer = (lambda: nn.Conv2d(16, 16, 3, bias=False)) if images else lambda: nn.Linear(16, 16)
        norm = nn.BatchNorm2d if images else nn.LayerNorm
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.norms = nn.ModuleList(norm(16) for _ in range(2))
        self.dims = (2, 3) if images else (1,)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.function(norm(layer(x)))
        return x.mean(self.dims)


def error(model, x, **options):
    """Return how far the gradient of compiled code is off at 8 bits, relative to its norm."""
    torch._dynamo.reset()
    options = {"backend": "aot_eager_decomp_partition", "fullgraph": True} | options
    weight = torch.randn(model(x).shape)
    exact = gradient((model(x) * weight).sum(), model)
    compiled = torch.compile(model, **options)
    for _ in range(2):
        with actnn.compressed(bits=8, min_bytes=0, model=model):
            loss = (compiled(x) * weight).sum()
        found = distance(gradient(loss, model), exact)
    return found


# Batch norms and layer norms by turns.
@pytest.mark.parametrize(
    ("name", "images"), first_of([(n, i % 2 == 0) for i, n in enumerate(COMPARING)], 2)
)
def test_no_element_has_the_derivative_of_another_side(name, images):
    torch.manual_seed(0)
    x = torch.randn(8, 16, 12, 12).to(memory_format=torch.channels_last)
    x = x if images else x.flatten(2).mT
    assert error(Net(COMPARING[name], images), x) < 0.02


class Last(nn.Module):
    """Backward reads one tensor alone, which no other could carry bits for."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 512)

    def forward(self, x):
        y = self.linear(x)
        return (F.relu6(y * 3) + y.sin()).sum(1)


class Twice(Last):
    def forward(self, x):
        return super().forward(x) * self.linear(x.cos()).sin().sum(1)


@pytest.mark.parametrize("dynamic", first_of([False, True], 1))
def test_without_another_tensor_the_operand_is_kept(dynamic):
    torch.manual_seed(0)
    assert error(Last(), torch.randn(64, 32), dynamic=dynamic) == 0


@pytest.mark.parametrize("dynamic", first_of([False, True], 1))
def test_with_other_tensors_bits_are_saved_where_sizes_are_known(dynamic):
    torch.manual_seed(0)
    assert 0 < error(Twice(), torch.randn(64, 32), dynamic=dynamic) < 0.01
