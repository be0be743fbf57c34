"""GRUs of ONNX, Keras and Haste become QuantGRUs with equal float outputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_gru import QuantConfig, QuantGRU, QuantGRUError

T, N = 7, 3
CLOSE = 1e-6


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def run_columns(x, kernel, recurrent, bias, recurrent_bias):
    """The GRU of Keras (reset_after=True) and Haste, as their documentation has it, float64.

    x (T, N, C) -> states (T, N, H); columns z, r, h.
    """
    H = recurrent.shape[0]
    h, states = np.zeros((x.shape[1], H)), []
    for step in x.astype(np.float64):
        from_x = step @ kernel.astype(np.float64) + bias
        from_h = h @ recurrent.astype(np.float64) + recurrent_bias
        z = sigmoid(from_x[:, :H] + from_h[:, :H])
        r = sigmoid(from_x[:, H : 2 * H] + from_h[:, H : 2 * H])
        candidate = np.tanh(from_x[:, 2 * H :] + r * from_h[:, 2 * H :])
        h = z * h + (1 - z) * candidate
        states.append(h)
    return np.stack(states)


def keras_arrays(generator, C, H, bias=True):
    arrays = [generator.normal(0, 0.5, (C, 3 * H)), generator.normal(0, 0.5, (H, 3 * H))]
    arrays += [generator.normal(0, 0.5, (2, 3 * H))] if bias else []
    return [each.astype(np.float32) for each in arrays]


def keras_run(x, arrays):
    bias = arrays[2] if len(arrays) == 3 else np.zeros((2, arrays[0].shape[1]))
    return run_columns(x, arrays[0], arrays[1], bias[0], bias[1])


@settings(max_examples=30, deadline=None)
@given(
    C=st.integers(1, 9),
    H=st.integers(1, 9),
    bias=st.booleans(),
    directions=st.integers(1, 2),
    layers=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_keras_weights(C, H, bias, directions, layers, seed):
    generator = np.random.default_rng(seed)
    y = x = generator.normal(0, 1, (T, N, C)).astype(np.float32)
    given_weights = []
    for layer in range(layers):
        size = directions * H if layer else C
        parts = [keras_arrays(generator, size, H, bias) for _ in range(directions)]
        given_weights.append([each for part in parts for each in part])
        outputs = [keras_run(y, parts[0])]
        if directions == 2:
            outputs.append(keras_run(y[::-1], parts[1])[::-1])
        y = np.concatenate(outputs, axis=2)
    gru = QuantGRU.from_keras(given_weights if layers > 1 else given_weights[0])
    assert gru.batch_first
    assert gru.bias == bias
    got = gru(torch.from_numpy(x).transpose(0, 1))[0].transpose(0, 1)
    assert np.abs(got.detach().numpy() - y).max() <= CLOSE


@settings(max_examples=30, deadline=None)
@given(
    C=st.integers(1, 9),
    H=st.integers(1, 9),
    layers=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_haste_parameters(C, H, layers, seed):
    generator = np.random.default_rng(seed)
    y = x = generator.normal(0, 1, (T, N, C)).astype(np.float32)
    parameters = []
    for layer in range(layers):
        kernel, recurrent, bias = keras_arrays(generator, H if layer else C, H)
        names = ("kernel", "recurrent_kernel", "bias", "recurrent_bias")
        parts = (kernel, recurrent, *bias)
        parameters.append(dict(zip(names, map(torch.from_numpy, parts), strict=True)))
        y = run_columns(y, *parts)
    gru = QuantGRU.from_haste(parameters if layers > 1 else parameters[0])
    assert np.abs(gru(torch.from_numpy(x))[0].detach().numpy() - y).max() <= CLOSE
    for layer, each in enumerate(parameters):
        back = gru.to_haste(layer)
        assert list(back) == list(each)
        assert all(torch.equal(back[name], each[name]) for name in each)


def test_haste_of_both_directions_and_without_biases():
    gru = QuantGRU(5, 4, 2, bidirectional=True)
    parameters = [[gru.to_haste(layer, reverse) for reverse in (False, True)] for layer in (0, 1)]
    again = QuantGRU.from_haste(parameters, config=QuantConfig.int16())
    assert again.config == QuantConfig.int16()
    for name, value in gru.named_parameters():
        assert torch.equal(again.get_parameter(name), value)
    plain = QuantGRU(5, 4, bias=False).to_haste()
    assert not plain["bias"].any()
    with pytest.raises(QuantGRUError, match=r"layer to be in 0\.\.1, got 2"):
        gru.to_haste(2)


def test_what_haste_gives_is_a_copy():
    gru = QuantGRU(5, 4)
    gru.to_haste()["kernel"].zero_()
    assert gru.weight_ih_l0.any()


HASTE = {
    "kernel": np.zeros((5, 12)),
    "recurrent_kernel": np.zeros((4, 12)),
    "bias": np.zeros(12),
    "recurrent_bias": np.zeros(12),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": np.zeros((5, 9))}, r"kernel to be of shape \(5, 12\), got \(5, 9\)"),
        ({"recurrent_kernel": np.zeros((4, 9))}, r"recurrent_kernel to be of shape \(4, 12\)"),
        ({"bias": np.zeros((2, 12))}, r"bias to have 1 dimension"),
        ({"recurrent_bias": np.zeros(9)}, r"recurrent_bias to be of shape \(12,\), got \(9,\)"),
        ({"kernel": "x"}, r"kernel to be an array of real numbers"),
        ({"kernel": np.zeros((0, 12))}, r"none of them empty"),
        ({"biass": np.zeros(12)}, r"'biass'; did you mean 'bias'"),
    ],
)
def test_errors_of_haste(change, message):
    with pytest.raises(QuantGRUError, match=message):
        QuantGRU.from_haste({**HASTE, **change})


def test_more_errors_of_haste():
    with pytest.raises(QuantGRUError, match="'bias', got none"):
        QuantGRU.from_haste({key: value for key, value in HASTE.items() if key != "bias"})
    for wrong in (3, "x", [], [3], [[HASTE, HASTE, HASTE]]):
        with pytest.raises(QuantGRUError, match="Expected"):
            QuantGRU.from_haste(wrong)
    with pytest.raises(QuantGRUError, match=r"layer 1 to continue layer 0.*input_size=4"):
        QuantGRU.from_haste([HASTE, HASTE])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.zeros((5, 12)), np.zeros((4, 12)), np.zeros(12)], r"reset_after=False multiplies"),
        (
            [np.zeros((5, 12)), np.zeros((4, 12)), np.zeros((2, 9))],
            r"shape \(2, 12\), got \(2, 9\)",
        ),
        ([np.zeros((5, 16)), np.zeros((4, 16))], r"recurrent_kernel to be of shape \(4, 12\)"),
        ([np.zeros((5, 12))], r"got 1 array"),
        (3, r"got int"),
        ([], r"Expected the list of get_weights"),
        ([[np.zeros((5, 12))]], r"layer 0: Expected kernel.* got 1 array"),
        ([[]], r"Expected"),
        ([np.zeros((5, 12)), np.zeros((4, 12)), np.zeros((6, 12)), np.zeros((4, 12))], "one shape"),
    ],
)
def test_errors_of_keras(arrays, message):
    with pytest.raises(QuantGRUError, match=message):
        QuantGRU.from_keras(arrays)


def test_a_layer_needs_a_file():
    with pytest.raises(QuantGRUError, match="layer only beside a file"):
        QuantGRU.from_keras([np.zeros((5, 12)), np.zeros((4, 12))], "gru")
