"""Calls that read the current weights: training, eval with gradients on, inference tensors."""

import copy
import sys
import threading
from pathlib import Path

import pytest
import torch
from gru_helpers import C, H, quantized, seeded, states
from torch.nn.utils.rnn import pack_padded_sequence

import quant_gru
from quant_gru import QuantConfig, QuantGRU
from quant_gru.execution.prepared_call import PreparedCall
from quant_gru.kernels.cpu import executor

T, N = 5, 3
DEEP = {"num_layers": 2, "bidirectional": True}
CODE = str(Path(quant_gru.__file__).parent)

pytestmark = pytest.mark.skipif(
    executor.chosen() == executor.REFERENCE, reason="not for the reference executor"
)


@pytest.fixture
def ran(monkeypatch):
    """Whether each call of a live plan ran at once."""
    found, run = [], PreparedCall._run_live

    def counted(*args):
        result = run(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(PreparedCall, "_run_live", counted)
    return found


def fresh(gru, *args):
    """The same call of a module that has never been called, and its gradients."""
    return results(copy.deepcopy(gru), *args)


def results(gru, x, hx=None):
    y, h_n = gru(x, hx)
    values = y.data if isinstance(y, tuple) else y
    weights = [w for w in gru.parameters() if w.requires_grad]
    grad = torch.linspace(-1, 1, values.numel()).view_as(values)
    grads = torch.autograd.grad([values, h_n], weights, [grad, torch.ones_like(h_n)])
    return [values.detach(), h_n.detach(), *grads]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, DEEP, {"batch_first": True}, {"bias": False}])
def test_calls_are_repeated(ran, options, training):
    gru, x = quantized(**options).train(training), seeded(T, N, C)
    rows = T if gru.batch_first else N
    packed = pack_padded_sequence(seeded(T, N, C), [2, 5, 3], enforce_sorted=False)
    for given in ((x,), (x, states(gru, rows)), (x[:, :1],), (packed,), (x,)):
        expected = fresh(gru, *given)
        ran.clear()
        same(results(gru, *given), expected)
        same(results(gru, *given), expected)
        assert ran[-1]


@pytest.mark.parametrize("training", [False, True])
def test_weights_are_followed(ran, training):
    gru, x = quantized(**DEEP).train(training), seeded(T, N, C)
    results(gru, x)
    for change in (
        lambda w: w.data.mul_(0.5),
        lambda w: setattr(w, "data", w.data.clone() * -1),
        lambda w: setattr(gru, "weight_hh_l1", torch.nn.Parameter(w.detach() * 0.7)),
    ):
        change(gru.weight_hh_l1)
        same(results(gru, x), fresh(gru, x))
    assert any(ran)


@pytest.mark.parametrize("training", [False, True])
def test_wide_layers_follow_the_weights(training):
    gru, x = quantized(QuantConfig.uniform(20, False), **DEEP).train(training), seeded(T, N, C)
    before = results(gru, x)
    layers = [cell.weights for cells in gru._plan().cells for cell in cells]
    assert all(each.bits_W == 20 for each in layers)
    with torch.no_grad():
        gru.weight_hh_l1.mul_(0.5)
    found = results(gru, x)
    assert not torch.equal(found[0], before[0])
    same(found, fresh(gru, x))


def test_settings_are_followed():
    gru, x = quantized(**DEEP).eval(), seeded(T, N, C)
    before = results(gru, x)
    changes = {
        "stash_bits": lambda: setattr(gru, "stash_bits", 4),
        "all bits": lambda: setattr(gru, "stash_bits", None),
        "zoneout": lambda: setattr(gru, "zoneout", 0.5),
        "scales": lambda: gru.adjust_quant_config("x", scale=0.25),
        "learned scales": lambda: setattr(gru, "learn_scales", True),
    }
    for name, change in changes.items():
        change()
        found, expected = results(gru, x), fresh(gru, x)
        same(found, expected)
        assert name == "learned scales" or all(map(torch.equal, found, before)) == (
            name == "all bits"
        ), name
    with torch.no_grad():
        gru.log2_scale_l0.add_(0.5)
    same(results(gru, x), fresh(gru, x))


def test_noise_is_drawn_when_it_is_switched_on():
    gru, x = quantized(**DEEP).train(), seeded(T, N, C)
    plain = [results(gru, x) for _ in range(2)][1]
    for name in ("dropout", "zoneout", "recurrent_dropout"):
        setattr(gru, name, 0.5)
        first, second = results(gru, x), results(gru, x)
        assert not torch.equal(first[0], second[0])
        setattr(gru, name, 0.0)
        same(results(gru, x), plain)
    mask = torch.zeros(4, T, N, H)
    assert torch.equal(gru(x, states(gru, N), mask)[1], gru(x[:1], states(gru, N), mask[:, :1])[1])


def test_gradients_are_switched_on_and_off(ran):
    gru, x = quantized(**DEEP).eval(), seeded(T, N, C)
    expected = fresh(gru, x)
    for _ in range(3):
        with torch.no_grad():
            y, h_n = gru(x)
        assert not y.requires_grad
        same([y, h_n], expected[:2])
        same(results(gru, x), expected)
    gru.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    for _ in range(2):
        assert gru(leaf)[0].requires_grad
        assert not gru(x)[0].requires_grad
    gru.train()
    for _ in range(2):
        same([each.detach() for each in gru(x)], expected[:2])


def test_modules_made_in_inference_mode(ran):
    gru, x = quantized(**DEEP).eval(), seeded(T, N, C)
    with torch.inference_mode():
        expected = gru(x)
        copied = copy.deepcopy(gru)
        for _ in range(3):
            same(copied(x), expected)
        copied.weight_hh_l0.mul_(0.5)
        gru.weight_hh_l0.data.mul_(0.5)
        same(copied(x), copy.deepcopy(gru)(x))
    assert any(ran)
    assert all(ran)


def test_another_thread_has_a_plan_of_its_own(ran):
    gru, x = quantized(**DEEP).eval(), seeded(T, N, C)
    expected, found = fresh(gru, x), []
    results(gru, x)
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(results(gru, x)))
        thread.start()
        thread.join()
        same(results(gru, x), expected)
    assert len(found) == 2
    for each in found:
        same(each, expected)


def test_a_call_inside_an_update_gets_its_own_numbers():
    """As a signal handler makes one while the weights are quantized."""
    gru, x = quantized().eval(), seeded(T, N, C)
    expected = results(gru, x)
    (live,) = gru._state.plans.prepared.live
    with live.lock:
        same(results(gru, x), expected)


@pytest.mark.parametrize("training", [False, True])
def test_python_does_not_depend_on_the_number_of_cells(training):
    counts = []
    for options in ({}, DEEP, {"num_layers": 3}):
        gru, x = quantized(**options).train(training), seeded(1, 1, C)
        for _ in range(3):
            results(gru, x)
        count = 0

        def counted(frame, event, _):
            nonlocal count
            count += event == "call" and frame.f_code.co_filename.startswith(CODE)

        y, _ = gru(x)
        weights, grad = list(gru.parameters()), torch.ones_like(y)
        sys.setprofile(counted)
        torch.autograd.grad(gru(x)[0], weights, grad)
        sys.setprofile(None)
        counts.append(count)
    assert counts[0] == counts[1] == counts[2]
    assert counts[0] <= 20


def test_orders_of_packed_rows_that_are_wrong():
    gru = quantized()
    packed = pack_padded_sequence(seeded(T, N, C), [2, 5, 3], enforce_sorted=False)
    for name in ("sorted_indices", "unsorted_indices"):
        for wrong in (3, -1, 1 << 40):
            order = torch.tensor([0, wrong, 1])
            message = f"{name} of a PackedSequence to be in 0..2, got {wrong} at row 1"
            with pytest.raises(quant_gru.QuantGRUError, match=message):
                gru(packed._replace(**{name: order}), states(gru, N))


def test_a_batch_of_no_rows():
    gru: QuantGRU = quantized(**DEEP).train()
    x = seeded(T, 0, C).requires_grad_()
    y, h_n = gru(x)
    assert y.shape == (T, 0, 2 * H)
    (y.sum() + h_n.sum()).backward()
    assert all(not w.grad.any() for w in gru.parameters())


def test_gradients_after_calls_without_them():
    gru = quantized().train()
    x = seeded(T, N, C)
    with torch.no_grad():
        for _ in range(2):
            gru(x)
    for _ in range(3):
        same(results(gru, x), fresh(gru, x))


@pytest.mark.parametrize("kind", ["negated", "strided", "with a gradient"])
def test_inputs_of_other_layouts(kind):
    gru = quantized()
    plain = seeded(T, N, C)
    for _ in range(3):
        expected = results(gru, plain)
    if kind == "negated":
        x = torch._neg_view(-plain)
        assert x.is_neg()
    elif kind == "strided":
        x = torch.stack([plain, -plain], -1)[..., 0]
    else:
        x = plain.clone().requires_grad_()
    for _ in range(2):
        same(results(gru, x), expected)


def test_two_calls_before_a_backward():
    gru = quantized()
    x = seeded(T, N, C)
    for _ in range(3):
        expected = results(gru, x)
    y, h_n = gru(x)
    epochs = [each.epoch for each in gru._state.plans.prepared.live]
    gru(-x)
    # equal weights are no update, so that the first call's backward stays the fast one
    assert [each.epoch for each in gru._state.plans.prepared.live] == epochs
    grad = torch.linspace(-1, 1, y.numel()).view_as(y)
    given = [list(gru.parameters()), [grad, torch.ones_like(h_n)]]
    same(torch.autograd.grad([y, h_n], *given), expected[2:])


def test_weights_changed_before_a_backward():
    gru = quantized()
    x = seeded(T, N, C)
    for _ in range(3):
        results(gru, x)
    y, _ = gru(x)
    with torch.no_grad():
        gru.weight_hh_l0.mul_(-1)
    same(results(gru, x), fresh(gru, x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_executor_chosen_between_steps(monkeypatch):
    gru = quantized().train()
    x = seeded(T, N, C)
    for _ in range(3):
        expected = results(gru, x)
    monkeypatch.setenv(executor.VARIABLE, executor.REFERENCE)
    same(results(gru, x)[:2], expected[:2])
    monkeypatch.delenv(executor.VARIABLE)
    same(results(gru, x), expected)
