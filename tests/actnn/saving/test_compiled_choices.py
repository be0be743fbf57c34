"""Choices by path reach code that is compiled, also modules that are compiled by themselves."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import actnn
from actnn.saving.compiled import CompiledCall, GraphHooks
from sweeps import first_of

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.b(torch.sin(self.a(x)))


class Net(nn.Module):
    def __init__(self, checkpoints=False):
        super().__init__()
        self.a, self.blocks = nn.Linear(64, 64), nn.ModuleList(Block() for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.a(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


@pytest.fixture
def traced(monkeypatch):
    """(path, bits) of the tensors about which compiled code decides."""
    found, decide = set(), GraphHooks._bits

    def bits(self, saving, x, node, size):
        got = decide(self, saving, x, node, size)
        found.add((self._path(node), got))
        return got

    monkeypatch.setattr(GraphHooks, "_bits", bits)
    torch._dynamo.reset()
    return found


def compiled(net, whole):
    if whole:
        return torch.compile(net, backend="aot_eager")
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return net


def step(run, traced):
    traced.clear()
    run(torch.randn(64, 64)).sum().backward()
    return dict(traced)


@pytest.mark.parametrize("whole", first_of([False, True], 1))
def test_choices_reach_compiled_code_when_they_change(whole, traced):
    net = actnn.compress(Net(), bits=8, min_bytes=1024)
    run = compiled(net, whole)
    assert set(step(run, traced).values()) == {8}
    assert not step(run, traced)
    # The model has an 'a', too, which is not that of a block.
    choices = {"a": 7, "blocks.0": 2, "blocks.1.a": 3, "blocks.2": 32}
    net.actnn.set_choices({where: actnn.Choice("compress", n) for where, n in choices.items()})
    found = step(run, traced)
    wanted = {"blocks.0": 2, "blocks.0.a": 2, "blocks.1": 8, "blocks.1.a": 3}
    wanted |= {"blocks.2": None, "blocks.2.a": None}
    assert {path: bits for path, bits in found.items() if path in wanted} == wanted
    net.actnn.set_choices({"blocks": actnn.Choice("keep")})
    found = step(run, traced)
    assert {bits for path, bits in found.items() if path.startswith("blocks")} == {None}
    net.actnn.set_choices({})
    step(run, traced)
    assert not step(run, traced)


def test_blocks_with_the_same_choices_share_code(traced):
    net = compiled(actnn.compress(Net(), bits=8, min_bytes=1024), whole=False)
    net.actnn.set_choices({f"blocks.{i}.a": actnn.Choice("compress", 3) for i in range(3)})
    found = step(net, traced)
    assert found == {"blocks.0": 8, "blocks.0.a": 3}


@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_of_compiled_blocks_with_choices(checkpoints):
    torch.manual_seed(0)
    torch._dynamo.reset()
    net, x = Net(checkpoints), torch.randn(64, 64)
    exact = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
    compiled(actnn.compress(net, bits=2, min_bytes=1024), whole=False)
    net.actnn.set_choices({"": actnn.Choice("keep")})
    found = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-6)


class Attention(Block):
    def forward(self, x):
        heads = self.a(x).view(4, 16, 4, 16).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        mixed = nn.functional.dropout(mixed, 0.25)
        return x + self.b(torch.sin(mixed).transpose(1, 2).reshape(64, 64))


@pytest.mark.parametrize(
    "backend",
    ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_random_operators_in_compiled_checkpoints(backend):
    """Their states are saved, which the backward graph calls otherwise."""

    def gradients(run):
        torch.manual_seed(1)
        return torch.autograd.grad(run(x).square().mean(), list(net.parameters()))

    torch.manual_seed(0)
    torch._dynamo.reset()
    net, x = Net(checkpoints=True), torch.randn(64, 64)
    net.blocks = nn.ModuleList(Attention() for _ in range(2))
    exact = gradients(torch.compile(net, backend=backend))
    for bits, tolerance in ((32, 1e-6), (8, 0.02)):
        torch._dynamo.reset()
        actnn.compress(net, bits=bits, min_bytes=0)
        found = gradients(torch.compile(net, backend=backend))
        for a, b in zip(found, exact, strict=True):
            assert (a - b).norm() <= tolerance * b.norm()


def test_compiled_blocks_of_copies_and_of_models_that_are_plain_again():
    torch._dynamo.reset()
    net = compiled(actnn.compress(Net(), bits=4, min_bytes=1024), whole=False)
    net.actnn.set_choices({"blocks.0": actnn.Choice("keep")})
    x = torch.randn(64, 64)
    net(x).sum().backward()
    assert isinstance(net.blocks[0]._compiled_call_impl, CompiledCall)
    other = copy.deepcopy(net)
    other(x).sum().backward()
    actnn.uncompress(net)
    assert not isinstance(net.blocks[0]._compiled_call_impl, CompiledCall)
    net(x).sum().backward()
    actnn.compress(net, bits=4, min_bytes=1024)
    net(x).sum().backward()


@pytest.mark.parametrize("name", ["expm1", "elu", "softplus"])
def test_results_that_enter_their_own_derivative_have_as_many_bits_as_uncompiled(name):
    """With 2 bits, noise of a result becomes bias."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    function = getattr(torch, name, None) or getattr(nn.functional, name)

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 256), nn.Linear(256, 8)

        def forward(self, x):
            return self.b(function(self.a(x)))

    def gradient(run):
        found = torch.autograd.grad((run(x) - 1).square().mean(), list(net.parameters()))
        return torch.cat([each.flatten() for each in found])

    net, x = Wide(), torch.randn(512, 32)
    exact = gradient(net)
    actnn.compress(net, bits=2, min_bytes=0)
    limit = 2 * (gradient(net) - exact).norm()
    assert (gradient(torch.compile(net, backend="aot_eager")) - exact).norm() < limit


class Rotary(nn.Module):
    """Rotates pairs of numbers by their position times frequencies, as language models do."""

    def __init__(self):
        super().__init__()
        self.linear, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("frequencies", torch.logspace(0, -3, 32).view(32, 1))

    def forward(self, x):
        positions = torch.arange(x.shape[1], dtype=torch.float32).view(1, -1)
        angles = (self.frequencies @ positions).t()
        a, b = self.linear(x).chunk(2, -1)
        c, s = angles.cos(), angles.sin()
        return self.out(torch.cat([a * c - b * s, b * c + a * s], -1))


@pytest.mark.parametrize("dynamic", first_of([False, True], 1))
def test_what_has_no_gradient_is_kept(traced, dynamic):
    """Angles, or their sines: of an angle of many turns, a 255th is more than one."""
    torch.manual_seed(0)
    net, x = Rotary(), torch.randn(2, 4096, 64)
    net(x).square().mean().backward()
    exact = net.linear.weight.grad.clone()
    actnn.compress(net, bits=8, min_bytes=4096)
    net.zero_grad()
    run = torch.compile(net, backend="aot_eager_decomp_partition", dynamic=dynamic)
    run(x).square().mean().backward()
    assert traced == {("", None), ("out", 8)}
    error = torch.linalg.vector_norm(net.linear.weight.grad - exact)
    assert error < 0.01 * torch.linalg.vector_norm(exact)
