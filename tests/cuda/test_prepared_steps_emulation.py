"""Prepared steps of training, in kernels on the host: as steps made anew have them."""

import copy
import sys

import pytest
import torch
from bits import assert_same_bits
from host_machine import COMPILER
from stub_cublas import Cublas, multiplying
from torch.nn.utils.rnn import pack_sequence

from kept import calibrated_gru
from quant_gru.kernel_runtime.cuda import driver
from quant_gru.kernels import _native
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.cuda import machine
from quant_gru.kernels.cuda.backward import launch_plan, prepared
from quant_gru.kernels.cuda.forward import stack
from quant_gru.kernels.cuda.forward.stack import Stack
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.live_weights import LiveWeights
from quant_gru.modules import quantization_state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]

C, H = 5, 16
nan = float("nan")


@pytest.fixture(autouse=True)
def _gpu(host, monkeypatch):
    """The CPU stands in for a GPU."""
    monkeypatch.setenv(cpu.VARIABLE, cpu.REFERENCE)
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,4")
    monkeypatch.setenv(launch_plan.VARIABLES[0], "1,1,1,8")
    monkeypatch.setattr(driver, "available", lambda device: True)
    monkeypatch.setattr(machine, "machine_of", lambda device: host)
    for name, module in list(sys.modules.items()):
        if name.startswith("quant_gru") and hasattr(module, "runs_on_gpu"):
            monkeypatch.setattr(module, "runs_on_gpu", lambda device: True)


def training(config="int8", **options):
    return calibrated_gru(C, H, config, data=(12, 8), **options).train()


def step_of(gru):
    return gru._state.plans.kept(torch.device("cpu"), True)


def back_of(gru):
    return step_of(gru).differentiated.back


def results(gru, x, hx=None, last=True, first=True, of_x=True, of_states=False):
    """Outputs and all gradients."""
    x = x.detach().requires_grad_(of_x)
    hx = None if hx is None else hx.detach().requires_grad_(of_states)
    y, h_n = gru(x, hx)
    generator = torch.Generator().manual_seed(3)
    wanted, grads = [], []
    for each, asked in ((y, first), (h_n, last)):
        weight = torch.randn(each.shape, generator=generator)
        if asked:
            wanted.append(each)
            grads.append(weight)
    given = (x,) if hx is None else (x, hx)
    leaves = [each for each in (*given, *gru.parameters()) if each.requires_grad]
    return [y.detach(), h_n.detach(), *torch.autograd.grad(wanted, leaves, grads)]


def check(gru, *args, **options):
    """A prepared step, which has to give what one gives whose backward goes the general way."""
    for _ in range(2):
        results(gru, *args, **options)
    assert step_of(gru) is not None
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        run = prepared.PreparedBackward.run
        patch.setattr(quantization_state, "prepare", None)
        patch.setattr(prepared.PreparedBackward, "run", lambda *a: ran.append(run(*a)) or ran[-1])
        found = results(gru, *args, **options)
        assert len(ran) == 1
        assert ran[0] is not None
        patch.setattr(prepared.PreparedBackward, "run", lambda *_: None)
        expected = results(gru, *args, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"config": "w8a16"},
        {"bias": False},
        {"batch_first": True},
        {"num_layers": 2},
        {"num_layers": 2, "bidirectional": True, "bias": False},
    ],
    ids=["plain", "w8a16", "no biases", "batch first", "layers", "directions"],
)
def test_a_step_is_that_of_the_general_way(options):
    gru = training(**options)
    for _ in range(2):
        check(gru, torch.randn(6, 8, C) * 2)
        check(gru, torch.randn(9, 3, C))
        with torch.no_grad():
            for weight in gru.parameters():
                weight.mul_(1.1)


def test_what_is_given_and_asked():
    gru = training()
    x = torch.randn(6, 8, C)
    x[2, 1, 0] = nan
    check(gru, x)
    check(gru, x, last=False)
    check(gru, x, first=False)
    check(gru, x, torch.randn(1, 8, H) * 0.5)
    check(gru, torch.randn(8, 6, C).transpose(0, 1))
    check(gru, x, of_x=False)
    for parameter in (gru.weight_ih_l0, gru.bias_hh_l0, gru.bias_ih_l0):
        parameter.requires_grad_(False)
        check(gru, x)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_gradients_of_the_first_states(options):
    gru = training(**options)
    states = gru.num_layers * (1 + gru.bidirectional)
    # some are clamped
    hx = torch.randn(states, 8, H) * 3
    for each in (hx, torch.randn(H, 8, states).permute(2, 1, 0)):
        check(gru, torch.randn(6, 8, C), each, of_states=True)
    check(gru, torch.randn(6, 8, C), hx, of_states=True, of_x=False)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_packed_input(monkeypatch, options):
    """It has no quick forward, but its backward is prepared."""
    gru, ran = training(**options), []
    rows = [torch.randn(T, C) for T in (5, 9, 1)]

    def gradients():
        packed = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
        y, h_n = gru(packed)
        wanted = (y.data, h_n)
        return torch.autograd.grad(
            wanted, list(gru.parameters()), list(map(torch.ones_like, wanted))
        )

    expected = gradients()
    run = prepared.PreparedBackward.run
    monkeypatch.setattr(prepared.PreparedBackward, "run", lambda *a: ran.append(run(*a)) or ran[-1])
    for _ in range(2):
        assert all(map(torch.equal, gradients(), expected))
    assert [each is None for each in ran] == [False, False]


@pytest.fixture
def cublas(host, monkeypatch):
    """A library that makes the products of the host."""
    found = Cublas()
    monkeypatch.setattr(host, "multiply", multiplying(host, found), raising=False)
    return found


@pytest.mark.parametrize("config", ["int8", "w8a16"])
def test_products_are_among_the_launches(cublas, monkeypatch, config):
    gru, x = training(config), torch.randn(6, 8, C)
    ours = results(gru, x)
    assert len(cublas.started) == 3
    with monkeypatch.context() as patch:
        patch.delattr(back_of(gru)._machine, "multiply")
        assert all(map(torch.equal, results(training(config), x), ours))
    assert len(cublas.started) == 3
    check(gru, x)
    x[2, 1, 0] = nan
    check(gru, x)
    check(gru, x, torch.randn(1, 8, H) * 0.5, first=False)
    cublas.started.clear()
    gru.weight_ih_l0.requires_grad_(False)
    check(gru, x, last=False)
    assert len(cublas.started) == 4 * 2
    gru.weight_hh_l0.requires_grad_(False)
    cublas.started.clear()
    check(gru, x)
    assert len(cublas.started) == 4


def test_native_backwards_keep_little_memory(cublas, monkeypatch):
    gru, x = training(), torch.randn(6, 8, C)
    results(gru, x)
    results(gru, x)
    back = back_of(gru)
    latest = back._latest[0]
    assert latest.forget()
    assert not latest.forget()
    results(gru, x)
    # that of another size goes when this one is repeated
    results(gru, x[:5])
    assert back._latest[0] is not latest
    assert not latest.forget()
    assert back._latest[0].forget()
    monkeypatch.setattr(prepared, "_KEPT_BYTES", 0)
    results(gru, x[:4])
    results(gru, x[:4])
    assert not back._latest[0].forget()


@pytest.mark.parametrize("first", [True, False])
def test_what_a_backward_gets_may_lie_in_other_ways(cublas, first):
    """Hooks give saved tensors back as they like; gradients come as they are."""
    gru = training(batch_first=True)
    x = torch.randn(8, 6, C)
    check(gru, x)
    step = step_of(gru)
    repeated = back_of(gru)._latest[0]

    def gradients(hooked, expanded):
        leaf = x.clone().requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach().clone(memory_format=torch.contiguous_format), lambda t: t
        )
        with hooks if hooked else torch.enable_grad():
            y, h_n = gru(leaf)
        given = torch.ones(()).expand(y.shape) if expanded else torch.ones(y.shape)
        return torch.autograd.grad(
            (y, h_n) if first else (y,),
            [leaf, *gru.parameters()],
            (given, torch.ones(h_n.shape)) if first else (given,),
        )

    expected = gradients(False, False)
    for hooked, expanded in ((True, False), (False, True), (True, True), (False, False)):
        assert all(map(torch.equal, gradients(hooked, expanded), expected)), (hooked, expanded)
    assert step_of(gru) is step
    assert len(back_of(gru)._kinds) >= 4
    assert repeated in back_of(gru)._kinds.values()


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"num_layers": 2, "bidirectional": True}],
    ids=["plain", "batch first", "directions"],
)
def test_native_code_runs_steps(cublas, monkeypatch, options):
    gru, x = training(**options), torch.randn(6, 8, C)
    hx = torch.randn(gru.num_layers * (1 + gru.bidirectional), x.shape[gru.batch_first ^ 1], H)
    rows = torch.nn.utils.rnn.pack_sequence([torch.randn(T, C) for T in (5, 2)])

    def outcome():
        found = [*results(gru, x), *results(gru, x, hx, of_states=True)]
        y, h_n = gru(rows)
        grads = torch.autograd.grad(y.data.sum() + h_n.sum(), list(gru.parameters()))
        return [*found, y.data, *grads]

    for _ in range(2):
        outcome()
    expected = outcome()
    with monkeypatch.context() as patch:
        for python in ((LiveWeights, "_repeat"), (Stack, "run"), (stack, "Schedule")):
            patch.setattr(*python, None)
        for ours, theirs in zip(outcome(), expected, strict=True):
            assert_same_bits(ours.detach(), theirs.detach())
    with torch.no_grad():
        gru.weight_hh_l0.mul_(-1)
    assert not torch.equal(outcome()[0], expected[0])
    assert all(map(torch.equal, results(gru, x), results(copy.deepcopy(gru), x)))


def test_native_code_leaves_steps_whose_update_has_changed():
    """An update for another size, or by another call, may write elsewhere."""
    gru, x = training(), torch.randn(6, 8, C)
    for _ in range(3):
        expected = gru(x)[0]
    native = step_of(gru)._native
    assert native.follows(0)
    assert not native.follows(1)
    others = {name: w.detach() * 0.5 for name, w in gru.named_parameters()}
    torch.func.functional_call(gru, others, (x,))
    assert not native.follows(0)
    for _ in range(3):
        assert torch.equal(gru(x)[0], expected)
    native = step_of(gru)._native
    assert native.follows(0)
    gru.recurrent_dropout = 0.5
    gru(x)
    assert not native.follows(0)


def quickly(gru, x):
    """Whether a call took what the one before had prepared."""
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        general = quantization_state.prepare
        patch.setattr(quantization_state, "prepare", lambda *a: calls.append(a) or general(*a))
        gru(x)
        return not calls


def test_hooks_see_steps():
    gru, x, seen = training(), torch.randn(6, 8, C), []
    gru(x)
    expected = gru(x)
    handles = [
        gru.register_forward_hook(lambda *_: seen.append("after")),
        gru.register_forward_pre_hook(lambda *_: seen.append("before")),
        gru.register_full_backward_hook(lambda *_: seen.append("back")),
    ]
    leaf = x.clone().requires_grad_()
    found = gru(leaf)
    assert all(map(torch.equal, found, expected))
    found[0].sum().backward()
    assert seen == ["before", "after", "back"]
    for handle in handles:
        handle.remove()
    gru(leaf)
    assert len(seen) == 3


def test_changes_are_noticed():
    gru, x = training(), torch.randn(6, 8, C)
    strided = gru.weight_hh_l0.data.t().contiguous().t()
    changes = [
        (True, lambda: gru.weight_hh_l0.data.mul_(2)),
        (False, lambda: setattr(gru.weight_hh_l0, "data", gru.weight_hh_l0.data.clone())),
        (False, lambda: setattr(gru, "bias_hh_l0", torch.nn.Parameter(torch.ones(3 * H)))),
        (True, lambda: setattr(gru, "precision", "tf32")),
        (True, lambda: setattr(gru, "recurrent_dropout", 0.5)),
        (True, lambda: setattr(gru, "recurrent_dropout", 0.0)),
        (False, lambda: setattr(gru, "zoneout", 0.5)),
        (False, lambda: setattr(gru, "zoneout", 0.0)),
        (True, lambda: setattr(gru, "stash_bits", 8)),
        (True, lambda: setattr(gru, "stash_bits", None)),
        (False, lambda: gru.adjust_quant_config("output.h", bitwidth=7)),
        (False, lambda: setattr(gru.weight_hh_l0, "data", strided)),
    ]

    def seeded_results(gru):
        torch.manual_seed(1)
        return results(gru, x)

    for holds, change in changes:
        seeded_results(gru)
        assert quickly(gru, x)
        change()
        assert quickly(gru, x) == holds
        assert all(map(torch.equal, seeded_results(gru), seeded_results(copy.deepcopy(gru))))


def test_other_weights_in_between_leave_it():
    gru, x = training(), torch.randn(6, 8, C)
    expected = results(gru, x)
    results(gru, x)
    step, back = step_of(gru), back_of(gru)
    others = {name: w.detach() * 0.5 for name, w in gru.named_parameters()}
    assert not torch.equal(torch.func.functional_call(gru, others, (x,))[0], expected[0])
    assert all(map(torch.equal, results(gru, x), expected))
    assert back_of(gru) is back
    gru.weight_hh_l0 = torch.nn.Parameter(gru.weight_hh_l0.detach().clone())
    gru(x)
    assert step_of(gru) is not step
    assert back_of(gru) is back
    assert all(map(torch.equal, results(gru, x), expected))


def test_dropped_weights_are_back():
    gru, x = training(), torch.randn(6, 8, C)
    gru(x)
    expected = gru(x)[0]
    gru.recurrent_dropout = 0.5
    assert not torch.equal(gru(x)[0], expected)
    gru.recurrent_dropout = 0.0
    assert quickly(gru, x)
    assert torch.equal(gru(x)[0], expected)


def test_other_sizes_after_the_first_follow_the_weights():
    """What is derived from weights for another size is rewritten from then on."""
    gru = training()
    for N in (8, 3, 65, 8):
        x = torch.randn(4, N, C)
        gru(x)
        with torch.no_grad():
            gru.weight_hh_l0.mul_(-1)
        assert quickly(gru, x)
        found = gru(x)[0].detach()
        assert torch.equal(found, gru.eval()(x)[0])
        gru.train()


def test_a_forward_of_other_weights_before_the_backward():
    gru, x = training(), torch.randn(6, 8, C)
    grads = results(gru, x)[2:]
    leaf = x.clone().requires_grad_()
    y, h_n = gru(leaf)
    kept = gru.weight_hh_l0.detach().clone()
    gru.weight_hh_l0.data.mul_(-1)
    gru(x)
    gru.weight_hh_l0.data.copy_(kept)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(each.shape, generator=generator) for each in (y, h_n)]
    found = torch.autograd.grad((y, h_n), [leaf, *gru.parameters()], weights)
    for ours, theirs in zip(found, grads, strict=True):
        assert torch.equal(ours, theirs)


def test_graphs_are_kept_and_differentiated_once():
    gru, x = training(), torch.randn(6, 8, C, requires_grad=True)
    y = gru(x)[0]
    first, again = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(Exception, match="differentiated once"):
        grad.sum().backward()
    with torch.no_grad():
        gru.weight_hh_l0.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)


def test_little_memory_is_kept(monkeypatch):
    gru, x = training(), torch.randn(6, 8, C)
    results(gru, x)
    results(gru, x)
    back = back_of(gru)
    results(gru, x[:5])
    assert sum(each.forget() for each in back._kinds.values()) == 1
    monkeypatch.setattr(prepared, "_KEPT_BYTES", 0)
    for _ in range(2):
        results(gru, x[:4])
    assert not any(each.forget() for each in back._kinds.values())


def test_only_launches_that_convert_follow_the_batch(host, monkeypatch):
    """The others of packed rows repeat where x and the orders of rows are new."""
    found, native = [], _native.Steps

    def steps(each, uses, fields, *more):
        found.append([set(use) for use in uses])
        return native(each, uses, fields, *more)

    monkeypatch.setattr(_native, "Steps", steps)
    gru = training()
    packed = pack_sequence(list(torch.randn(3, 6, C)), enforce_sorted=False)
    plain = torch.randn(7, 3, C)
    for x in (packed, plain):
        y, _ = gru(x)
        (y if x is plain else y.data).sum().backward()
    forward, backward, *of_plain = found
    assert [bool(use & {0, 8, 9}) for use in forward] == [True, False, True]
    assert [bool(use & {1, 7, 8}) for use in backward if use] == [True, False]
    assert [sum(map(bool, uses)) for uses in of_plain] == [1, 1]
