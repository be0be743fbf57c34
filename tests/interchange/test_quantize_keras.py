"""quantize_keras: Keras' own models, whose float results the layers have before quantization."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import json
from unittest import mock

import numpy as np
import pytest
import torch

from quant_gru import (
    CalibrationError,
    ConfigError,
    FrozenQuantGRU,
    QuantGRUError,
    convert_model,
    quantize_keras,
)
from quant_gru.model_files.quantize_keras import KerasReport

# of Keras itself
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask"),
]

T, C, H = 7, 4, 5


@pytest.fixture(scope="module", autouse=True)
def _keras():
    """Import it where tests run, not where they are collected: it takes seconds."""
    global keras, layers
    keras = pytest.importorskip("keras")
    layers = keras.layers


def model_of(build, masked=False, batch=None):
    """A model of one layer, after a mask if it is wanted; random weights, biases too."""
    x = keras.Input((T, C), batch_size=batch)
    inner = layers.Masking()(x) if masked else x
    found = build(inner)
    model = keras.Model(x, found)
    random = np.random.default_rng(0)
    model.set_weights([random.normal(0, 0.5, w.shape).astype("f") for w in model.get_weights()])
    return model


def inputs(masked=False, seed=1, N=12):
    x = np.random.default_rng(seed).standard_normal((N, T, C)).astype("f")
    if masked:
        x[0, 4:] = 0  # padding behind
        x[1, :2] = 0  # and before
        x[1, 4] = 0  # a gap
        x[2] = 0  # nothing at all
    return x


def flat(value):
    values = value if isinstance(value, (list, tuple)) else [value]
    return [np.asarray(each.detach()) for each in values]


def as_float(q, model):
    """The layers' results without quantization must be Keras' own."""
    for gru in q.grus.values():
        gru.use_quantization = False
    return q.model


LAYERS = {
    "last": lambda x: layers.GRU(H)(x),
    "sequences": lambda x: layers.GRU(H, return_sequences=True)(x),
    "states": lambda x: layers.GRU(H, return_sequences=True, return_state=True)(x),
    "backwards": lambda x: layers.GRU(H, return_sequences=True, go_backwards=True)(x),
    "unrolled": lambda x: layers.GRU(H, return_sequences=True, unroll=True)(x),
    "without bias": lambda x: layers.GRU(H, use_bias=False)(x),
    "zeros": lambda x: layers.RNN(
        layers.GRUCell(H), return_sequences=True, zero_output_for_mask=True
    )(x),
    "cell": lambda x: layers.RNN(layers.GRUCell(H), return_sequences=True, go_backwards=True)(x),
    "both": lambda x: layers.Bidirectional(layers.GRU(H, return_sequences=True))(x),
    "sum of both": lambda x: layers.Bidirectional(layers.GRU(H), merge_mode="sum")(x),
    "stacked": lambda x: layers.GRU(3)(layers.GRU(H, return_sequences=True)(x)),
    "initial state": lambda x: layers.GRU(H)(x, initial_state=layers.Dense(H)(x[:, 0])),
    "nested": lambda x: keras.Sequential([layers.Input((T, C)), layers.GRU(H), layers.Dense(2)])(x),
}


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, masked):
    model = model_of(LAYERS[name], masked)
    batches = [inputs(masked, seed) for seed in range(6)]
    q = quantize_keras(model, batches, "int16")
    assert q.report.batches == 1
    wanted = flat(model(batches[0]))
    for a, b in zip(flat(q.model(batches[0])), wanted, strict=True):
        assert not np.array_equal(a, b)
        assert np.abs(a - b).max() < 5e-3
    assert min(q.report.outputs.values()) > 30  # so little data that values clip
    for a, b in zip(flat(as_float(q, model)(batches[0])), wanted, strict=True):
        assert np.abs(a - b).max() < 1e-5


def kept_states(model):
    return [np.array(each.value.detach()) for each in model.layers[1].states]


def test_states_that_stay():
    model = model_of(lambda x: layers.GRU(H, stateful=True, return_sequences=True)(x), batch=3)
    batches = [inputs(seed=seed, N=3) for seed in range(3)]
    model(batches[0])
    before = kept_states(model)
    q = quantize_keras(model, batches, "int16")
    # the model given does not change
    assert all(map(np.array_equal, before, kept_states(model)))
    for each in (model, q.model):
        for layer in each.layers[1:]:
            layer.reset_state()
    for batch in batches:  # the second batch goes on from the first one
        (a,), (b,) = flat(q.model(batch)), flat(model(batch))
        assert np.abs(a - b).max() < 5e-3


@pytest.mark.slow
def test_what_the_result_offers(tmp_path):
    model = model_of(
        lambda x: layers.Dense(2)(layers.Bidirectional(layers.GRU(H, return_sequences=True))(x))
    )
    weights = model.get_weights()
    batches = [inputs(seed=seed) for seed in range(2)]
    path = tmp_path / "model.keras"
    model.save(path)
    q = quantize_keras(path, batches, {"*forward_*": "int16", "*": "int8"})
    assert all(map(np.array_equal, weights, model.get_weights()))
    backward, forward = sorted(q.grus)
    assert "forward" in forward
    assert q.grus[forward].config["output.h"].bitwidth == 16
    assert q.grus[backward].config["output.h"].bitwidth == 8
    assert {type(each) for each in q.freeze().values()} == {FrozenQuantGRU}
    assert set(q.export_c(tmp_path / "c", steps=2)) == {forward, backward}
    text = str(q.report)
    assert f"GRU({C}, {H})" in text
    assert "that calibration saw" in text
    assert json.loads(q.report.to_json())["batches"] == 1
    left = quantize_keras(model, batches[0], {"*forward_*": None, "*": "int8"})
    assert list(left.grus) == [backward]
    report = q.export_onnx(tmp_path / "model.onnx", torch.from_numpy(batches[0]))
    assert not any(each.wrong for each in report.values())


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12.34, "12.3 dB"), (np.inf, "equal"), (np.nan, "zeros"), (-np.inf, "-inf")],
)
def test_decibels_that_are_not_finite(value, shown):
    report = KerasReport({"gru": "GRU(4, 5)"}, {"output": value}, (10, 5), 1, [])
    assert str(report).splitlines()[2].split(None, 1) == ["output", shown]


def test_what_is_refused():
    model = model_of(LAYERS["last"])
    for wrong in (model, "model.keras"):
        with pytest.raises(QuantGRUError, match="quantize_keras"):
            convert_model(wrong)
    with pytest.raises(QuantGRUError, match="a Keras model, got a Linear"):
        quantize_keras(torch.nn.Linear(2, 2), inputs())
    with pytest.raises(QuantGRUError, match="a GRU layer, got none"):
        quantize_keras(model_of(lambda x: layers.LSTM(H)(x)), inputs())
    with pytest.raises(QuantGRUError, match="reset_after to be True, got False"):
        quantize_keras(model_of(lambda x: layers.GRU(H, reset_after=False)(x)), inputs())
    with pytest.raises(QuantGRUError, match="activation to be 'tanh', got 'relu'"):
        quantize_keras(model_of(lambda x: layers.GRU(H, activation="relu")(x)), inputs())
    with pytest.raises(ConfigError, match="to match a GRU"):
        quantize_keras(model, inputs(), {"other": "int8", "*": None})
    with pytest.raises(CalibrationError, match="at least one batch"):
        quantize_keras(model, [])
    q = quantize_keras(model, inputs())
    with pytest.raises(QuantGRUError, match="Expected inference, got training=True"):
        q.model(inputs(), training=True)
    with mock.patch.object(keras.backend, "backend", return_value="jax"):
        with pytest.raises(QuantGRUError, match="KERAS_BACKEND=torch"):
            quantize_keras(model, inputs())
