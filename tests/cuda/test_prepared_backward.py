"""Prepared backwards of whole GRUs, in kernels on the host: the bits of the general way."""

import gc
import random
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from host_machine import COMPILER
from random_stacks import random_stack
from stub_cublas import Cublas, multiplying
from torch.nn.utils.rnn import pack_padded_sequence

from kept import kept
from quant_gru import QuantConfig, QuantGRU
from quant_gru.autograd.backward_pass import (
    Asked,
    Pass,
    flat_gradients,
    gradients,
    nan_of,
    of_cells,
)
from quant_gru.execution.layers import run_real
from quant_gru.integer.backward import Kept
from quant_gru.integer.call_form import FLOATS, inward, outward
from quant_gru.kernel_runtime.cuda import driver
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.cuda import machine
from quant_gru.kernels.cuda.backward import launch_plan, prepared
from quant_gru.kernels.cuda.backward.prepared import PreparedBackward
from quant_gru.kernels.cuda.planned_launches import Steps
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]

C, H = 5, 16
DEEP = {"num_layers": 2, "bidirectional": True}


@pytest.fixture(autouse=True)
def _gpu(host, monkeypatch):
    """The CPU stands in for a GPU."""
    monkeypatch.setenv(cpu.VARIABLE, cpu.REFERENCE)
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,4")
    monkeypatch.setenv(launch_plan.VARIABLES[0], "1,1,1,8")
    monkeypatch.setattr(driver, "available", lambda device: True)
    monkeypatch.setattr(machine, "machine_of", lambda device: host)


@pytest.fixture
def on_gpu(monkeypatch):
    """Kernels run from here on."""

    def patch():
        for name, module in list(sys.modules.items()):
            if name.startswith("quant_gru") and hasattr(module, "runs_on_gpu"):
                monkeypatch.setattr(module, "runs_on_gpu", lambda device: True)

    return patch


@pytest.fixture
def cublas(host, monkeypatch):
    """A library that makes the products of the host."""
    found = Cublas()
    monkeypatch.setattr(host, "multiply", multiplying(host, found), raising=False)
    return found


@kept
def quantized(config="int8", **options):
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=getattr(QuantConfig, config)(), **options).eval()
    gru.calibrate(torch.randn(12, 8, C))
    gru.finalize_calibration()
    return gru


class Forward:
    """A forward, and what may be wanted of its backward."""

    def __init__(self, gru, x, h0=None, lengths=None, precision="bf16"):
        kept = Kept()
        self.packing = None
        if lengths is not None:
            packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
            x, self.packing = packed.data, gru._normalize(packed, h0).packing
        with torch.no_grad():
            self.plan = gru._plan()
            y, h_n = run_real(self.plan, x, h0, None, None, kept, self.packing)
        nan = nan_of(inward(None, h_n, self.packing)[1]) if kept.nan is None else kept.nan
        self.done = Pass(x, h0, None, None, kept.out, nan, precision)
        self.bias = gru.bias
        count = (4 if gru.bias else 2) * len(kept.out)
        self.all = (True, h0 is not None, *[True] * count)
        generator = torch.Generator().manual_seed(3)
        self.grad_y = torch.randn(y.shape, generator=generator)
        self.grad_last = torch.randn(h_n.shape, generator=generator)

    def prepared(self, host):
        return PreparedBackward(self.plan, self.done.precision, host)

    def check(self, back, grad_y="own", grad_last="own", wanted=None):
        """Twice, as the first call prepares; None where the general way has to see to it."""
        grad_y = self.grad_y if grad_y == "own" else grad_y
        grad_last = self.grad_last if grad_last == "own" else grad_last
        done, wanted = self.done, wanted or self.all
        given = (done.x, done.h0, done.out, done.nan, grad_y, grad_last, wanted, self.packing)
        first = back.run(*given)
        if first is None:
            return None
        asked = Asked(wanted[0], wanted[1], of_cells(wanted[2:], self.bias))
        packing = self.packing
        x, h0 = inward(done.x, done.h0, packing)
        grad_y, grad_last = inward(grad_y, grad_last, packing)
        done = replace(done, x=x, h0=h0, lengths=packing and packing.lengths)
        result = gradients(self.plan, done, grad_y, grad_last, asked)
        flat = (
            *outward(result.x, result.h0, packing, len(self.done.x)),
            *flat_gradients(result.cells, self.bias),
        )
        for found in (first, back.run(*given)):
            for ours, theirs, is_wanted in zip(found, flat, wanted, strict=True):
                assert (ours is not None) == is_wanted
                if is_wanted:
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        return first


@pytest.mark.parametrize(
    ("options", "lengths", "dtype", "module"),
    [
        *((DEEP, [2, 6, 1, 5], dtype, torch.float32) for dtype in FLOATS if dtype.itemsize != 4),
        (DEEP, None, torch.float32, torch.bfloat16),
        ({}, [6, 6, 3, 1], torch.bfloat16, torch.bfloat16),
    ],
)
def test_forms_of_callers(host, on_gpu, cublas, monkeypatch, options, lengths, dtype, module):
    """Other dtypes and packed rows have the gradients of float32 and of the general way."""
    gru = quantized(**options)
    gru.use_quantization = True
    gru = gru.to(module).train()
    states = gru.num_layers * (1 + gru.bidirectional)
    x, hx = torch.randn(6, 4, C).to(dtype), torch.randn(states, 4, H).to(dtype)
    packed = lengths and pack_padded_sequence(x, lengths, enforce_sorted=False)
    data = packed.data if packed else x
    generator = torch.Generator().manual_seed(5)
    grads = [
        torch.randn(*data.shape[:-1], H * (1 + gru.bidirectional), generator=generator).to(module),
        torch.randn(states, 4, H, generator=generator).to(module),
    ]

    def results():
        found = []
        for given in (None, hx):
            leaves = [data.clone().requires_grad_()]
            leaves += [] if given is None else [given.clone().requires_grad_()]
            first = packed._replace(data=leaves[0]) if packed else leaves[0]
            y, h_n = gru(first, *leaves[1:])
            leaves += gru.parameters()
            ends = [y.data if packed else y, h_n]
            found += [each.detach() for each in ends]
            found += torch.autograd.grad(ends, leaves, grads)
        return found

    on_gpu()
    with monkeypatch.context() as patch:
        patch.setattr(PreparedBackward, "run", lambda *a: None)
        general = results()
    calls, run = [], PreparedBackward.run
    monkeypatch.setattr(PreparedBackward, "run", lambda *a: calls.append(run(*a)) or calls[-1])
    for _ in range(2):  # the first call prepares
        for ours, theirs in zip(results(), general, strict=True):
            assert ours.dtype is theirs.dtype
            assert torch.equal(ours, theirs)
    assert len(calls) == 4
    assert all(each is not None for each in calls)


@pytest.mark.parametrize("options", [{}, {"num_layers": 3}, DEEP, {**DEEP, "bias": False}])
@pytest.mark.parametrize("products", ["launched", "torch's"])
def test_layers_and_directions(host, on_gpu, request, options, products):
    if products == "launched":
        request.getfixturevalue("cublas")
    gru = quantized(**options)
    states = gru.num_layers * (1 + gru.bidirectional)
    x, h0 = torch.randn(6, 8, C) * 2, torch.randn(states, 8, H)
    x[2, 1, 0] = torch.nan
    lengths = torch.tensor([6, 2, 1, 5, 6, 3, 4, 2])
    kinds = [Forward(gru, x, *each) for each in ((None, None), (h0, None), (h0, lengths))]
    on_gpu()
    back = kinds[0].prepared(host)
    for forward in kinds:
        assert forward.check(back) is not None


@pytest.mark.parametrize(("config", "precision"), [("w8a16", "bf16"), ("int8", "tf32")])
def test_torch_multiplies_in_between(host, on_gpu, cublas, config, precision):
    forward = Forward(quantized(config, **DEEP), torch.randn(6, 8, C), precision=precision)
    on_gpu()
    assert forward.check(forward.prepared(host)) is not None


@pytest.mark.parametrize("per", ["step", "grid"])
def test_weights_that_fit_no_registers(host, on_gpu, cublas, monkeypatch, per):
    monkeypatch.setattr(launch_plan.POLICY, "in_clusters", False)
    shape = "1,1,1,2,0,1,1" if per == "grid" else "none"
    monkeypatch.setenv(launch_plan.VARIABLES[1], shape)
    forward = Forward(quantized(**DEEP), torch.randn(6, 8, C))
    on_gpu()
    host.launched.clear()
    assert forward.check(forward.prepared(host)) is not None
    names = {name for name, _ in host.launched}
    assert names & {"back", "back_step", "back_grid"} == {f"back_{per}"}


@pytest.mark.parametrize("seed", range(5))
def test_random_stacks(host, on_gpu, request, seed):
    """Directions that differ, clamped inputs and states, any strides, no lengths or some."""
    if seed % 2:
        request.getfixturevalue("cublas")
    case, rng = random_stack(seed), random.Random(seed)
    forward = Forward(case.gru, case.x.resolve_neg(), case.h0, case.lengths)
    on_gpu()
    back = forward.prepared(host)
    for _ in range(3):
        wanted = tuple(each and rng.random() < 0.6 for each in forward.all)
        if not any(wanted):
            continue
        grad_y = rng.choice([None, "own", torch.ones(()).expand(forward.grad_y.shape)])
        grad_last = rng.choice([None, "own", torch.ones(()).expand(forward.grad_last.shape)])
        found = forward.check(back, grad_y, grad_last, wanted)
        assert (found is not None) == (forward.done.x.stride(-1) == 1)


def test_what_is_wanted_decides_what_is_launched(host, on_gpu):
    forward = Forward(quantized(num_layers=2), torch.randn(6, 8, C))
    on_gpu()
    back, count = forward.prepared(host), len(forward.all)
    for of, launches in ((range(6, 10), 1), (range(2, 6), 2), ((0,), 2), ((3, 6), 2)):
        wanted = tuple(i in of for i in range(count))
        assert forward.check(back, wanted=wanted) is not None
        host.launched.clear()
        back.run(
            *(forward.done.x, None, forward.done.out, forward.done.nan),
            *(forward.grad_y, None, wanted),
        )
        back.run(
            *(forward.done.x, None, forward.done.out, forward.done.nan),
            *(forward.grad_y, None, wanted),
        )
        names = [name for name, _ in host.launched]
        assert names.count("back") == 2 * launches


def test_calls_that_go_the_general_way(host, on_gpu, monkeypatch):
    forward = Forward(quantized(num_layers=2), torch.randn(6, 8, C))
    on_gpu()
    done, grad = forward.done, forward.grad_y

    def run(back, x=done.x, outs=done.out, grad_y=grad):
        return back.run(x, None, outs, done.nan, grad_y, None, forward.all)

    back = forward.prepared(host)
    assert run(back) is not None
    assert run(back, grad_y=grad.to(torch.complex64)) is None
    assert run(back, x=torch._neg_view(done.x)) is None
    assert run(back, x=torch.randn(C, 6, 8).permute(1, 2, 0)) is None
    strided = [out.transpose(0, 1).contiguous().transpose(0, 1) for out in done.out]
    assert run(back, outs=strided) is None
    assert run(back) is not None
    monkeypatch.setattr(prepared, "most_steps", lambda *_: 5)
    assert run(forward.prepared(host)) is None


def test_one_size_keeps_its_memory(host, on_gpu, cublas):
    gru = quantized(num_layers=2)
    forwards = [Forward(gru, torch.randn(T, 8, C)) for T in (6, 5)]
    on_gpu()
    back = forwards[0].prepared(host)
    for forward in forwards:
        forward.check(back)
    first, second = back._kinds.values()
    assert back._latest[0] is second
    assert not first.forget()
    assert second.forget()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_tensors_of_the_first_call_are_not_kept(host, on_gpu, is_prepared):
    forward = Forward(quantized(num_layers=2), torch.randn(6, 8, C), torch.randn(2, 8, H))
    on_gpu()
    done, back = forward.done, forward.prepared(host)
    grads = [forward.grad_y.clone(), forward.grad_last.clone()]
    if is_prepared:
        given = (done.x, done.h0, done.out, done.nan, *grads, forward.all)
        assert back.run(*given) is not None
        del given
    else:
        asked = Asked(forward.all[0], forward.all[1], of_cells(forward.all[2:], forward.bias))
        gradients(forward.plan, done, *grads, asked)
    kept = [weakref.ref(each) for each in (done.x, done.h0, *done.out, *grads)]
    forward.done = done = grads = None
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_native_places_are_checked(host):
    from quant_gru.kernels import _native

    steps = Steps(host, 12).native(None)
    with pytest.raises(IndexError, match="follow a tensor of the call"):
        _native.GPUBackward(
            steps,
            (-1, 256, 0, 1, False, 1, 1),
            [((), (), 0)] * 4,
            [None, None],
            (torch.Tensor, lambda: -1, (lambda: 0, lambda: 0), lambda: False),
        )
    with pytest.raises(ValueError, match="an address for each tensor"):
        steps.start(0, [0] * 11)


@pytest.mark.parametrize("rule", ["floor"])
def test_inputs_are_quantized_again_by_their_rule(host, rule):
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=QuantConfig.int8().replace_globals(rounding=rule))
    x = 1.5 * torch.randn(12, 8, C)
    gru.calibrate(x / 1.5)
    gru.finalize_calibration()
    gru.use_quantization = True
    forward = Forward(gru.eval(), x, precision="fp32")
    done = forward.done
    given = (done.x, None, done.out, done.nan, forward.grad_y, None, forward.all)
    found, _, *of_weights = forward.prepared(host).run(*given)
    x.requires_grad_()
    wanted = torch.autograd.grad(gru.train()(x)[0], [x, *gru.parameters()], forward.grad_y)
    for ours, theirs in zip((found, *of_weights), wanted, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
