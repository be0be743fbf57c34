"""What would silently do something else is an error or a warning."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gru_helpers import C, H, quantized, same, seeded

from quant_gru import QuantGRU, QuantGRUCell, QuantGRUError, QuantGRUWarning, float_state_dict

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
