"""What backward divides by is kept exact from the second step on, if it is near 0."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import actnn
from actnn.saving.context import Saving

DIVIDED = "divided by in backward"
near_0 = pytest.mark.filterwarnings("ignore:Backward divides by:actnn.ActNNWarning")
# what else such a network has to say
noisy = pytest.mark.filterwarnings("ignore:Compression adds:actnn.ActNNWarning")


class LinearAttention(nn.Module):
    """softmax(q k^T) v with the kernel relu(q) relu(k), as in EfficientViT."""

    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        N, T, C = x.shape
        q, k, v = self.qkv(x).view(N, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = q.relu(), k.relu()
        normalizer = q @ k.sum(-2, keepdim=True).transpose(-1, -2)
        y = (q @ (k.transpose(-1, -2) @ v)) / (normalizer + 1e-5)
        return x + self.out(y.transpose(1, 2).reshape(N, T, C))


def errors(net, batches, **settings):
    """Relative errors of the gradient in each step; weights stay the same."""
    parameters = list(net.parameters())
    exact = [torch.autograd.grad(net(x).square().mean(), parameters) for x in batches]
    actnn.compress(net, min_bytes=1024, **settings)
    found = []
    for x, wanted in zip(batches, exact, strict=True):
        got = torch.autograd.grad(net(x).square().mean(), parameters)
        off = sum(float((a - b).square().sum()) for a, b in zip(got, wanted, strict=True))
        found.append((off / sum(float(b.square().sum()) for b in wanted)) ** 0.5)
    return found


@noisy
@pytest.mark.parametrize(("bits", "limit"), [(8, 0.02), (4, 0.2)])
def test_linear_attention(bits, limit):
    torch.manual_seed(0)
    net = nn.Sequential(*(LinearAttention(32, 4) for _ in range(2)))
    with pytest.warns(actnn.ActNNWarning, match="Backward divides by numbers near 0 at '0'|'1'"):
        found = errors(net, [torch.randn(8, 64, 32) for _ in range(5)], bits=bits)
    assert found[0] > 2 * limit
    assert max(found[1:]) < limit
    assert DIVIDED in {record.reason for record in net.actnn.records}


STEEP = {
    "div": lambda x: torch.ones_like(x) / (x.square() + 1e-6),
    "reciprocal": lambda x: 1 / (x.square() + 1e-6),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 1e-6),
    "numerator": lambda x: x / (x.square().sum(-1, keepdim=True) - 20).square(),
    "log": lambda x: torch.log(x.square() + 1e-6),
    "log2": lambda x: torch.log2(x.square() + 1e-6),
    "log1p": lambda x: torch.log1p(x.mul(8).sigmoid().mul(0.999).neg()),
    "sqrt": lambda x: torch.sqrt(x.square() + 1e-8),
    "pow": lambda x: (x.square() + 1e-6).pow(-0.5),
    "pow of a tensor": lambda x: (x.square() + 1e-6).pow(torch.full_like(x, 0.25)),
    "atan2": lambda x: torch.atan2(x, x.roll(1, -1) * 0.1),
    "acos": lambda x: torch.acos(x.mul(4).tanh() * 0.9999),
    "erfinv": lambda x: torch.erfinv(x.mul(3).tanh() * 0.999),
    "logit": lambda x: torch.logit(x.mul(8).sigmoid() * 0.998 + 0.001),
    "norm": lambda x: x.unflatten(-1, (-1, 2)).norm(dim=-1),
    "linalg norm": lambda x: torch.linalg.vector_norm(x.unflatten(-1, (-1, 2)), dim=-1),
    "binary cross entropy": lambda x: F.binary_cross_entropy(
        x.mul(3).sigmoid(), torch.full_like(x, 0.5), reduction="none"
    ),
}


class Steep(nn.Module):
    def __init__(self, steep):
        super().__init__()
        self.inside, self.steep = nn.Linear(32, 64), steep

    def forward(self, x):
        return self.steep(self.inside(x))


@noisy
@near_0
@pytest.mark.parametrize("name", STEEP)
@pytest.mark.parametrize("bits", [8, 4])
def test_functions_with_steep_derivatives(name, bits):
    torch.manual_seed(0)
    net = Steep(STEEP[name])
    x = torch.randn(256, 32)
    first, *others = errors(net, [x] * 3, bits=bits)
    assert not first < max(others)  # or it is NaN
    assert max(others) < (0.02 if bits == 8 else 0.2)
    assert DIVIDED in {record.reason for record in net.actnn.records}


FLAT = {
    "normalize": lambda x: F.normalize(x, dim=-1)[..., :5],
    "square": lambda x: x.pow(2),
    "divided by a number": lambda x: x.tanh() / 3,
    "far from 0": lambda x: 1 / (x.sigmoid() + 2),
    "softmax": lambda x: x.softmax(-1).log_softmax(-1),
}


@noisy
@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("bits", [8, 2])
def test_what_codes_tell_from_0_is_compressed(name, bits):
    torch.manual_seed(0)
    net = Steep(FLAT[name])
    errors(net, [torch.randn(256, 32) for _ in range(3)], bits=bits)
    assert DIVIDED not in {record.reason for record in net.actnn.records}


def test_the_warning_comes_once_and_choices_hold_from_the_first_step():
    torch.manual_seed(0)
    batches = [torch.randn(8, 64, 32) for _ in range(3)]
    net = nn.Sequential(LinearAttention(32, 4), LinearAttention(32, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors(net, batches, bits=8)
    assert sum("Backward divides" in str(each.message) for each in caught) == 1
    net = nn.Sequential(LinearAttention(32, 4), LinearAttention(32, 4))
    actnn.compress(net, bits=8, min_bytes=1024)
    net.actnn.set_choices({path: actnn.Choice("keep") for path in ("0", "1")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in batches:
            net(x).square().mean().backward()
    net.actnn.set_choices({path: actnn.Choice("compress", 8) for path in ("0", "1")})
    net(batches[0])
    assert DIVIDED not in {record.reason for record in net.actnn.records}


@noisy
def test_what_was_seen_of_exact_tensors_holds_for_codes():
    torch.manual_seed(0)
    net = actnn.compress(nn.Sequential(LinearAttention(32, 4)), bits=8, min_bytes=1024)
    net.actnn.set_choices({"": actnn.Choice("keep")})
    for _ in range(3):
        net(torch.randn(8, 64, 32)).square().mean().backward()
    net.actnn.set_choices({})
    net(torch.randn(8, 64, 32))
    assert DIVIDED in {record.reason for record in net.actnn.records}


@near_0
def test_a_function_without_modules():
    x = torch.randn(64, 64, requires_grad=True)
    saving = Saving(bits=8, min_bytes=0)
    found = []
    for _ in range(2):
        with saving:
            loss = torch.log(x.square() + 1e-6).sum()
        found.append(torch.autograd.grad(loss, x)[0])
    exact = torch.autograd.grad(torch.log(x.square() + 1e-6).sum(), x)[0]
    off = [float((each - exact).norm() / exact.norm()) for each in found]
    assert off[0] > 0.1 > 0.02 > off[1]
