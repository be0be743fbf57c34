"""Whole calls checked and started in native code, on the host: values, memory, what is left."""

import copy
import gc
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from bits import assert_same_bits
from host_machine import COMPILER

from kept import calibrated_gru
from quant_gru.execution import prepared_call
from quant_gru.execution.weight_guard import WeightGuard
from quant_gru.integer.backward import Kept
from quant_gru.integer.call_form import FLOATS, CallForm
from quant_gru.kernels import _native, dispatch
from quant_gru.kernels.cuda.forward import launch_plan, stack
from quant_gru.kernels.cuda.planned_launches import SPACE
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]

C, H = 5, 20


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,4")
    with torch.no_grad():
        yield


quantized = partial(calibrated_gru, C, H)


def prepared_of(gru, host):
    """Prepared calls of a GPU, on the host."""
    plan, own = gru._plan(), list(gru._parameters.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch.CPU, "stack_of", lambda _, plan: stack.Stack(plan, host))
        return prepared_call.prepare(lambda: plan, [own], own, own[0].dtype)


def run(prepared, gru, x, hx=None, lengths=None):
    return prepared.start(gru._parameters.values(), x, hx, lengths, gru.batch_first)


def natively(prepared, gru, x, hx=None, lengths=None):
    """What native code gives by itself."""
    own = gru._parameters.values()
    return prepared._native.run(own, x, hx, lengths, gru.batch_first)


def equal(got, expected):
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_call_waits_on_streams_that_the_one_before_was_not_on(host, monkeypatch):
    """What gives the stream and what has it wait are two functions, told apart by their count."""
    gru, asked, now = quantized(), [], [5]

    def stream():
        asked.extend(now)
        return now[0]

    monkeypatch.setattr(host, "stream", stream)
    prepared, x = prepared_of(gru, host), torch.randn(7, 3, C)
    run(prepared, gru, x)
    found = []
    for now[0] in (5, 5, 9, 9, 5):
        asked.clear()
        assert natively(prepared, gru, x) is not NotImplemented
        found.append(list(asked))
    assert found == [[5], [5], [9, 9], [9], [5, 5]]


@pytest.mark.parametrize("batch_first", [False, True])
def test_calls_are_those_of_the_cpu(host, batch_first):
    gru = quantized(bidirectional=True, batch_first=batch_first)
    prepared = prepared_of(gru, host)
    for turn in range(2):
        for shape in ((9, 8), (2, 3), (8, 9)):
            x = torch.randn(*shape, C)
            hx = torch.randn(2, shape[0 if batch_first else 1], H)
            x[1, 1, 0] = torch.nan
            for states in (None, hx):
                found = natively(prepared, gru, x, states)
                assert (found is NotImplemented) == (turn == 0)
                expected = gru(x, states)
                for got in (run(prepared, gru, x, states), natively(prepared, gru, x, states)):
                    for ours, theirs in zip(got, expected, strict=True):
                        assert_same_bits(ours, theirs)
                    # what the general way gives, with its transposed view
                    y = got[0].transpose(0, 1) if batch_first else got[0]
                    assert y.is_contiguous()


def test_lengths(host):
    gru = quantized(num_layers=2, bidirectional=True)
    prepared, x = prepared_of(gru, host), torch.randn(6, 4, C)
    lengths = torch.tensor([6, 4, 4, 1])
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    y, h_n = gru(packed)
    for turn in range(2):
        assert (natively(prepared, gru, x, None, lengths) is NotImplemented) == (turn == 0)
        found = run(prepared, gru, x, None, lengths)
        rows = torch.nn.utils.rnn.pack_padded_sequence(found[0], lengths)
        assert equal((rows.data, found[1]), (y.data, h_n))


def same_bits(got, expected):
    """Equal, NaN where NaN is."""
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_bits(ours, theirs)


# each with itself and with another one, on both sides
@pytest.mark.parametrize(
    ("dtype", "module"),
    [(each, other) for i, each in enumerate(FLOATS) for other in (each, [*FLOATS, *FLOATS][i + 1])],
)
def test_dtypes_are_converted_on_the_way(host, dtype, module):
    gru = quantized(num_layers=2, bidirectional=True, batch_first=True).to(module)
    prepared = prepared_of(gru, host)
    # values that no half has, that overflow one, subnormal ones, zeros of both signs
    x = torch.randn(7, 6, C, dtype=torch.float64).mul(3)
    x[0, 0] = torch.tensor([1e-40, -0.0, 7e4, float("nan"), 1e-6], dtype=torch.float64)
    x = x.to(dtype)
    kinds = [None, *{dtype: 0, torch.float32: 0}]
    for hx in (kind and torch.randn(4, 7, H).to(kind) for kind in kinds):
        expected = gru(x, hx)
        assert {each.dtype for each in expected} == {module}
        for turn in range(2):
            assert (natively(prepared, gru, x, hx) is NotImplemented) == (turn == 0)
            same_bits(run(prepared, gru, x, hx), expected)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    same_bits(natively(prepared, gru, turned), gru(x))
    spread = torch.stack([x, x], dim=2)[:, :, 0]
    same_bits(natively(prepared, gru, spread), gru(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_packed_rows(host, dtype, options):
    gru = quantized(**options)
    prepared, states = prepared_of(gru, host), 4 if options else 1
    for lengths, is_sorted in (([6, 4, 4, 1], True), ([2, 6, 1, 5], False), ([3, 6, 6, 6], False)):
        x = torch.randn(6, 4, C).to(dtype)
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=is_sorted)
        for hx in (None, torch.randn(states, 4, H).to(dtype)):
            expected = gru(packed, hx)
            sequence = gru._normalize(packed, hx, torch.float32)
            given = (sequence.values, hx, None, False, sequence.packing)
            for _ in range(2):
                found = prepared.start(gru._parameters.values(), *given)
                assert equal(sequence.finish(*found)[0].data[None], expected[0].data[None])
                assert torch.equal(found[1], expected[1])
            found = prepared._native.run(gru._parameters.values(), *given)
            assert torch.equal(found[0], expected[0].data)


def test_an_order_that_names_no_row_reads_none_of_others(host):
    gru = quantized()
    prepared, x = prepared_of(gru, host), torch.randn(5, 3, C)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [5, 4, 1])
    packing = gru._normalize(packed, None).packing
    for wrong in (-9, 10**12):
        order = torch.tensor([0, wrong, 2])
        bad = packing._replace(sorted_indices=order, unsorted_indices=order)
        hx = torch.zeros(1, 3, H)
        found = prepared.start(gru._parameters.values(), packed.data, hx, None, False, bad)
        assert torch.equal(found[0], gru(packed)[0].data)


def test_layouts_that_only_python_takes(host):
    gru = quantized()
    prepared, x, hx = prepared_of(gru, host), torch.randn(6, 4, C), torch.randn(1, 4, H)
    run(prepared, gru, x, hx)
    expected = gru(x, hx)
    assert equal(natively(prepared, gru, x, hx), expected)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert equal(natively(prepared, gru, turned, hx), expected)
    # its strides are not those of the call before
    assert equal(natively(prepared, gru, x, hx), expected)
    padded = torch.randn(6, 4, C + 1)[..., :C]
    padded.copy_(x)
    assert equal(natively(prepared, gru, padded, hx), expected)
    spread = x.transpose(1, 2).contiguous().transpose(1, 2)
    for given in ((spread, hx), (torch._neg_view(-x), hx), (x, torch._neg_view(-hx))):
        assert natively(prepared, gru, *given) is NotImplemented
        assert equal(run(prepared, gru, *given), expected)
    wide = torch.randn(1, 4, 2 * H)
    wide[..., ::2] = hx
    assert natively(prepared, gru, x, wide[..., ::2]) is NotImplemented
    assert equal(run(prepared, gru, x, wide[..., ::2]), expected)


def test_what_is_left_to_the_general_way(host):
    gru = quantized()
    prepared, x = prepared_of(gru, host), torch.randn(5, 3, C)
    assert run(prepared, gru, x) is not None
    Same = type("Same", (torch.Tensor,), {})
    others = (None, 3, x[0], x[None], x.int(), x[..., 1:], x[:0], x[:, :0], x.to("meta"))
    for other in (*others, torch.nn.Parameter(x), x.as_subclass(Same)):
        assert run(prepared, gru, other) is None
    for hx in (torch.zeros(2, 3, H), torch.zeros(1, 2, H), torch.zeros(1, 3, H).int(), 3):
        assert run(prepared, gru, x, hx) is None
    weights = list(gru._parameters.values())
    assert prepared.start(weights, x, None, None, False) is not None
    for others in (weights[:-1], [*weights, weights[0]], weights[::-1], [*weights[:-1], None]):
        assert prepared.start(others, x, None, None, False) is None
    with torch.enable_grad():
        assert run(prepared, gru, x) is None
        gru.requires_grad_(False)
        assert run(prepared, gru, x) is not None
        assert run(prepared, gru, x.clone().requires_grad_()) is None
        assert run(prepared, gru, x, torch.zeros(1, 3, H, requires_grad=True)) is None
    gru.weight_hh_l0.data = gru.weight_hh_l0.data.clone()
    assert run(prepared, gru, x) is None


@pytest.mark.parametrize("how", ["in place", "by an optimizer"])
def test_weights_that_changed(host, how):
    gru = quantized()
    prepared, x = prepared_of(gru, host), torch.randn(5, 3, C)
    assert run(prepared, gru, x) is not None
    if how == "in place":
        gru.bias_ih_l0.mul_(2)
    else:
        # fused ones leave versions as they are
        optimizer = torch.optim.Adam(gru.parameters(), fused=True)
        for w in gru.parameters():
            w.grad = torch.ones_like(w)
        optimizer.step()
    assert run(prepared, gru, x) is None


def test_another_device_or_a_graph(host):
    gru = quantized()
    whole, x = stack.Stack(gru._plan(), host), torch.randn(5, 3, C)
    now = {"device": -1, "captures": False}
    functions = (lambda: now["device"], lambda: now["captures"])
    functions = (torch.Tensor, torch.is_grad_enabled, *functions)
    weights = list(gru._parameters.values())
    guard = WeightGuard(weights)
    native = _native.PreparedCallGPU((-1, 1, C, H), guard.native, functions, 1 << 20)
    expected = whole.run(x, None)
    whole.prepare(native, x, None, None)
    for device, captures in ((-1, False), (0, False), (-1, True), (-1, False)):
        now.update(device=device, captures=captures)
        found = native.run(weights, x, None, None, False)
        if device < 0 and not captures:
            assert equal(found, expected)
        else:
            assert found is NotImplemented


def bases(host, prepared, gru, x):
    """Where the outputs of a call are, and the workspace of its launches."""
    schedule = next(each for each in prepared._stack._schedules.values() if each is not None)
    y, h_n = natively(prepared, gru, x)
    given = (host, prepared._stack.layers, 5, 3, CallForm(), False)
    recurrent = launch_plan.planned(*given)[0][0][-1]
    at = next(at for at, block, _ in recurrent[5] if block == SPACE)
    return y, h_n, schedule.records[-1][at // 8]


def test_results_are_new_and_the_workspace_is_not(host):
    gru = quantized()
    prepared, x = prepared_of(gru, host), torch.randn(5, 3, C)
    run(prepared, gru, x)
    seen = [bases(host, prepared, gru, x) for _ in range(4)]
    assert len({each.data_ptr() for y, h_n, _ in seen for each in (y, h_n)}) == 8
    assert len({y.untyped_storage().data_ptr() for y, _, _ in seen}) == 4
    assert len({Wx for _, _, Wx in seen}) == 1


def test_a_large_workspace_is_given_back(host, monkeypatch):
    monkeypatch.setattr(stack, "_KEPT_BYTES", 10)
    gru = quantized()
    prepared, x = prepared_of(gru, host), torch.randn(5, 3, C)
    expected = run(prepared, gru, x)
    assert equal(natively(prepared, gru, x), expected)


def test_outputs_of_inference_mode(host):
    gru = quantized()
    prepared, x = prepared_of(gru, host), torch.randn(5, 3, C)
    with torch.inference_mode():
        run(prepared, gru, x)
        assert all(each.is_inference() for each in natively(prepared, gru, x))
    assert not any(each.is_inference() for each in natively(prepared, gru, x))
    y, _ = natively(prepared, gru, x)
    assert (y._version, y.requires_grad, y.is_leaf) == (0, False, True)
    with torch.enable_grad():
        y.requires_grad_().sum().backward()
    assert y.grad is not None


def test_threads_of_other_sizes(host):
    gru = quantized()
    prepared = prepared_of(gru, host)
    inputs = [torch.randn(2 + i % 3, 1 + i % 2, C) for i in range(6)]
    expected = [gru(x) for x in inputs]
    for x in inputs:
        run(prepared, gru, x)

    def work(i):
        with torch.no_grad():
            return all(equal(natively(prepared, gru, inputs[i]), expected[i]) for _ in range(5))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(6)))


def test_nothing_is_left_behind(host):
    gru = quantized()
    prepared, x, hx = prepared_of(gru, host), torch.randn(5, 3, C), torch.randn(1, 3, H)
    run(prepared, gru, x, hx)
    weights = list(gru._parameters.values())
    given = [x, hx, weights, *weights, gru._parameters, torch.Tensor, torch.float32, NotImplemented]
    natively(prepared, gru, x, hx)
    before = [sys.getrefcount(each) for each in given]
    for _ in range(50):
        natively(prepared, gru, x, hx)
        natively(prepared, gru, x.double())
        natively(prepared, gru, x.transpose(0, 2).contiguous().transpose(0, 2), hx)
    assert [sys.getrefcount(each) for each in given] == before
    y, h_n = natively(prepared, gru, x, hx)
    assert (sys.getrefcount(y), sys.getrefcount(h_n)) == (2, 2)
    gone = weakref.ref(prepared._stack)
    del prepared
    gc.collect()
    assert gone() is None


def test_copies_have_no_prepared_calls_of_another(host):
    gru = quantized()
    x = torch.randn(5, 3, C)
    gru._state.plans.prepared = prepared = prepared_of(gru, host)
    expected = gru(x)
    assert gru._state.plans.prepared is prepared
    for other in (copy.deepcopy(gru), pickle.loads(pickle.dumps(gru))):
        assert equal(other(x), expected)
        other.weight_ih_l0.mul_(2)
        assert not equal(other(x), expected)
    assert equal(gru(x), expected)


def test_what_is_kept_for_a_backward_has_memory_of_its_own(host):
    gru = quantized()
    whole, x = stack.Stack(gru._plan(), host), torch.randn(5, 3, C)
    results = []
    for _ in range(3):
        kept = Kept()
        y, h_n = whole.run(x, None, None, kept)
        results.append((y, h_n, kept.nan, *kept.out))
    assert len({each.data_ptr() for result in results for each in result}) == 12
    for result in results[1:]:
        assert equal(result, results[0])


def test_an_error_of_a_launch_is_told(host, monkeypatch):
    gru = quantized()
    prepared, x = prepared_of(gru, host), torch.randn(5, 3, C)
    expected = run(prepared, gru, x)

    def fail(*_):
        raise RuntimeError("no launch")

    monkeypatch.setattr(host, "launch", fail)
    with pytest.raises(RuntimeError, match="no launch"):
        natively(prepared, gru, x)
    monkeypatch.undo()
    assert equal(natively(prepared, gru, x), expected)
