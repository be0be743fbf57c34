"""Modules in chunks: gradients are those of the module, and few tokens run at a time."""

import copy
import pickle
import weakref

import pytest
import torch
from actnn_models import Block
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import actnn
from actnn import ActNNError, Choice
from actnn.layers.chunks import InChunks
from actnn.planning.meter import HostMeter
from actnn.saving.module_classes import is_swapped


class Mlp(nn.Module):
    """Works on tokens, and counts those of each call."""

    def __init__(self, width=4, inner=6, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)
        self.calls = []

    def forward(self, x):
        self.calls.append(x.shape[-2])
        return self.down(self.dropout(torch.relu(self.up(x))))


def whole_numbers(module, x):
    """Make all sums exact, in any order."""
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(torch.randint(-3, 4, each.shape))
    return module.double(), torch.randint(-3, 4, x).double()


def gradients(module, x, needs=True):
    module.zero_grad()
    x = x.detach().clone().requires_grad_(needs)
    y = module(x)
    (y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(each.grad for each in module.parameters())]


def same(first, second):
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (7, 4), (2, 9, 4), (3, 2, 8, 4)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8, 100])
@pytest.mark.parametrize("needs", [True, False], ids=["input", "weights only"])
def test_gradients_are_those_of_the_module(shape, tokens, needs):
    module, x = whole_numbers(Mlp(), shape)
    exact = gradients(module, x, needs)
    assert same(exact, gradients(actnn.in_chunks(module, tokens), x, needs))
    assert same(exact, gradients(actnn.in_chunks(module, None), x, needs))
    assert type(module) is Mlp
    assert not [name for name in vars(module) if name.startswith("_actnn")]


@pytest.mark.parametrize("frozen", ["up", "down", "all"])
def test_frozen_weights_get_no_gradient(frozen):
    module, x = whole_numbers(Mlp(), (5, 4))
    for name, each in module.named_parameters():
        each.requires_grad_(frozen != "all" and not name.startswith(frozen))
    exact = gradients(module, x)
    assert same(exact, gradients(actnn.in_chunks(module, 2), x))
    assert (None in [each is None or None for each in exact]) or frozen == "all"


def test_without_gradients_the_module_runs_in_chunks_too():
    module, x = whole_numbers(Mlp(), (7, 4))
    y = module(x)
    actnn.in_chunks(module, 3)(x)
    module.calls.clear()
    with torch.no_grad():
        assert torch.equal(module(x), y)
    assert module.calls == [3, 3, 1]


def test_backward_runs_each_chunk_once_inside_of_a_checkpoint():
    module, x = whole_numbers(Mlp(), (7, 4))
    block = nn.Sequential(module)
    block.forward = lambda z: 3 * module(2 * z)
    exact = gradients(block, x)
    actnn.in_chunks(module, 3)
    block.forward = lambda z: checkpoint(lambda z: 3 * module(2 * z), z, use_reentrant=False)
    module.calls.clear()
    assert same(exact, gradients(block, x))
    assert module.calls == [6, 3, 3, *[3, 3, 1] * 2]  # the check, forward, and backward
    module.calls.clear()
    assert same(exact, gradients(block, x))
    assert module.calls == [3, 3, 1] * 2


def test_chunks_are_reentrant_in_checkpoints_of_both_kinds_and_in_each_other():
    module, x = whole_numbers(Mlp(), (9, 4))
    exact = gradients(nn.Sequential(module), x)
    outer = actnn.in_chunks(nn.Sequential(actnn.in_chunks(module, 2)), 5)
    assert same(exact, gradients(outer, x))
    run = type(outer).forward
    for reentrant in (True, False):
        block = nn.Sequential(module)
        block.forward = lambda z, r=reentrant: checkpoint(run, outer, z, use_reentrant=r)
        assert same(exact, gradients(block, x))


def test_backward_may_run_twice_and_frees_the_input():
    module, x = whole_numbers(Mlp(), (7, 4))
    actnn.in_chunks(module, 3)
    held = []

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor
            held.append(weakref.ref(self))

    with saved_tensors_hooks(Box, lambda box: box.tensor):
        y = module(x.requires_grad_())
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert len(held) == 1
    assert held[0]() is not None
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], first)
    assert held[0]() is None


def test_dropout_has_the_masks_of_forward_in_backward():
    module = actnn.in_chunks(Mlp(dropout=0.5).double(), 3)
    with torch.no_grad():
        module.up.bias.fill_(100)  # no rectifier is at 0
        module.up.weight.fill_(1)
        module.down.weight.fill_(1)
    x = torch.randn(50, 4, dtype=torch.float64)
    torch.manual_seed(3)
    y, dx, *_ = gradients(module, x)
    state = torch.get_rng_state()
    kept = (
        (y[:, 0] - module.down.bias[0]) / (2 * (100 + module.up.bias[0] * 0 + x.sum(-1)))
    ).round()
    slopes = dx / torch.arange(200, dtype=torch.float64).view(50, 4).sum(-1, keepdim=True) / 2
    assert torch.equal(slopes.round()[:, 0], kept)
    assert len(set(kept.tolist())) > 3
    torch.manual_seed(3)
    assert torch.equal(module(x), y)
    assert torch.equal(torch.get_rng_state(), state)


def test_sums_of_gradients_in_few_bits_are_not_rounded_for_each_chunk():
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    actnn.in_chunks(module, 1)
    module(torch.ones(1000, 1, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad.item() == 1000


def test_autocast_is_that_of_forward_and_leaves_no_casts():
    module = nn.Linear(4, 4)
    x = torch.randn(9, 4)
    with torch.autocast("cpu", torch.bfloat16):
        module(x).sum().backward()
        exact, module.weight.grad = module.weight.grad, None
        actnn.in_chunks(module, 4)
        y = module(x)
        z = nn.functional.linear(x, module.weight)
    assert y.dtype == torch.bfloat16
    z.sum().backward()
    other, module.weight.grad = module.weight.grad, None
    y.sum().backward()
    for each in (module.weight.grad, other):
        assert each.dtype == torch.float32
        assert (each - exact).norm() <= 1e-2 * exact.norm()


class Adds(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        return x + self.other[0]


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return x


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


WRONG = {
    "sums over tokens": (Function(lambda x: x.cumsum(-2)), "each token by itself"),
    "positions": (Function(lambda x: x + torch.arange(x.shape[-2])[:, None]), "each token"),
    "attention": (
        Function(lambda x: nn.functional.scaled_dot_product_attention(x, x, x)),
        "each token by itself",
    ),
    "batch norm": (nn.BatchNorm1d(4), "each token by itself"),
    "random numbers": (Function(lambda x: nn.functional.dropout(x, 0.5)), "each token by itself"),
    "buffers": (Counts(), "'count'"),
    "another tensor": (Adds(torch.ones(4, requires_grad=True)), r"another tensor of \[4\]"),
    "fewer tokens": (Function(lambda x: x[..., ::2, :]), r"return a tensor \(..., T, D\)"),
    "no tensor": (Function(lambda x: (x, x)), r"return a tensor \(..., T, D\)"),
    "no tokens": (Function(lambda x: x.sum(-1)), r"return a tensor \(..., T, D\)"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("tokens", [2, 100])
def test_modules_that_do_not_work_on_tokens_are_errors(name, tokens):
    module, message = WRONG[name]
    module = actnn.in_chunks(copy.deepcopy(module), tokens)
    before = [each.clone() for each in module.buffers()]
    with pytest.raises(ActNNError, match=message):
        module(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    for old, new in zip(before, module.buffers(), strict=True):
        assert torch.equal(old, new)


def test_the_check_draws_no_random_numbers_and_runs_once():
    module = actnn.in_chunks(Mlp(dropout=0.5).eval(), 3)
    state = torch.get_rng_state()
    module(torch.randn(7, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert module.calls == [6, 3, 3, 3, 3, 1]
    module(torch.zeros(7, 4))
    assert module.calls[6:] == [3, 3, 1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), {"x": torch.ones(3, 4)}),
        ((torch.ones(4),), {}),
        ((torch.ones(3, 4), torch.ones(3, 4)), {}),
        ((torch.ones(3, 4),), {"other": [torch.ones(1)]}),
        ((3,), {}),
    ],
)
def test_other_arguments_are_errors(arguments, named):
    class Any(nn.Module):
        def forward(self, x, y=None, other=None):
            return x

    module = actnn.in_chunks(Any(), 2)
    with pytest.raises(ActNNError, match="one tensor"):
        module(*arguments, **named)
    assert module(torch.ones(3, 4), 5, other="six").shape == (3, 4)


@pytest.mark.parametrize("tokens", [0, -1, True, 2.0, "3"])
def test_tokens_are_an_int_of_at_least_1(tokens):
    with pytest.raises(ActNNError, match=f"tokens to be an int of at least 1.*{tokens}"):
        actnn.in_chunks(nn.Linear(2, 2), tokens)


def test_only_modules_run_in_chunks():
    with pytest.raises(ActNNError, match="got function"):
        actnn.in_chunks(lambda x: x, 2)
    module = nn.Linear(2, 2)
    module.forward = lambda x: x
    with pytest.raises(ActNNError, match="forward of the module"):
        actnn.in_chunks(module, 2)
    with pytest.raises(ActNNError, match="compressed itself"):
        actnn.in_chunks(actnn.compress(nn.Linear(2, 2)), 2)


def changed_in_place(module):
    with torch.no_grad():
        module.up.weight.mul_(2)


CHANGES = {
    "weights": (changed_in_place, RuntimeError, "in-place operation"),
    "mode": (nn.Module.eval, ActNNError, "same mode"),
    "parameters": (
        lambda module: setattr(module.up, "weight", nn.Parameter(torch.zeros(6, 4))),
        ActNNError,
        "same parameters",
    ),
    "frozen": (lambda module: module.requires_grad_(False), ActNNError, "same parameters"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_forward_and_backward_are_errors(name):
    change, kind, message = CHANGES[name]
    module = actnn.in_chunks(Mlp(), 2)
    y = module(torch.randn(5, 4, requires_grad=True))
    change(module)
    with pytest.raises(kind, match=message):
        y.sum().backward()


def test_second_derivatives_are_an_error():
    x = torch.randn(5, 4, requires_grad=True)
    y = actnn.in_chunks(Mlp(), 2)(x)
    with pytest.raises(ActNNError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms_and_traces_run_the_module_as_a_whole():
    module, x = whole_numbers(Mlp(), (7, 4))
    y = module(x)
    actnn.in_chunks(module, 2)
    module.calls.clear()
    assert torch.equal(torch.func.vmap(module)(x.unsqueeze(0))[0], y)
    _, tangent = torch.func.jvp(module, (x,), (x,))
    assert tangent.shape == y.shape
    assert torch.equal(torch.jit.trace(module, x, check_trace=False)(x), y)
    assert {int(each) for each in module.calls} == {7}


def test_compiled_models_call_modules_in_chunks():
    module, x = whole_numbers(Mlp(), (7, 4))
    model = nn.Sequential(nn.Identity(), module)
    exact = gradients(model, x)
    actnn.in_chunks(module, 3)
    compiled = torch.compile(model, backend="eager")
    assert same(exact, gradients(compiled, x))
    assert max(module.calls[1:]) == 6  # those of the check


def test_copies_and_files_run_in_chunks():
    module, x = whole_numbers(Mlp(), (7, 4))
    y = actnn.in_chunks(module, 3)(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.calls.clear()
        assert torch.equal(other(x), y)
        assert other.calls == [3, 3, 1]
    assert "3 tokens at a time" in str(
        nn.Sequential(nn.Linear(1, 1), actnn.in_chunks(nn.Linear(1, 1), 3))
    )


def chunked_blocks(tokens=5):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        for part in (block.norm1, block.norm2, block.mlp):
            actnn.in_chunks(part, tokens)
    return model


def test_compressed_models_keep_chunks_and_their_inputs():
    model, x = chunked_blocks(), torch.randn(2, 17, 32)
    exact = gradients(model, x)
    actnn.compress(model, bits=2, min_bytes=0, policy=lambda info: Choice("keep"))
    assert same(exact, gradients(model, x))
    actnn.compress(model, bits=2, min_bytes=0)
    gradients(model, x)
    reasons = {record.module: record.reason for record in model.actnn.records}
    for path in ("0.norm2", "0.mlp", "1.norm1"):
        assert reasons[path].startswith(("the module runs again", "shared")), reasons[path]
    assert all(is_swapped(block.mlp, InChunks) for block in model)
    actnn.uncompress(model)
    assert same(exact, gradients(model, x))
    assert type(model[0].qkv) is nn.Linear
    assert is_swapped(model[0].norm1, InChunks)


def test_choices_name_inputs_of_chunks():
    model, x = chunked_blocks(), torch.randn(2, 17, 32)
    exact = gradients(model, x)
    actnn.compress(model, bits=32, min_bytes=0)
    model.actnn.set_choices({"0.mlp": Choice("compress", 8)})
    found = gradients(model, x)
    (record,) = [each for each in model.actnn.records if each.module == "0.mlp"]
    assert record.reason == "compressed"
    assert record.choice.bits == 8
    error = sum((a - b).square().sum() for a, b in zip(exact[1:], found[1:], strict=True))
    assert 0 < error < 1e-3 * sum(each.square().sum() for each in exact[1:])


def test_recomputed_blocks_contain_chunks():
    model, x = chunked_blocks(), torch.randn(2, 17, 32)
    exact = gradients(model, x)
    actnn.compress(model, bits=32, min_bytes=0)
    model.actnn.set_choices({"0": Choice("recompute"), "1": Choice("recompute")})
    for _ in range(2):  # the first step compares
        for a, b in zip(exact, gradients(model, x), strict=True):
            assert (a - b).norm() <= 1e-4 * a.norm()


@pytest.mark.parametrize("blocks", [1, 4])
def test_checkpoints_around_chunks_hold_their_inputs_alone(blocks):
    module = actnn.in_chunks(Mlp(64, 256), 8)
    x = torch.randn(64, 64, requires_grad=True)
    module(x)
    meter = HostMeter([x, *module.parameters()])
    with meter:
        before, y = meter.allocated(), x
        for _ in range(blocks):
            y = checkpoint(lambda z: module(torch.sin(z)), y, use_reentrant=False)
        assert meter.allocated() - before == blocks * x.nbytes
        torch.autograd.grad(y.sum(), x)
        del y
        assert meter.allocated() == before


def test_estimates_know_that_inputs_of_chunks_are_exact():
    x = torch.randn(2, 512, 32)  # with codes in place of inputs of chunks, a third less
    rows = actnn.estimate(chunked_blocks(), x, bits=(4,)).rows
    model = actnn.compress(chunked_blocks(), bits=4)
    model(x)
    held = [record.held for record in model.actnn.records]
    assert rows["0"].compressed[4] + rows["1"].compressed[4] == sum(held)


def test_tensors_without_data_have_gradients_without_data():
    module = actnn.in_chunks(nn.Linear(4, 4, device="meta"), 2)
    x = torch.ones(5, 4, device="meta", requires_grad=True)
    module(x).sum().backward()
    assert x.grad.shape == x.shape
    assert module.weight.grad.is_meta
