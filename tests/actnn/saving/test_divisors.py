"""What backward divides by is kept exact if it is near 0."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from actnn_models import distance
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import actnn
from actnn.saving import graph_order
from actnn.saving.compiled import encode_in_step
from actnn.saving.context import Saving
from actnn.saving.divisors import Recent
from sweeps import first_of

DIVIDED = "divided by in backward"
leaves = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
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


def gradient(value, parameters):
    """The whole gradient, flat."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])


def errors(net, batches, backend=None, **settings):
    """Relative errors of the gradient in each step; weights stay the same.

    With a backend, the layers of a compressed net are compiled.
    """
    parameters = list(net.parameters())
    exact = [torch.autograd.grad(net(x).square().mean(), parameters) for x in batches]
    actnn.compress(net, min_bytes=1024, **settings)
    if backend is not None:
        torch._dynamo.reset()  # else code that is compiled in many ways runs uncompiled
        for layer in net:
            layer.compile(backend=backend)
    found = []
    for x, wanted in zip(batches, exact, strict=True):
        got = torch.autograd.grad(net(x).square().mean(), parameters)
        off = sum(float((a.double() - b).square().sum()) for a, b in zip(got, wanted, strict=True))
        found.append((off / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5)
    return found


COMPILED = "aot_eager_decomp_partition"  # the graphs of Inductor, without its compilation


def error(net, x, loss, way, named=False, plain=None):
    """The largest relative error of the gradient of `loss(net(x))` in three steps at 8 bits.

    `way` is "model", "context", or the backend of a compiled model. `plain` runs the net exactly.
    """
    parameters, saving, run = list(net.parameters()), nullcontext(), net
    exact = gradient(loss((net if plain is None else plain)(x)), parameters)
    torch._dynamo.reset()
    if way == "context":
        saving = Saving(bits=8, min_bytes=1024, model=net if named else None)
    else:
        actnn.compress(net, bits=8, min_bytes=1024)
    if way not in ("model", "context"):
        run = torch.compile(net, backend=way)
    found = []
    for _ in range(3):
        with saving:
            y = run(x)
        found.append(distance(gradient(loss(y), parameters), exact))
    return max(found)


def itself(value):
    return value


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
        exact = gradient(net(x).sum(), parameters)
        with actnn.compressed(bits=8, min_bytes=1024, model=net if named else None):
            loss = net(x).sum()
        got = gradient(loss, parameters)
        assert distance(got, exact) < 0.02


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
    assert found[0] <= 1.5 * max(found[1:])  # 0 where nothing but inputs of checkpoints is held
    assert max(found) < (0.2 if kind == "autocast" else 0.05)


@pytest.mark.parametrize("last", [torch.tanh, torch.sigmoid, lambda x: x.softmax(-1)], ids=range(3))
@pytest.mark.filterwarnings("error::actnn.ActNNWarning")
def test_the_end_of_a_checkpointed_block_divides_by_nothing(last):
    torch.manual_seed(0)
    first, second = nn.Linear(32, 64), nn.Linear(64, 64)
    parameters = [*first.parameters(), *second.parameters()]

    def loss():
        y = checkpoint(lambda y: last(second(y)), first(x), use_reentrant=False)
        return y.square().mean()

    x = torch.randn(64, 32)
    saving = Saving(min_bytes=1024, policy=lambda info: actnn.Choice("compress", 8))
    exact = gradient(loss(), parameters)
    for _ in range(2):
        with saving:
            value = loss()
        assert 0 < distance(gradient(value, parameters), exact) < 0.02


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


def squares(x):
    """Nearly singular matrices."""
    a = x.view(-1, 8, 8)
    return a @ a.mT + 1e-2 * torch.eye(8)


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
    "prod": lambda x: x.unflatten(-1, (-1, 4)).prod(-1),
    "copysign": lambda x: torch.copysign(x, x.roll(1, -1)),
    "norm": lambda x: x.unflatten(-1, (-1, 2)).norm(dim=-1),
    "linalg norm": lambda x: torch.linalg.vector_norm(x.unflatten(-1, (-1, 2)), dim=-1),
    "distance": lambda x: torch.cdist(x.view(-1, 8, 8), x.view(-1, 8, 8) + 1e-3),
    "inverse": lambda x: torch.linalg.inv_ex(squares(x))[0],
    "inverse of a factor": lambda x: torch.linalg.inv_ex(torch.linalg.cholesky_ex(squares(x))[0])[
        0
    ],
    "solve": lambda x: torch.linalg.solve_ex(squares(x), x.view(-1, 8, 8)[..., :1])[0],
    "eigenvectors": lambda x: torch.linalg.eigh(squares(x))[1].square(),
    "singular vectors": lambda x: torch.linalg.svd(x.view(-1, 8, 8))[0].square(),
    "logaddexp": lambda x: torch.logaddexp(x * 100, (x * 100).roll(1, -1)),
    "log_ndtr": lambda x: torch.special.log_ndtr(x * 10),
    "binary cross entropy": lambda x: F.binary_cross_entropy(
        x.mul(3).sigmoid(), torch.full_like(x, 0.5), reduction="none"
    ),
    "deviation and mean": lambda x: torch.std_mean(x.unflatten(-1, (-1, 2)), -1)[0],
    "norm without an order": lambda x: torch.ops.aten.norm.ScalarOpt_dim(
        x.unflatten(-1, (-1, 2)), None, [-1]
    ),
    "norm of half an order": lambda x: x.unflatten(-1, (-1, 4)).norm(0.5, -1).sqrt(),
    "Bessel function": torch.special.i1,
    "entropy": lambda x: torch.special.entr(x.square() + 1e-6),
    "complex numbers": lambda x: (1 / torch.complex(x.square() + 1e-3, x * 0.1)).real,
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
    "scaled": lambda x: (F.normalize(x, dim=-1) * torch.arange(x.shape[-1])).sin(),
    "square": lambda x: x.pow(2),
    "divided by a number": lambda x: (x.tanh() / 3).sin(),
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
    for x in batches:  # warnings are errors here
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


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize(
    "last",
    [
        lambda x: torch.log(x.square() + 1e-6).sum(),
        lambda x: (1 / (x.square() + 1e-3)).view(-1),  # its view is not seen, either
        lambda x: x / (x.square().sum(-1, keepdim=True) - 4096).square(),
        lambda x: (x.square() + 1e-6).view(8, 8, 64)[:, :4].transpose(0, 1).log(),
    ],
    ids=["log", "division", "product", "view"],
)
def test_the_last_operation_of_a_function_is_right_in_the_first_step(last, inside):
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(64, 64)
    exact = torch.autograd.grad(last(x @ weight).sum(), weight)[0]
    saving = Saving(bits=8, min_bytes=0)
    for _ in range(3):
        with saving:
            loss = last(x @ weight)
            found = torch.autograd.grad(loss.sum(), weight)[0] if inside else None
        if found is None:
            found = torch.autograd.grad(loss.sum(), weight)[0]
        assert distance(found, exact) < 0.02
        del loss
        assert saving.held_bytes == 0
    assert DIVIDED in {record.reason for record in saving.records}


def test_what_is_held_beside_codes_is_counted_and_goes_with_the_first_step():
    x = torch.randn(64, 64, requires_grad=True)
    saving, held = Saving(bits=8, min_bytes=0), []
    for _ in range(2):
        with saving:
            y = torch.sin(x * 2)
        held.append(saving.held_bytes)
        y.sum().backward()
    assert held == [held[1] + x.nbytes, sum(record.held for record in saving.records)]
    saving = Saving(bits=8, min_bytes=0)
    with saving:
        y = torch.sin(torch.sin(x * 2)).sum()
        loss = y.square()  # one number changes all gradients alike
    beside = saving.held_bytes - sum(record.held for record in saving.records)
    assert beside == y.nbytes
    loss.backward()
    assert saving.held_bytes == 0


ENDS = {
    "sigmoid": (torch.sigmoid, nn.Sigmoid(), lambda p: F.binary_cross_entropy(p, p.gt(0.9) * 1.0)),
    "tanh": (torch.tanh, nn.Tanh(), lambda y: torch.log(1 - y.square() + 1e-6).mean()),
    "softmax": (lambda x: x.softmax(-1), nn.Softmax(-1), lambda p: p[:, 0].log().mean()),
    "softplus": (None, nn.Softplus(), lambda v: (1 / v + v.log()).mean()),
}


class Ends(nn.Module):
    """A network that ends in a function, by which the loss divides: in the network or after it."""

    def __init__(self, last, loss):
        super().__init__()
        self.inside, self.last, self.loss = nn.Linear(32, 64), last, loss
        with torch.no_grad():
            self.inside.weight.mul_(8)  # logits of a trained network

    def forward(self, x):
        return self.loss(self.last(self.inside(x)))


@noisy
@pytest.mark.parametrize(
    ("name", "module"),
    [(name, module) for name in ENDS for module in (False, True) if ENDS[name][module]],
)
@pytest.mark.parametrize("where", ["loss outside", "loss inside"])
def test_a_loss_may_divide_by_the_results_of_a_network(name, module, where):
    torch.manual_seed(0)
    last, loss = ENDS[name][module], ENDS[name][2]
    inside, outside = (loss, itself) if where == "loss inside" else (nn.Identity(), loss)
    net = Ends(last, inside)
    assert error(net, torch.randn(256, 32), outside, "model") < 0.02
    assert DIVIDED in {record.reason for record in net.actnn.records}


LEARNED = {
    "softmax": lambda x: x.softmax(-1)[:, 0].log(),
    "softmax and a number": lambda x: (x.softmax(-1) + 1e-8).log()[:, 0],
    "softmax by hand": lambda x: softmax_by_hand(x)[:, 0].log(),
    "binary cross-entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.gt(0.5) * 1.0),
    "division": lambda x: 1 / (x.exp() + 1e-3),
    "focal loss": lambda x: (1 - x.softmax(-1)).square() * x.softmax(-1).clamp_min(1e-12).log(),
}


@noisy
@pytest.mark.parametrize("way", ["model", "context"])
@pytest.mark.parametrize("name", LEARNED)
def test_results_of_networks_come_near_0_after_the_first_step(name, way):
    torch.manual_seed(0)
    net, x, seen = Steep(LEARNED[name]), torch.randn(256, 32), []
    plain, parameters = deepcopy(net), list(net.parameters())
    saving = Saving(bits=8, min_bytes=0, model=net)
    if way == "model":
        saving = actnn.compress(net, bits=8, min_bytes=0).actnn
    for scale in (1, 30, 30):
        exact = gradient(plain(x * scale).mean(), list(plain.parameters()))
        with saving if way == "context" else nullcontext():
            loss = net(x * scale).mean()
        seen.append(distance(gradient(loss, parameters), exact))
    assert max(seen) < 0.02


ELEMENTS = {
    "log": lambda x: (x.abs() + 1e-4).log(),
    "log1p": lambda x: torch.log1p(x.abs() - 1),
    "root": lambda x: (x.square() + 1e-6).sqrt(),
    "power": lambda x: (x.abs() + 1e-4).pow(0.3),
    "division": lambda x: x / (x.roll(1, -1).abs() + 1e-2),
    "angle": lambda x: torch.atan2(x, x.roll(1, -1)),
    "gamma function": lambda x: torch.lgamma(x.abs() + 1e-4),
    "of ReLU": lambda x: (x.relu() + 1e-3).log(),
}


def errors_as_biases_change(function, steps):
    """Errors of the gradient at 8 bits in steps whose biases are first 4, then 0."""
    torch.manual_seed(0)
    net, x = Steep(function), torch.randn(256, 32)
    plain, found = deepcopy(net), []
    actnn.compress(net, bits=8, min_bytes=0)
    for step in range(steps):
        with torch.no_grad():
            for each in (net, plain):
                each.inside.bias.fill_(4.0 if step < 5 else 0.0)
        exact = gradient(plain(x).square().mean(), list(plain.parameters()))
        found.append(distance(gradient(net(x).square().mean(), list(net.parameters())), exact))
    return found


@pytest.mark.parametrize("name", ELEMENTS)
def test_what_layers_make_may_cross_0_in_any_step(name):
    assert max(errors_as_biases_change(ELEMENTS[name], 9)) < 0.02


@noisy
def test_reductions_that_come_near_0_are_found_within_16_steps():
    def deviations(x):
        return x.unflatten(-1, (-1, 2)).norm(dim=-1).log()

    with pytest.warns(actnn.ActNNWarning, match="near 0"):
        found = errors_as_biases_change(deviations, 20)
    assert max(found[-2:]) < 0.02


def cross_entropy(p):
    return F.binary_cross_entropy(p, torch.arange(p.numel()).view_as(p) % 3 / 2)


def log_of_first(p):
    return -(p[..., 0] + 1e-12).log().mean()


# What a network makes of the result of such a function, and what the loss makes of that.
SHAPED = {
    "clamp": (lambda x: x.sigmoid().clamp(1e-7, 1 - 1e-7), cross_entropy),
    "slices": (lambda x: torch.cat([x.sigmoid()[:, :32], x.sigmoid()[:, 32:]], 1), cross_entropy),
    "stack": (lambda x: torch.stack([(x + i / 50).sigmoid() for i in range(50)]), cross_entropy),
    "mean": (lambda x: x.sigmoid().view(-1, 2, 64).mean(1), cross_entropy),
    "sum of 16": (lambda x: sum((x + i / 16).sigmoid() for i in range(16)) / 16, cross_entropy),
    "scale": (lambda x: 1 - (x.sigmoid() * 0.999 + 0.0005), cross_entropy),
    "tanh": (lambda x: (x.tanh() + 1) / 2, cross_entropy),
    "pool": (lambda x: F.avg_pool2d(x.sigmoid().view(-1, 1, 8, 8), 2), cross_entropy),
    "softplus": (lambda x: F.softplus(x) + 1e-6, lambda v: (1 / v + v.log()).mean()),
    # attention over time of audio taggers
    "weighted": (
        lambda x: (x.view(-1, 4, 16).softmax(1) * x.view(-1, 4, 16).sigmoid()).sum(1),
        lambda p: cross_entropy(p.clamp(0, 1)),
    ),
    # words that are copied from the source
    "pointer": (
        lambda x: (x.softmax(-1) / 2).scatter_add(
            1, torch.arange(63, -1, -1).expand(len(x), -1), (-x).softmax(-1) / 2
        ),
        log_of_first,
    ),
    "mixture": (
        lambda x: x.view(-1, 4, 16)[:, :, :1].softmax(1).mT @ x.view(-1, 4, 16).softmax(-1),
        log_of_first,
    ),
    # the forward algorithm of a hidden Markov model
    "products of products": (lambda x: forward_algorithm(x.view(-1, 8, 64)), log_of_first),
    "noisy labels": (lambda x: x.softmax(-1) @ (torch.eye(64) * 0.99 + 1e-4), log_of_first),
    "product of all": (
        lambda x: 1 - (1 - (x - 6).sigmoid().view(-1, 4, 64)).prod(1),
        lambda p: cross_entropy(p.clamp(1e-7, 1 - 1e-7)),
    ),
}


def forward_algorithm(x):
    emitted = (x / 8).softmax(-1)
    likely = emitted[:, 0]
    for t in range(1, x.shape[1]):
        moves = x[:1, t].mT.add(x[:1, t]).softmax(-1)
        likely = (likely @ moves) * emitted[:, t] * 64
    return likely


@noisy
@leaves
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in SHAPED for way in ("model", "context")]
    + first_of(
        [
            (name, COMPILED)
            for name in ("clamp", "softplus", "weighted", "mixture", "products of products")
        ],
        1,
    ),
)
def test_a_loss_may_divide_by_what_a_network_makes_of_such_results(name, way):
    torch.manual_seed(0)
    net, loss = Ends(SHAPED[name][0], nn.Identity()), SHAPED[name][1]
    net.inside.weight.data.mul_(3)
    torch._dynamo.reset()
    plain = torch.compile(net, backend=way) if way == COMPILED else net
    assert error(net, torch.randn(128, 32), loss, way, named=True, plain=plain) < 0.02


@pytest.mark.parametrize("way", ["model", "context"])
def test_a_result_may_also_be_used_by_a_layer(way):
    """As if a coarse class helped to find a fine one."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.coarse, self.fine = nn.Linear(32, 64), nn.Linear(64, 10)
            self.coarse.weight.data.mul_(16)

        def forward(self, x):
            p = self.coarse(x).softmax(-1)
            return p, self.fine(p)

    def loss(results):
        fine = F.cross_entropy(results[1], torch.arange(128) % 10)
        return log_of_first(results[0]) + fine

    torch.manual_seed(0)
    assert error(Both(), torch.randn(128, 32), loss, way) < 0.02


@pytest.fixture
def answers(monkeypatch):
    """What compiled code is told of each tensor: whether backward divides by it."""
    told = []

    def divides_by():
        told.append(graph_order.divides_by())
        return told[-1]

    monkeypatch.setattr("actnn.saving.compiled.divides_by", divides_by)
    torch._dynamo.reset()
    return told


@leaves
@pytest.mark.parametrize("last", [None, F.silu, F.gelu, lambda x: x * 3 + x], ids=range(4))
@pytest.mark.parametrize("way", ["model", "context", "compiled"])
def test_of_networks_with_other_ends_nothing_more_is_kept(way, last, answers):
    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 64, bias=last is not None)

        def forward(self, x):
            h = self.a(x)
            y = self.b(torch.tanh(h) * torch.sigmoid(h))
            return y if last is None else last(y)

    torch.manual_seed(0)
    net, x = Logits(), torch.randn(128, 32)
    saving = Saving(bits=8, min_bytes=1024, model=net)
    if way != "context":
        saving = actnn.compress(net, bits=8, min_bytes=1024).actnn
    if way == "compiled":
        torch.compile(net, backend=COMPILED)(x).sum().backward()
        assert answers
        assert not any(answers)
        return
    for _ in range(3):
        with saving if way == "context" else nullcontext():
            y = net(x)
        F.cross_entropy(y, torch.arange(128) % 64).backward()
    assert DIVIDED not in {record.reason for record in saving.records}


def test_a_choice_gives_codes_to_a_result_of_a_network():
    torch.manual_seed(0)
    net = actnn.compress(Ends(nn.Sigmoid(), nn.Identity()), bits=8, min_bytes=1024)
    x = torch.randn(256, 32)
    net(x).sum().backward()
    net.actnn.set_choices({"last": actnn.Choice("compress", 8)})
    for _ in range(2):
        net(x).sum().backward()
        assert "codes of the derivative" in {record.reason for record in net.actnn.records}


def covariance(distances):
    return torch.exp(-distances / 400) + 1e-4 * torch.eye(len(distances))


def squares_of_distances(y):
    return (y[:, None] - y[None]).square().sum(-1)


PROCESSES = {
    "differences": squares_of_distances,
    "distances": lambda y: torch.cdist(y, y).square(),
    "products": lambda y: y.square().sum(1)[:, None] + y.square().sum(1) - 2 * y @ y.T,
}


def likelihood(matrix):
    targets = torch.arange(len(matrix)) % 5 - 2.0
    fit = targets @ torch.linalg.solve(matrix, targets)
    return fit / 2 + torch.linalg.slogdet(matrix)[1] / 2


def covariances(y):
    centered = y - y.mean(0)
    return centered.T @ centered / len(y) + 1e-4 * torch.eye(y.shape[1])


def nearly_singular(y):
    a = y.view(-1, 8, 8)
    return a @ a.mT + 1e-4 * torch.eye(8)


# What a network makes of features, and what the loss makes of that.
SOLVED = {
    "inverse": (nearly_singular, lambda a: torch.linalg.inv(a).square().mean()),
    "determinant": (nearly_singular, lambda a: torch.linalg.slogdet(a)[1].mean()),
    "Cholesky": (
        covariances,
        lambda a: torch.linalg.inv_ex(torch.linalg.cholesky(a))[0].square().mean(),
    ),
}
for name, process in PROCESSES.items():
    SOLVED[f"{name} inside"] = (lambda y, p=process: likelihood(covariance(p(y))), itself)
    SOLVED[f"{name} outside"] = (lambda y, p=process: covariance(p(y)), likelihood)
COMPILED_TOO = ["inverse", "determinant", "Cholesky", "distances inside", "distances outside"]


def on_features(last):
    """A network that ends in a function."""
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64), Steep(last))
    net[-1].inside = nn.Identity()
    return net


@leaves
@noisy
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in SOLVED for way in ("model", "context")),
        *first_of([(name, COMPILED) for name in COMPILED_TOO], 1),
    ],
)
def test_what_makes_a_nearly_singular_matrix_is_exact(name, way):
    """As of covariances, and of a Gaussian process on features."""
    torch.manual_seed(0)
    last, loss = SOLVED[name]
    assert error(on_features(last), torch.randn(64, 32), loss, way) < 0.04


@leaves
@noisy
def test_compiled_code_keeps_what_it_divides_by_in_every_step():
    torch.manual_seed(0)
    net = nn.Sequential(*(LinearAttention(32, 4) for _ in range(2)))
    batches = [torch.randn(8, 64, 32) for _ in range(3)]
    assert max(errors(net, batches, backend="aot_eager", bits=8)) < 0.02


class Side(nn.Module):
    """Networks side by side, whose gradients have nothing in common, as one graph."""

    def __init__(self, networks):
        super().__init__()
        self.networks = nn.ModuleDict(networks)

    def forward(self, x):
        return [network(x).square().mean() for network in self.networks.values()]


@pytest.mark.slow
@leaves
@noisy
def test_compiled_functions_with_steep_derivatives():
    torch.manual_seed(0)
    torch._dynamo.reset()
    net, x = Side({name: Steep(steep) for name, steep in STEEP.items()}), torch.randn(256, 32)
    weights = [network.inside.weight for network in net.networks.values()]
    exact = torch.autograd.grad(sum(net(x)), weights)
    run = torch.compile(actnn.compress(net, bits=8, min_bytes=1024), backend="aot_eager")
    found = torch.autograd.grad(sum(run(x)), weights)
    for name, ours, wanted in zip(STEEP, found, exact, strict=True):
        off = float((ours.double() - wanted).norm() / wanted.double().norm())
        assert off < 0.02, name


class PaddedAttention(LinearAttention):
    """Numerators and divisors are columns of one product, as in timm's EfficientViT."""

    def forward(self, x):
        N, T, C = x.shape
        q, k, v = self.qkv(x).view(N, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = q.relu(), k.relu(), F.pad(v, (0, 1), value=1.0)
        y = (q @ (k.transpose(-1, -2) @ v)).float()
        y = y[..., :-1] / (y.index_select(-1, torch.tensor([y.shape[-1] - 1])) + 1e-5)
        return x + self.out(y.to(x.dtype).transpose(1, 2).reshape(N, T, C))


@leaves
@noisy
@pytest.mark.parametrize("dtype", first_of([torch.float32, torch.bfloat16], 1))
def test_decompositions_of_compilers_keep_what_they_divide_by(dtype):
    torch.manual_seed(0)
    net, batches = nn.Sequential(PaddedAttention(32, 4)), [torch.randn(8, 64, 32)] * 2
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        found = errors(net, batches, backend=COMPILED, bits=8)
    assert max(found) < (0.02 if dtype == torch.float32 else 0.1)


def softmax_by_hand(x):
    e = (x - x.detach().amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


FAR_FROM_0 = {
    "softmax by hand": lambda x: softmax_by_hand(x).sin(),
    "silu": lambda x: F.silu(x).sin(),
    "mean of some": lambda x: F.cross_entropy(x, torch.arange(64)),
}


@leaves
@pytest.mark.parametrize("name", FAR_FROM_0)
def test_compiled_code_compresses_what_it_divides_by_numbers_far_from_0(name, answers):
    torch.manual_seed(0)
    net = actnn.compress(Steep(FAR_FROM_0[name]), bits=8, min_bytes=1024)
    torch.compile(net, backend=COMPILED)(torch.randn(64, 32)).sum().backward()
    assert answers
    assert not any(answers)


@pytest.fixture
def encoded(monkeypatch):
    """What compiled code encodes while it is traced."""
    encoded = []

    def encode(*arguments):
        encoded.append(arguments)
        return encode_in_step(*arguments)

    monkeypatch.setattr("actnn.saving.compiled.encode_in_step", encode)
    return encoded


@leaves
@pytest.mark.parametrize("backend", ["aot_eager", COMPILED])
@pytest.mark.parametrize("dtype", first_of([torch.float32, torch.bfloat16], 1))
def test_compiled_code_keeps_logarithms_of_what_it_divides_by(dtype, backend, encoded):
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = Steep(lambda x: 1 / x.log_softmax(-1).exp()).to(dtype)
    net = torch.compile(actnn.compress(net, bits=8, min_bytes=1024), backend=backend)
    net(torch.randn(64, 32, dtype=dtype)).sum().backward()
    assert not encoded


@leaves
def test_a_choice_compresses_what_compiled_code_divides_by(encoded):
    torch.manual_seed(0)
    net = actnn.compress(nn.Sequential(LinearAttention(32, 4)), bits=8, min_bytes=1024)
    counts = []
    for choices in ({}, {"": actnn.Choice("compress", 8)}):
        torch._dynamo.reset()
        net.actnn.set_choices(choices)
        encoded.clear()
        torch.compile(net, backend="aot_eager")(torch.randn(8, 64, 32)).sum().backward()
        counts.append(len(encoded))
    assert 0 < counts[0] < counts[1]


@leaves
@noisy
@pytest.mark.parametrize("backend", ["aot_eager", COMPILED])
def test_compiled_logarithms_of_sums_have_exact_operands(backend):
    """Beside a number that is as good as infinite, codes tell no others."""
    torch.manual_seed(0)

    def masked(y):
        return torch.logsumexp(torch.stack([torch.full_like(y, -1e8), y, y.flip(-1)], -1), -1).sum()

    assert error(on_features(masked), torch.randn(64, 32), itself, backend) < 0.04


COSINES = {
    "cosine similarity": F.cosine_similarity,
    "of normalized tensors": lambda a, b: (F.normalize(a) * F.normalize(b)).sum(-1),
    "by hand": lambda a, b: (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)),
    "without gradient": lambda a, b: F.cosine_similarity(a, b.detach()),
}


@pytest.mark.filterwarnings("ignore:Backward divides:actnn.ActNNWarning")
@pytest.mark.parametrize("name", COSINES)
def test_of_similar_tensors_the_cosine_has_exact_operands(name):
    """Its gradient is what differs between them, beside which the noise of codes is large."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
    other = deepcopy(net)
    parameters, x = list(net.parameters()), torch.randn(128, 32)

    def loss():
        return COSINES[name](net(x), other(x + 0.1 * near)).mean()

    near = torch.randn_like(x)
    exact, saving = gradient(loss(), parameters), Saving(bits=8, min_bytes=0)
    for _ in range(3):
        with saving:
            value = loss()
        found = gradient(value, parameters)
        assert distance(found, exact) < 0.05
