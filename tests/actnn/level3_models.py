"""Small models of the kinds whose gradients few bits disturb most, and their batches."""

import torch
from torch import nn
from torch.nn import functional as F

from actnn.adapting.measured import Measured


class Equal(Measured):
    """Level L3 that measures nothing: equal bits for all tensors."""

    def watch(self, *arguments):
        return None

    def _take(self, name, saved):
        return self.average


class Excited(nn.Module):
    """A block of EfficientNet and MobileNetV3: depthwise, with squeeze and excitation."""

    def __init__(self, width):
        super().__init__()
        inner, act = 4 * width, nn.Hardswish
        self.expand, self.n1, self.a1 = nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner), act()
        self.depth = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.n2, self.a2 = nn.BatchNorm2d(inner), act()
        self.squeeze, self.excite = nn.Conv2d(inner, width, 1), nn.Conv2d(width, inner, 1)
        self.project, self.n3 = nn.Conv2d(inner, width, 1), nn.BatchNorm2d(width)

    def forward(self, x):
        y = self.a2(self.n2(self.depth(self.a1(self.n1(self.expand(x))))))
        gate = self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True))))
        return x + self.n3(self.project(y * gate.sigmoid()))


class Residual(nn.Module):
    """A block of ResNet, whose last norm begins with a weight of 0."""

    def __init__(self, width):
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.c2, self.n2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        nn.init.zeros_(self.n2.weight)

    def forward(self, x):
        return F.relu(x + self.n2(self.c2(F.relu(self.n1(self.c1(x))))))


class ChannelNorm(nn.LayerNorm):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Next(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, width):
        super().__init__()
        self.depth, self.norm = (
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            ChannelNorm(width),
        )
        self.up, self.act, self.down = (
            nn.Conv2d(width, 4 * width, 1),
            nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(self.depth(x)))))


class HandRMS(nn.Module):
    """The norm of Llama and T5, as their code writes it."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * inverse).to(x.dtype)


class OwnNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x):
        def split(y):
            return y.view(len(y), y.shape[1], self.heads, -1).transpose(1, 2)

        y = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)))
        return self.o(y.transpose(1, 2).reshape(x.shape))


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down, self.act = nn.Linear(2 * width, width), nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """Blocks with the norm before: Llama's or a ViT's."""

    def __init__(self, norm, depth=3):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            parts = [norm(64), Attention(64, 4), norm(64), Gated(64)]
            self.blocks.append(nn.ModuleList(parts))
        self.norm = norm(64)

    def forward(self, ids):
        x = self.embedding(ids)
        for n1, attend, n2, mlp in self.blocks:
            x = x + attend(n1(x))
            x = x + mlp(n2(x))
        return self.head(self.norm(x))


def vision(*blocks):
    layers = [nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), *blocks]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


MODELS = {
    "excited": lambda: vision(*(Excited(16) for _ in range(3))),
    "residual": lambda: vision(*(Residual(16) for _ in range(5))),
    "next": lambda: vision(*(Next(16) for _ in range(4))),
    "rms": lambda: Decoder(HandRMS),
    "own norms": lambda: Decoder(OwnNorm),
}
IMAGES = ("excited", "residual", "next")


def batch_of(name, index):
    """Inputs and targets: images whose classes have means; tokens that four others may follow."""
    random = torch.Generator().manual_seed(index)
    if name in IMAGES:
        means = torch.randn(10, 3, 1, 1, generator=torch.Generator().manual_seed(0))
        y = torch.randint(10, (8,), generator=random)
        return torch.randn(8, 3, 32, 32, generator=random) + means[y] / 2, y
    ids = [torch.randint(64, (8,), generator=random)]
    for _ in range(32):
        ids.append((ids[-1] * 5 + torch.randint(4, (8,), generator=random)) % 64)
    ids = torch.stack(ids, 1)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model, name, index):
    x, y = batch_of(name, index)
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())
