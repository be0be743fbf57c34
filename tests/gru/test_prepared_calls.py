"""Prepared inference calls: never stale, of the right dtype, the same as calls made anew."""

import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gru_helpers import C, quantized, seeded
from torch.nn.utils import prune

from quant_gru import QuantGRUError
from quant_gru.kernels.cpu import executor as cpu

X = seeded(5, 3, C)


def warm(gru):
    for _ in range(2):
        y, _ = gru(X)
    return y


def assert_fresh(gru):
    y, _ = gru(X)
    expected, _ = copy.deepcopy(gru)(X)
    assert torch.equal(y, expected)


@torch.no_grad()
def test_pruned_weight():
    gru = quantized()
    prune.identity(gru, "weight_ih_l0")
    before = warm(gru)
    gru.weight_ih_l0_mask.zero_()
    assert not torch.equal(gru(X)[0], before)


@torch.no_grad()
@pytest.mark.usefixtures("looks")
def test_storage_at_an_address_used_before():
    gru = quantized()
    warm(gru)
    for _ in range(8):
        gru.weight_hh_l0.data = gru.weight_hh_l0.data * -1.5
        assert_fresh(gru)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_dtype_of_weights_is_that_of_the_output(dtype):
    gru = quantized().to(dtype)
    assert {part.dtype for _ in range(3) for part in gru(X)} == {dtype}


@torch.no_grad()
def test_calls_of_changed_weights_are_prepared_again():
    gru = quantized()
    warm(gru)
    gru.weight_ih_l0.neg_()
    assert_fresh(gru)
    assert gru._state.plans.prepared.holds(gru._parameters.values())
    assert_fresh(gru)


def native_call(gru, x, hx=None):
    """What native code gives by itself; None where it leaves a call alone."""
    own = gru._parameters.values()
    return gru._state.plans.prepared.start(own, x, hx, None, gru.batch_first)


def fresh_call(gru, x, hx=None):
    gru._state.plans.prepared = None
    return gru(x, hx)


def strided(x, order):
    """The same values, laid out in another order."""
    back = sorted(range(x.dim()), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


@torch.no_grad()
@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (1, 4), (4, 1)])
def test_any_layout(shape, order, batch_first):
    gru = quantized(num_layers=2, bidirectional=True, batch_first=batch_first)
    warm(gru)
    x = strided(seeded(*shape, C), order)
    N = shape[0] if batch_first else shape[1]
    hx = strided(seeded(4, N, gru.hidden_size), order)
    for given in (None, hx):
        found = native_call(gru, x, given)
        y, h_n = fresh_call(gru, x.contiguous(), None if given is None else given.contiguous())
        assert torch.equal(found[0], y)
        assert torch.equal(found[1], h_n)
        assert found[1].is_contiguous()


@torch.no_grad()
def test_sizes_take_turns():
    gru = quantized()
    inputs = [seeded(T, N, C) for T, N in ((1, 1), (5, 3), (3, 5), (5, 3), (15, 1), (1, 15))]
    expected = [fresh_call(gru, x) for x in inputs]
    warm(gru)
    for _ in range(2):
        for x, (y, h_n) in zip(inputs, expected, strict=True):
            found = native_call(gru, x)
            assert torch.equal(found[0], y)
            assert torch.equal(found[1], h_n)


@torch.no_grad()
def test_threads_of_other_sizes():
    gru = quantized()
    inputs = [seeded(2 + i % 4, 1 + i % 3, C) for i in range(12)]
    expected = [fresh_call(gru, x)[0] for x in inputs]
    warm(gru)

    def work(i):
        with torch.no_grad():
            return all(torch.equal(native_call(gru, inputs[i])[0], expected[i]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))


@torch.no_grad()
@pytest.mark.usefixtures("looks")
def test_nan():
    gru = quantized()
    inputs = [X.masked_fill(X > level, torch.nan) for level in (-9, 1, 2)]
    hx = torch.zeros(1, X.shape[1], gru.hidden_size)
    hx[0, 1] = torch.nan
    calls = [*((x, None) for x in inputs), (X, hx), (inputs[-1], hx)]
    expected = [fresh_call(gru, x, hx) for x, hx in calls]
    warm(gru)
    for (x, hx), results in zip(calls, expected, strict=True):
        for found, wanted in zip(native_call(gru, x, hx), results, strict=True):
            assert wanted.isnan().any()
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@torch.no_grad()
@pytest.mark.usefixtures("looks")
def test_what_native_code_leaves_alone(monkeypatch):
    gru = quantized()
    warm(gru)
    H = gru.hidden_size
    assert native_call(gru, X) is not None
    for x in (None, X[0], X[None], X.int(), X[..., 1:], X[:0], X[:, :0], X.to("meta")):
        assert native_call(gru, x) is None
    assert native_call(gru, torch.nn.Parameter(X)) is None
    for hx in (torch.zeros(2, 3, H), torch.zeros(1, 2, H), torch.zeros(1, 3, H).int()):
        assert native_call(gru, X, hx) is None
    with torch.enable_grad():
        assert native_call(gru, X) is None
        gru.requires_grad_(False)
        assert native_call(gru, X) is not None
        assert native_call(gru, X.clone().requires_grad_()) is None
        assert native_call(gru, X, torch.zeros(1, 3, H, requires_grad=True)) is None
    monkeypatch.setenv(cpu.VARIABLE, cpu.REFERENCE)
    assert native_call(gru, X) is None
    monkeypatch.delenv(cpu.VARIABLE)
    weights = list(gru._parameters.values())
    run = gru._state.plans.prepared.start
    assert run(weights, X, None, None, False) is not None
    for others in (weights[:-1], [*weights, weights[0]], weights[::-1], [*weights[:-1], None]):
        assert run(others, X, None, None, False) is None


@torch.no_grad()
@pytest.mark.usefixtures("looks")
def test_negated_views():
    gru = quantized()
    warm(gru)
    expected = fresh_call(gru, -X)[0]
    warm(gru)
    for x in (torch._neg_view(X), torch.complex(X, X).conj().imag):
        assert x.is_neg()
        assert torch.equal(native_call(gru, x)[0], expected)


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn])
@pytest.mark.parametrize("frozen", [False, True])
def test_tensors_that_are_not_dense_are_named_at_every_call(change, frozen):
    gru = quantized().eval()
    gru = gru.freeze() if frozen else gru
    x, hx = seeded(4, 2, C), torch.zeros(1, 2, gru.shape.hidden_size if frozen else gru.hidden_size)
    with torch.no_grad():
        for _ in range(3):
            gru(x, hx)
            with pytest.raises(QuantGRUError, match="input to be a dense tensor"):
                gru(change(x), hx)
            with pytest.raises(QuantGRUError, match="hx to be a dense tensor"):
                gru(x, change(hx))


def test_outputs_of_inference_mode():
    gru = quantized()
    with torch.inference_mode():
        warm(gru)
        assert all(each.is_inference() for each in native_call(gru, X))
    with torch.no_grad():
        assert not any(each.is_inference() for each in native_call(gru, X))


FORKED = """
import os, torch
from quant_gru import QuantConfig, QuantGRU
torch.set_num_threads(2)
gru = QuantGRU(40, 64, config=QuantConfig.int8()).eval()
x = torch.randn(50, 64, 40)
gru.calibrate(x)
gru.finalize_calibration()
gru.use_quantization = True
with torch.inference_mode():
    expected = gru(x)[0].numpy().tobytes()
    child = os.fork()
    if child == 0:
        os._exit(0 if gru(x)[0].numpy().tobytes() == expected else 3)
    raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_goes_on():
    """With threads, too: none of ours is alive between calls."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
