"""Models that use torch in many ways, each with arguments for its forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils._pytree import tree_leaves


class Bottleneck(nn.Module):
    """A residual block with ReLU and addition in place."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3, self.relu = nn.BatchNorm2d(4 * width), nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(inputs, 4 * width, 1, stride)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(self.relu(self.norm2(self.conv2(y)))))
        y += self.shortcut(x)
        return self.relu(y)


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.ReLU(inplace=True),
        nn.BatchNorm2d(8),
        nn.MaxPool2d(3, 2, 1),
        Bottleneck(8, 4),
        Bottleneck(16, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class VisionTransformer(nn.Module):
    """Patches and a class token of another size, in torch's own Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.zeros(1, 1, 32))
        self.place = nn.Parameter(torch.randn(1, 65, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


def _twice(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.InstanceNorm2d(outputs, affine=True),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Skip connections, functional pools, two ways up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.low = _twice(3, 8), _twice(8, 8), _twice(8, 16)
        self.up2, self.join2 = nn.ConvTranspose2d(16, 8, 2, 2), _twice(16, 8)
        self.up1 = nn.Upsample(scale_factor=2, mode="bilinear")
        self.join1, self.out = _twice(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.low(F.avg_pool2d(b, 2))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        return self.out(self.join1(torch.cat([self.up1(b), a], 1)))


class GatedBlock(nn.Module):
    """Attention on views of one tensor, RMS norms, and a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Language(nn.Module):
    """Tied embeddings, keyword arguments, and a dictionary as result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.blocks, self.norm = nn.ModuleList(GatedBlock() for _ in range(2)), nn.RMSNorm(32)

    def forward(self, index, targets):
        x = self.embed(index) * math.sqrt(32)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"logits": logits.detach(), "loss": loss}


class Translator(nn.Module):
    """Encoder and decoder of GRUs, attention, a cell in a loop, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bridge = nn.Embedding(30, 16), nn.Linear(48, 24)
        self.encoder = nn.GRU(16, 24, 2, bidirectional=True, batch_first=True)
        self.decoder = nn.GRU(16, 24, batch_first=True)
        self.attention = nn.MultiheadAttention(24, 2, kdim=48, vdim=48, batch_first=True)
        self.cell, self.lstm = nn.GRUCell(24, 24), nn.LSTM(24, 24, batch_first=True)
        self.out = nn.Linear(24, 30)

    def forward(self, source, target):
        encoded, h = self.encoder(self.embed(source))
        h = torch.tanh(self.bridge(torch.cat([h[-2], h[-1]], -1)))
        decoded, _ = self.decoder(self.embed(target), h[None])
        attended, _ = self.attention(decoded, encoded, encoded)
        states = []
        for t in range(4):
            h = self.cell(attended[:, t], h)
            states.append(h)
        y = self.lstm(attended + decoded)[0].clone()
        y[:, :4] += torch.stack(states, 1)
        return self.out(y)


class Views(nn.Module):
    """Operations in place on tensors and on views of them."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        y = self.a(x)
        y.mul_(2).add_(1)
        y[:, :4].clamp_(min=0)
        y[:, 4:8].relu_()
        left, right = self.b(y.sigmoid()).chunk(2, -1)
        w = (left * torch.sigmoid(right)).t().contiguous().view(-1).view(16, -1).t()
        w = w.unfold(1, 16, 16).squeeze(1)
        out = torch.zeros(len(x), 8)
        out[:] = self.c(w)
        rows = torch.arange(len(x))
        out.index_add_(0, rows, torch.exp(-(out.detach() ** 2)) * self.c(w.flip(1)))
        return torch.where(out > 0, out, out * 0.1).narrow(1, 0, 6).expand(2, -1, -1).cumsum(0)


class Spectral(nn.Module):
    """Complex weights between Fourier transforms, and functional activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(1, 16), nn.Linear(16, 1)
        self.filter = nn.Parameter(torch.randn(16, 16, 9, dtype=torch.cfloat) * 0.1)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        h = self.inner(x)
        f = torch.einsum("nkc,cdk->nkd", torch.fft.rfft(h, dim=1)[:, :9], self.filter)
        f = f * f.conj().abs()
        return self.out(F.gelu(torch.fft.irfft(f, n=h.shape[1], dim=1) + self.linear(h)))


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        gate = torch.sigmoid(slope * x)
        ctx.save_for_backward(x, gate, slope)
        ctx.mark_non_differentiable(gate)
        return x * gate, gate

    @staticmethod
    def backward(ctx, dy, _):
        x, gate, slope = ctx.saved_tensors
        curve = gate * (1 - gate)
        return dy * (gate + slope * x * curve), (dy * x * x * curve).sum()


class Custom(nn.Module):
    """An autograd function of its own, and layers whose container is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32))
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            x = _Swish.apply(layer(x), self.slope)[0]
        return x


class Rare(nn.Module):
    """Parametrized and frozen weights, and rarely used modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = weight_norm(nn.Linear(16, 32)), spectral_norm(nn.Linear(32, 32))
        self.bag, self.frozen = nn.EmbeddingBag(20, 16), nn.Linear(32, 32).requires_grad_(False)
        self.first = nn.Sequential(nn.PReLU(), nn.ELU(), nn.GLU())
        self.others = nn.ModuleList([nn.Softplus(), nn.Softmax(-1), nn.Tanhshrink(), nn.Mish()])
        self.out = nn.Bilinear(16, 16, 4)

    def forward(self, x, index):
        y = self.first(self.frozen(self.b(self.a(x + self.bag(index)))))
        for layer in self.others:
            y = layer(y) + y
        return self.out(y, y.flip(0))


Case = tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]


def cases(size: int = 1) -> dict[str, Case]:
    """Name -> (makes the model, arguments of a batch that is `size` times the smallest)."""
    random = torch.Generator().manual_seed(0)

    def randn(n, *shape):
        return torch.randn(n * size, *shape, generator=random)

    def index(high, n, *shape):
        return torch.randint(high, (n * size, *shape), generator=random)

    return {
        "resnet": (resnet, (randn(4, 3, 32, 32),)),
        "vision": (VisionTransformer, (randn(2, 3, 32, 32),)),
        "unet": (UNet, (randn(2, 3, 16, 16),)),
        "language": (Language, (index(50, 2, 12), index(50, 2, 12))),
        "translator": (Translator, (index(30, 3, 6), index(30, 3, 5))),
        "views": (Views, (randn(16, 16),)),
        "spectral": (Spectral, (randn(2, 32, 1),)),
        "custom": (Custom, (randn(8, 16),)),
        "rare": (Rare, (randn(8, 16), index(20, 8, 3))),
    }


def loss_of(model: nn.Module, arguments: tuple[Any, ...]) -> torch.Tensor:
    """The loss that a model returns, or the sum of mean squares of its results."""
    output = model(*arguments)
    if isinstance(output, dict):
        return output["loss"]
    return sum((leaf.square().mean() for leaf in tree_leaves(output)), start=torch.zeros(()))


def whole_gradient(model: nn.Module, arguments: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Gradients by name, and the loss."""
    model.zero_grad()
    loss = loss_of(model, arguments)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def distance(exact: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two whole gradients, relative to that of the first."""
    names = [name for name in exact if name != "loss"]
    error = sum(float((exact[n] - found[n]).abs().square().sum()) for n in names)
    return math.sqrt(error / sum(float(exact[n].abs().square().sum()) for n in names))
