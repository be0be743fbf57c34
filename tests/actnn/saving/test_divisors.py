"""What backward divides by is kept exact if it is near 0."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import actnn
from actnn.saving.compiled import encode_in_step
from actnn.saving.context import Saving
from actnn.saving.divisors import Recent

DIVIDED = "divided by in backward"
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
        off = sum(float((a.double() - b).square().sum()) for a, b in zip(got, wanted, strict=True))
        found.append((off / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5)
    return found


@noisy
@pytest.mark.parametrize(("bits", "limit"), [(8, 0.02), (4, 0.2)])
def test_linear_attention(bits, limit):
    torch.manual_seed(0)
    net = nn.Sequential(*(LinearAttention(32, 4) for _ in range(2)))
    found = errors(net, [torch.randn(8, 64, 32) for _ in range(5)], bits=bits)
    assert max(found) < limit
    assert found[0] < 1.3 * max(found[1:])
    assert DIVIDED in {record.reason for record in net.actnn.records}


@noisy
@pytest.mark.parametrize("named", [False, True], ids=["no model", "model"])
def test_every_first_step_of_a_context_is_right(named):
    torch.manual_seed(0)
    net = nn.Sequential(*(LinearAttention(32, 4) for _ in range(2)))
    parameters = list(net.parameters())
    for _ in range(3):
        x = torch.randn(8, 64, 32)
        exact = torch.cat([g.flatten() for g in torch.autograd.grad(net(x).sum(), parameters)])
        with actnn.compressed(bits=8, min_bytes=1024, model=net if named else None):
            loss = net(x).sum()
        got = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        assert float((got - exact).norm() / exact.norm()) < 0.02


@noisy
@pytest.mark.parametrize(
    "kind", ["autocast", "in place", "checkpoint inside", "checkpoint outside"]
)
def test_other_ways_of_training_have_a_right_first_step(kind):
    class Ways(LinearAttention):
        def forward(self, x):
            if kind == "checkpoint outside":
                return checkpoint(super().forward, x, use_reentrant=False)
            y = super().forward(x)
            if kind == "in place":
                y = y.div_(y.detach().square().add_(1))
            if kind == "checkpoint inside":
                y = checkpoint(lambda y: y / (y.square() + 1e-3), y, use_reentrant=False)
            return y

    torch.manual_seed(0)
    net = nn.Sequential(*(Ways(32, 4) for _ in range(2)))
    dtype = torch.bfloat16 if kind == "autocast" else None
    with torch.autocast("cpu", dtype=dtype, enabled=kind == "autocast"):
        # bfloat16 itself is far less exact than codes of 8 bits
        found = errors(net, [torch.randn(8, 64, 32) for _ in range(3)], bits=8)
    assert found[0] < 1.5 * max(found[1:])
    assert max(found) < (0.2 if kind == "autocast" else 0.05)


def test_of_a_chain_of_layers_few_tensors_are_held_beside_their_codes():
    most = []

    class Watched(Recent):
        def add(self, *saved):
            super().add(*saved)
            most.append(len(self._saved))

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actnn.saving.step.Recent", Watched)
        net = actnn.compress(nn.Sequential(*layers), min_bytes=1024)
        net(torch.randn(64, 64)).sum().backward()
        assert 1 <= max(most) <= 4
        steps = len(most)
        net(torch.randn(64, 64)).sum().backward()
    assert len(most) == steps  # later steps do nothing of it


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
@pytest.mark.parametrize("name", STEEP)
@pytest.mark.parametrize("bits", [8, 4])
def test_functions_with_steep_derivatives(name, bits):
    torch.manual_seed(0)
    net = Steep(STEEP[name])
    x = torch.randn(256, 32)
    found = errors(net, [x] * 3, bits=bits)
    assert max(found) < (0.02 if bits == 8 else 0.2)
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


def test_choices_hold_from_the_first_step():
    torch.manual_seed(0)
    batches = [torch.randn(8, 64, 32) for _ in range(3)]
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


def test_the_last_operation_of_a_function_is_known_from_its_first_backward():
    x = torch.randn(64, 64, requires_grad=True)
    saving = Saving(bits=8, min_bytes=0)
    found = []
    for step in range(2):
        warned = pytest.warns(actnn.ActNNWarning, match="Backward divides by numbers near 0 at ''")
        with saving:
            loss = torch.log(x.square() + 1e-6).sum()
        with contextlib.nullcontext() if step else warned:
            found.append(torch.autograd.grad(loss, x)[0])
    exact = torch.autograd.grad(torch.log(x.square() + 1e-6).sum(), x)[0]
    off = [float((each - exact).norm() / exact.norm()) for each in found]
    assert off[0] > 0.1 > 0.02 > off[1]


leaves = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile


def compiled(net):
    torch._dynamo.reset()  # else code that is compiled in many ways runs uncompiled
    for layer in net:
        layer.compile(backend="aot_eager")
    return net


@leaves
@noisy
@pytest.mark.parametrize(("bits", "limit"), [(8, 0.02), (4, 0.2)])
def test_compiled_code_keeps_what_it_divides_by_in_every_step(bits, limit):
    torch.manual_seed(0)
    net = compiled(nn.Sequential(*(LinearAttention(32, 4) for _ in range(2))))
    assert max(errors(net, [torch.randn(8, 64, 32) for _ in range(3)], bits=bits)) < limit


@leaves
@noisy
@pytest.mark.parametrize("name", STEEP)
def test_compiled_functions_with_steep_derivatives(name):
    torch.manual_seed(0)
    net = compiled(nn.Sequential(Steep(STEEP[name])))
    assert max(errors(net, [torch.randn(256, 32)] * 2, bits=8)) < 0.02


@leaves
def test_a_choice_compresses_what_compiled_code_divides_by(monkeypatch):
    torch.manual_seed(0)
    encoded = []

    def encode(*arguments):
        encoded.append(arguments)
        return encode_in_step(*arguments)

    monkeypatch.setattr("actnn.saving.compiled.encode_in_step", encode)
    net = actnn.compress(nn.Sequential(LinearAttention(32, 4)), bits=8, min_bytes=1024)
    counts = []
    for choices in ({}, {"": actnn.Choice("compress", 8)}):
        torch._dynamo.reset()
        net.actnn.set_choices(choices)
        encoded.clear()
        torch.compile(net, backend="aot_eager")(torch.randn(8, 64, 32)).sum().backward()
        counts.append(len(encoded))
    assert 0 < counts[0] < counts[1]
