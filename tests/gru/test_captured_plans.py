"""Plans and CUDA graphs: what replays read stays, and what was only recorded is not kept."""

import gc
import weakref

import pytest
import torch

from kept import calibrated_gru
from quant_gru import QuantGRUError
from quant_gru.execution import frozen_plan, plan_cache, prepared_call
from quant_gru.kernels.cuda.machine import refuse_in_capture
from quant_gru.kernels.cuda.plan import tensors

pytestmark = pytest.mark.slow


@pytest.fixture
def capture(monkeypatch):
    """Whether a graph is captured, as far as plans are concerned."""
    now = [False]
    for module in (plan_cache, frozen_plan, prepared_call, tensors):
        monkeypatch.setattr(module, "capturing", lambda device: now[0])
    return now


def quantized():
    return calibrated_gru(4, 8)


def parts_of(plan):
    return [weakref.ref(part) for c in plan.cells[0] for part in (c.weights, c.frozen)]


def changed(gru):
    with torch.no_grad():
        gru.weight_hh_l0.mul_(0.5)
    gru(torch.randn(2, 1, 4))


def trained(gru):
    gru.train()
    gru(torch.randn(2, 1, 4))[0].sum().backward()
    gru.eval()


WAYS = {
    "eval": lambda gru: gru.eval(),
    "train": trained,
    "weights": changed,
    "scales": lambda gru: gru._state.plans.clear(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("captured", [True, False])
def test_plans_of_captured_calls_outlive_what_forgets_them(capture, way, captured):
    gru, x = quantized(), torch.randn(3, 2, 4)
    with torch.no_grad():
        gru(x)
        capture[0] = captured
        parts = parts_of(gru._plan())
        capture[0] = False
    if not captured:
        gru._state.plans.prepared = None
    WAYS[way](gru)
    gru._state.plans.prepared = None
    gc.collect()
    alive = [part() is not None for part in parts]
    # what is frozen is made anew with the scales alone
    assert alive == [captured, captured or way != "scales"]
    del gru
    gc.collect()
    assert not any(part() for part in parts)


def test_a_plan_that_was_only_recorded_is_made_again(capture):
    gru = quantized()
    gru._state.plans.forget_weights()
    with torch.no_grad():
        capture[0] = True
        recorded = gru._plan()
        capture[0] = False
        first, second = gru._prepared(None).plan, gru._prepared(None).plan
    assert recorded.cells[0][0].weights is not first.cells[0][0].weights
    assert first.cells[0][0].weights is second.cells[0][0].weights


def test_a_frozen_plan_likewise(capture):
    frozen = quantized().freeze()
    x = torch.randn(3, 2, 4)
    capture[0] = True
    expected = frozen(x)
    recorded = [each.cells[0][0].weights for each in frozen._plans._captured]
    capture[0] = False
    assert recorded
    assert not frozen._plans._cells
    frozen._plans.prepared = None
    assert all(map(torch.equal, frozen(x), expected))
    assert frozen._plans._cells[0, 0][1].weights not in recorded


def test_a_prepared_call_that_was_captured_is_kept():
    gru, x = quantized(), torch.randn(3, 2, 4)
    plans = gru._state.plans
    for captured in (True, False):
        with torch.no_grad():
            gru(x)
        plans.prepared.captured = captured
        known = weakref.ref(plans.prepared)
        gru.eval()
        gc.collect()
        assert plans.prepared is None
        assert (known() is not None) == captured


def test_what_cannot_be_captured_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refuse_in_capture(torch.device("cpu"), "a plan")
    with pytest.raises(QuantGRUError, match=r"Expected a warm-up run .* is captured, got a plan$"):
        refuse_in_capture(torch.device("cuda", 1), "a plan")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    refuse_in_capture(torch.device("cuda", 1), "a plan")
