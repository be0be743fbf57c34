"""Streaming: step by step equals the whole sequence, bit for bit."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch

from kept import calibrated_gru
from quant_gru import QuantConfig, QuantGRUError
from quant_gru.kernels.cpu import executor

C, H, T = 5, 7, 11

CONFIGS = {
    "int8": QuantConfig.int8(),
    "free16": QuantConfig.int16().replace_globals(scale_kind="free"),
    "24 bits": QuantConfig.uniform(24, False),
}


quantized = partial(calibrated_gru, C, H, data=(T, 3), seed=None)


@pytest.mark.parametrize("choice", executor.choices())
@pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_equal_the_whole(monkeypatch, name, layers, frozen, choice):
    monkeypatch.setenv(executor.VARIABLE, choice)
    gru = quantized(CONFIGS[name], num_layers=layers)
    module = gru.freeze() if frozen else gru
    x = torch.randn(T, 3, C)
    with torch.no_grad():
        expected, h_n = module(x)
        stream = module.stream(batch_size=3)
        for _ in range(2):
            y = torch.stack([stream(step) for step in x])
            assert torch.equal(y, expected)
            assert y.dtype == torch.float32
            codes = gru.forward_integer(gru._plan().cells[0][0].x.quantize(x))[1]
            assert torch.equal(stream.state.long(), codes.long())
            stream.reset()
    assert h_n.shape == stream.state.shape


def test_a_state_can_be_kept_and_put_back():
    gru = quantized(num_layers=2)
    stream = gru.stream()
    x = torch.randn(T, 1, C)
    for step in x[:4]:
        stream(step)
    kept = stream.state
    expected = [stream(step) for step in x[4:]]
    stream.reset()
    stream.state = kept
    assert torch.equal(stream.state, kept)
    again = [stream(step) for step in x[4:]]
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))


def test_kept_states_do_not_change_with_the_stream():
    stream = quantized().stream()
    kept = stream.state
    before = kept.clone()
    stream(torch.randn(1, C))
    assert torch.equal(kept, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_goes_on_by_itself(copied):
    stream, x = quantized(num_layers=2).stream(), torch.randn(3, 1, C)
    stream(x[0])
    other = copied(stream)
    assert torch.equal(other(x[1]), stream(x[1]))
    stream(x[2])
    assert not torch.equal(other.state, stream.state)


def test_the_plan_is_that_of_the_moment():
    gru = quantized()
    stream, x = gru.stream(), torch.randn(1, C)
    expected = stream(x)
    with torch.no_grad():
        gru.weight_ih_l0.mul_(-3)
    stream.reset()
    assert torch.equal(stream(x), expected)
    assert not torch.equal(gru.stream()(x), expected)


def test_a_stream_is_called_as_a_function_of_x():
    stream, x = quantized().stream(), torch.randn(1, C)
    expected = stream(x)
    stream.reset()
    assert torch.equal(stream(x=x), expected)
    for args, kwargs in (((), {}), ((x, x), {}), ((x,), {"x": x}), ((), {"y": x})):
        with pytest.raises(TypeError):
            stream(*args, **kwargs)
    with pytest.raises(AttributeError):  # it has no plan
        type(stream).__new__(type(stream))(x)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_output_is_a_tensor_of_its_own(name):
    stream, x = quantized(CONFIGS[name]).stream(), torch.randn(3, 1, C)
    made = [stream(step) for step in x]
    kept = [y.clone() for y in made]
    assert len({y.untyped_storage().data_ptr() for y in made}) == 3
    made[0].fill_(7)
    made[1].resize_(50)
    stream.reset()
    assert all(torch.equal(stream(step), y) for step, y in zip(x, kept, strict=True))
    assert torch.equal(made[2], kept[2])


def test_nan_stays_in_its_row_until_reset():
    stream = quantized().stream(2)
    bad = torch.zeros(2, C)
    bad[1, 2] = math.nan
    stream(torch.zeros(2, C))
    for x in (bad, torch.zeros(2, C)):
        y = stream(x)
        assert torch.isfinite(y[0]).all()
        assert torch.isnan(y[1]).all()
    stream.reset()
    assert torch.isfinite(stream(torch.zeros(2, C))).all()
    stream(bad)
    stream.state = stream.state
    assert torch.isfinite(stream(torch.zeros(2, C))).all()


@pytest.mark.parametrize("at", [0, 1])
def test_nan_in_another_row_adds_to_those_before(at):
    stream = quantized().stream(2)
    for row in (at, 1 - at):
        x = torch.zeros(2, C)
        x[row, 0] = math.nan
        y = stream(x)
    assert torch.isnan(y).all()
    assert torch.isnan(stream(torch.zeros(2, C))).all()


def test_bad_weights_give_nan():
    gru = quantized()
    with torch.no_grad():
        gru.bias_hh_l0[3] = math.inf
    assert torch.isnan(gru.stream()(torch.zeros(1, C))).all()


def test_errors_say_what_was_expected():
    gru = quantized()
    with pytest.raises(QuantGRUError, match="bidirectional"):
        quantized(bidirectional=True).stream()
    for batch_size in (0, -1, 1.0, True):
        with pytest.raises(QuantGRUError, match="batch_size"):
            gru.stream(batch_size)
    stream = gru.stream(2)
    for x in (torch.zeros(1, C), torch.zeros(2, C + 1), torch.zeros(2, C).long(), [0.0]):
        with pytest.raises(QuantGRUError, match=rf"\(2, {C}\)"):
            stream(x)
    with pytest.raises(QuantGRUError, match="gradient"):
        stream(torch.zeros(2, C, requires_grad=True))
    with pytest.raises(QuantGRUError, match="shape"):
        stream.state = torch.zeros(1, 1, H, dtype=torch.int8)
    with pytest.raises(QuantGRUError, match="integers"):
        stream.state = torch.zeros(1, 2, H, dtype=torch.bool)
    with pytest.raises(QuantGRUError, match=r"\[-128, 127\]"):
        stream.state = torch.full((1, 2, H), 1000)
