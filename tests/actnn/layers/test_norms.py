"""Norms by whatever name, and their backward from few bits."""

import copy

import pytest
import torch
from actnn_models import has_node
from level3_models import ChannelNorm, Equal, HandRMS, OwnNorm
from torch import nn
from torch.nn import functional as F

import actnn
from actnn.adapting import measured
from actnn.layers.batch_norms import BatchNorm
from actnn.layers.normalization import Recognized
from actnn.saving.module_classes import is_swapped


class Gain(nn.Module):
    """Has the parameters of a norm, and is none."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-5

    def forward(self, x):
        return x * self.weight


class Squared(HandRMS):
    """A norm but for the power of its weight."""

    def forward(self, hidden):
        return super().forward(hidden) * self.weight


NORMS = {
    "rms": (lambda: HandRMS(48), (16, 40, 48), True),
    "layer": (lambda: OwnNorm(48), (16, 40, 48), True),
    "channels": (lambda: ChannelNorm(24), (4, 24, 12, 12), True),
    "gain": (lambda: Gain(48), (16, 40, 48), False),
    "squared": (lambda: Squared(48), (16, 40, 48), False),
}


def gradients(net, x, weights):
    net.zero_grad()
    x = x.clone().requires_grad_()
    y = net(x * 1)
    (y * weights).sum().backward()
    return y, [x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.filterwarnings("ignore:Backward divides by numbers near 0")  # rows of six decades
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_recognized_by_their_values(name, bits):
    torch.manual_seed(0)
    make, shape, is_norm = NORMS[name]
    exact = nn.Sequential(make())
    for p in exact.parameters():
        nn.init.normal_(p)
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    weights = torch.randn(shape)
    net = actnn.compress(copy.deepcopy(exact), bits=bits, min_bytes=0)
    assert is_swapped(net[0], Recognized)
    expected, e = gradients(exact, x, weights)
    found, f = gradients(net, x, weights)
    assert torch.equal(found, expected)
    assert all(
        torch.equal(a, b) if bits == 32 else (a - b).norm() < 0.02 * b.norm()
        for a, b in zip(f, e, strict=True)
    )
    if bits == 8:
        reasons = [r.reason for r in net.actnn.records if r.choice.action == "compress"]
        assert ("normalized input" in reasons) == is_norm
        if is_norm:
            assert len(reasons) == 1
    state = net.state_dict()
    actnn.uncompress(net)
    assert state.keys() == exact.state_dict().keys()
    assert not [name for name in vars(net[0]) if name.startswith("_actnn")]


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12])
def test_the_eps_that_is_recognized_is_the_right_one(eps):
    net = nn.Sequential(HandRMS(48, eps))
    net[0].other = 1e-5
    actnn.compress(net, bits=8, min_bytes=0)
    gradients(net, torch.randn(16, 40, 48), torch.ones(()))
    assert net[0]._actnn_norm.eps == eps


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return F.silu(super().forward(x))


@pytest.mark.filterwarnings("ignore:Compression adds", "ignore:Level L3 uses")
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, Activated])
def test_batch_norms_of_level_L3_are_exact_forward_and_close_backward(monkeypatch, kind, affine):
    monkeypatch.setattr(measured, "PLAIN_ERROR", 0.0)
    torch.manual_seed(0)
    exact = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), kind(8, affine=affine), nn.Conv2d(8, 4, 3)
    )
    net = actnn.compress(copy.deepcopy(exact), level="L3", bits=8, min_bytes=0)
    assert is_swapped(net[1], BatchNorm)
    x = torch.randn(4, 3, 12, 12) + 2
    weights = torch.randn(4, 4, 8, 8)
    for step in range(4):
        expected, e = gradients(exact, x, weights)
        found, f = gradients(net, x, weights)
        assert torch.equal(found, expected), step
        assert all((a - b).norm() < 0.03 * b.norm() + 1e-4 for a, b in zip(f, e, strict=True))
    assert torch.equal(net[1].running_var, exact[1].running_var)
    assert has_node(net(x.requires_grad_()), "_BatchNorm")


def test_noise_does_not_grow_through_batch_norms():
    """The first layer's gradient is not larger than the exact one, however deep the stack."""
    torch.manual_seed(0)
    layers = []
    for _ in range(10):
        layers += [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    exact = nn.Sequential(*layers)
    net = copy.deepcopy(exact)
    actnn.compress(net, level="L3", bits=1, min_bytes=0)
    net.actnn.adaptive = Equal(net, 1, 256)
    x, weights = torch.randn(8, 3 + 5, 16, 16), torch.randn(8, 8, 16, 16)
    sizes = [gradients(each, x, weights)[1][1].norm() for each in (exact, net)]
    assert sizes[1] < 3 * sizes[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_batch_norms_in_other_types(dtype):
    """Level L3 multiplies weights by factors that float16 cannot hold."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)).to(dtype)
    x, weights = torch.randn(4, 3, 6, 6, dtype=dtype), torch.randn(4, 4, 6, 6, dtype=dtype)
    compressed = actnn.compress(copy.deepcopy(net), level="L3", bits=8, min_bytes=0)
    exact, found = gradients(net, x, weights)[1], gradients(compressed, x, weights)[1]
    for a, b in zip(exact, found, strict=True):
        assert b.dtype == dtype
        assert (a - b).abs().max() < 0.05 * max(a.abs().max() for a in exact)
    with torch.no_grad():  # channels that are one number, and decode as the noise of others
        compressed[0].weight[:4] = 0
    assert all(each.isfinite().all() for each in gradients(compressed, x, weights)[1])
