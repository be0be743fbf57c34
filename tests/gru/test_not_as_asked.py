"""What would silently do something else is an error or a warning."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gru_helpers import C, H, quantized, same, seeded

from quant_gru import (
    CustomGRU,
    QuantGRU,
    QuantGRUCell,
    QuantGRUError,
    QuantGRUWarning,
    calibrate_model,
    compare,
    convert_model,
    float_state_dict,
)
from quant_gru.errors import forget_notes

# --- load_quant_params in float mode


@pytest.fixture
def path(tmp_path):
    quantized().export_quant_params(tmp_path / "params.json")
    return tmp_path / "params.json"


def test_a_forward_in_float_mode_after_loading_warns_once(path):
    gru = QuantGRU(C, H)
    gru.load_quant_params(path)
    with pytest.warns(QuantGRUWarning, match=r"use_quantization is False.*True") as caught:
        gru(seeded(4, 3, C))
    assert caught[0].filename == __file__
    gru(seeded(4, 3, C))


def test_a_cell_in_float_mode_after_loading_warns_once(path):
    cell = QuantGRUCell(C, H)
    cell.load_quant_params(path)
    with pytest.warns(QuantGRUWarning, match="use_quantization is False"):
        cell(seeded(3, C))
    cell(seeded(3, C))


@pytest.mark.parametrize("action", ["switched on", "used", "traced", "copied"])
def test_no_warning_where_the_scales_are_used(path, action):
    gru = QuantGRU(C, H).eval()
    gru.load_quant_params(path)
    x = seeded(4, 3, C)
    if action == "copied":
        other = pickle.loads(pickle.dumps(copy.deepcopy(gru)))
        with pytest.warns(QuantGRUWarning, match="use_quantization"):
            other(x)
    if action == "traced":
        gru.trace_codes(x)
    gru.use_quantization = True
    gru(x)
    if action == "used":
        gru.use_quantization = False  # to compare
        gru(x)


def test_loading_into_a_quantized_gru_does_not_warn(path):
    gru = QuantGRU(C, H, use_quantization=True)
    gru.load_quant_params(path)
    gru(seeded(4, 3, C))


def test_checkpoints_without_scales_do_not_warn(path):
    gru = QuantGRU(C, H)
    gru.load_state_dict(float_state_dict(quantized()))
    gru(seeded(4, 3, C))


# --- streams and threads


def elsewhere(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def streams():
    return [quantized().stream(), quantized().freeze().stream()]


@pytest.mark.parametrize("stream", streams(), ids=["live", "frozen"])
def test_a_stream_of_another_thread_is_an_error(stream):
    x = seeded(1, C)
    stream(x)
    before = stream.state
    with pytest.raises(QuantGRUError, match=r"one thread.*stream\(\).*any_thread"):
        elsewhere(stream, x)
    with pytest.raises(QuantGRUError, match="one thread"):
        elsewhere(stream, x.double())
    assert torch.equal(stream.state, before)
    stream(x)


def test_reset_gives_a_stream_to_the_next_thread():
    stream = quantized().stream()
    x = seeded(1, C)
    expected = stream(x)
    stream.reset()
    same(elsewhere(stream, x), expected)
    with pytest.raises(QuantGRUError, match="one thread"):
        stream(x)
    stream.state = stream.state
    stream(x)


def test_a_stream_of_any_thread():
    stream, plain = quantized().stream(), quantized().stream()
    stream.any_thread = True
    for step in seeded(5, 1, C):
        same(elsewhere(stream, step), plain(step))


def test_copies_belong_to_the_thread_that_uses_them():
    stream = quantized().stream()
    x = seeded(1, C)
    stream(x)
    for each in (copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))):
        elsewhere(each, x)


def test_two_threads_never_mix_states():
    stream, start = quantized().stream(), threading.Barrier(2)

    def read():
        start.wait()
        for step in seeded(200, 1, C):
            stream(step)

    with ThreadPoolExecutor(2) as pool:
        failures = [each.exception() for each in [pool.submit(read), pool.submit(read)]]
    assert sorted(type(each).__name__ for each in failures) == ["NoneType", "QuantGRUError"]
    plain = quantized().stream()
    for step in seeded(200, 1, C):
        plain(step)
    assert torch.equal(stream.state, plain.state)


# --- weights that are loaded after calibration


def test_other_weights_in_a_calibrated_gru_warn():
    gru, former = quantized(), torch.nn.GRU(C, H)
    with pytest.warns(QuantGRUWarning, match="'the GRU': other weights .* calibrate again") as seen:
        gru.load_state_dict(former.state_dict())
    assert seen[0].filename == __file__
    model = torch.nn.ModuleDict({"gru": gru})
    with pytest.warns(QuantGRUWarning, match="'gru': other weights"):
        model.load_state_dict({f"gru.{k}": 2 * v for k, v in former.state_dict().items()})


@pytest.mark.parametrize("action", ["same", "a few steps later", "with scales", "uncalibrated"])
def test_weights_that_the_scales_are_for_do_not_warn(action):
    gru = quantized()
    state = gru.state_dict() if action == "with scales" else float_state_dict(gru)
    if action == "a few steps later":
        state = {name: 1.02 * value for name, value in state.items()}
    (QuantGRU(C, H) if action == "uncalibrated" else gru).load_state_dict(state)


def test_a_custom_gru_calibrates_again_instead():
    gru = CustomGRU(C, H, calibration_data=seeded(5, 2, C), use_quantization=True)
    gru(seeded(5, 2, C))
    gru.load_state_dict(torch.nn.GRU(C, H).state_dict())
    assert not gru.is_calibrated()


@pytest.mark.parametrize("value", ["no", "False", None, 2, [True]])
def test_use_quantization_is_a_flag(value):
    gru = QuantGRU(C, H)
    with pytest.raises(QuantGRUError, match=r"Expected use_quantization to be True or False, got"):
        gru.use_quantization = value
    assert gru.use_quantization is False
    gru.use_quantization = 1
    assert gru.use_quantization is True


# --- what of a batch reaches the model


class Rows(torch.nn.Module):
    """A model whose rows have lengths."""

    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(C, H)

    def forward(self, x, lengths=None):
        return self.gru(x)[0]


class States(Rows):
    def forward(self, x, hx=None):
        return self.gru(x, hx)[0]


@pytest.mark.parametrize(
    ("kind", "batch", "message"),
    [
        (Rows, (seeded(4, 2, C), torch.tensor([4, 2])), "padding counts as data: 'lengths'"),
        (Rows, {"x": seeded(4, 2, C), "length": None}, "'length'.*did you mean 'lengths'"),
    ],
)
def test_what_a_batch_does_not_give_is_said_once(kind, batch, message):
    forget_notes()
    model = convert_model(kind())
    with pytest.warns(QuantGRUWarning, match=message) as seen:
        calibrate_model(model, [batch, batch])
    assert len(seen) == 1
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        (States, (seeded(4, 2, C), torch.zeros(4), "name")),
        (Rows, seeded(4, 2, C)),
        (Rows, {"x": seeded(4, 2, C), "lengths": None, "labels": None}),
    ],
)
def test_usual_batches_are_not_noted(kind, batch):
    forget_notes()
    calibrate_model(convert_model(kind()), [batch])


# --- comparisons


def test_compare_says_what_computes_in_floating_point():
    model = Rows()
    converted = convert_model(model)
    batches = [seeded(4, 2, C)]
    with pytest.warns(QuantGRUWarning, match="model 'quantized' .* 'gru'; call calibrate_model"):
        compare(model, converted, batches)
    calibrate_model(converted, batches).gru.use_quantization = False
    with pytest.warns(QuantGRUWarning, match="'gru'; set use_quantization to True"):
        compare(model, converted, batches)
