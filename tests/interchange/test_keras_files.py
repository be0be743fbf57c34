"""GRUs in files of Keras: against Keras itself, where it is installed."""

import os
import warnings
import zipfile

import numpy as np
import pytest
import torch

from quant_gru import QuantGRU, QuantGRUError

os.environ.setdefault("KERAS_BACKEND", "torch")
pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = 1e-6


@pytest.fixture(scope="module", autouse=True)
def _keras():
    """Import it where tests run, not where they are collected: it takes seconds."""
    global h5py, keras
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        h5py = pytest.importorskip("h5py")
        keras = pytest.importorskip("keras")


@pytest.fixture(scope="module")
def model():
    """GRU -> Bidirectional(GRU) -> GRU without biases, and what each returns for an input."""
    keras.utils.set_random_seed(0)
    kinds = keras.layers
    inputs = keras.Input((None, 5))
    first = kinds.GRU(4, return_sequences=True, name="first", bias_initializer="glorot_uniform")
    both = kinds.Bidirectional(
        kinds.GRU(3, return_sequences=True, bias_initializer="glorot_uniform"), name="both"
    )
    plain = kinds.GRU(4, return_sequences=True, use_bias=False, name="plain")
    outputs = [first(inputs)]
    outputs.append(both(outputs[0]))
    outputs.append(plain(outputs[1]))
    return keras.Model(inputs, outputs)


@pytest.fixture(scope="module", params=["m.keras", "m.h5", "m.weights.h5"])
def file(model, request, tmp_path_factory):
    path = tmp_path_factory.mktemp("keras") / request.param
    save = model.save_weights if ".weights" in request.param else model.save
    save(path)
    return path


def outputs_of(model):
    x = np.random.default_rng(0).normal(0, 1, (2, 7, 5)).astype(np.float32)
    outputs = model(x)
    return [x, *(keras.ops.convert_to_numpy(each) for each in outputs)]


@pytest.mark.parametrize("index", [0, 1, 2], ids=["first", "both", "plain"])
def test_layers_of_files(model, file, index):
    values = outputs_of(model)
    gru = QuantGRU.from_keras(file, ["first", "both", "plain"][index])
    got = gru(torch.from_numpy(values[index]))[0].detach().numpy()
    assert np.abs(got - values[index + 1]).max() <= CLOSE
    assert gru.bias == (index != 2)


@pytest.mark.parametrize("index", [0, 1, 2], ids=["first", "both", "plain"])
def test_weights_of_layers(model, index):
    values = outputs_of(model)
    layer = model.get_layer(["first", "both", "plain"][index])
    gru = QuantGRU.from_keras(layer.get_weights())
    got = gru(torch.from_numpy(values[index]))[0].detach().numpy()
    assert np.abs(got - values[index + 1]).max() <= CLOSE


def test_layers_that_are_stacked(tmp_path):
    keras.utils.set_random_seed(0)
    kinds = keras.layers
    layers = [kinds.Bidirectional(kinds.GRU(3, return_sequences=True), name=n) for n in "ab"]
    stack = keras.Sequential([keras.Input((None, 5)), *layers])
    stack.save(tmp_path / "s.keras")
    x = np.random.default_rng(0).normal(0, 1, (2, 7, 5)).astype(np.float32)
    expected = keras.ops.convert_to_numpy(stack(x))
    gru = QuantGRU.from_keras(tmp_path / "s.keras", ["a", "b"])
    assert gru.num_layers == 2
    assert np.abs(gru(torch.from_numpy(x))[0].detach().numpy() - expected).max() <= CLOSE
    with pytest.raises(QuantGRUError, match=r"'a' to continue 'b'.*got 3, 2 and 5"):
        QuantGRU.from_keras(tmp_path / "s.keras", ["b", "b", "a"])


def test_a_file_of_several_names_them(file):
    with pytest.raises(QuantGRUError, match=r"'both', 'first', 'plain', got None"):
        QuantGRU.from_keras(file)
    with pytest.raises(QuantGRUError, match=r"'frist'; did you mean 'first'"):
        QuantGRU.from_keras(file, "frist")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reset_after": False}, r"reset_after=False multiplies|reset_after to be True"),
        ({"reset_after": False, "use_bias": False}, r"reset_after to be True, got False"),
        ({"activation": "relu"}, r"activation to be 'tanh', got 'relu'"),
        ({"recurrent_activation": "hard_sigmoid"}, r"recurrent_activation to be 'sigmoid'"),
        ({"go_backwards": True}, r"go_backwards to be False"),
    ],
)
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_layers_that_compute_something_else(options, message, suffix, tmp_path):
    made = keras.Sequential([keras.Input((None, 5)), keras.layers.GRU(4, **options)])
    made.save(tmp_path / f"m{suffix}")
    with pytest.raises(QuantGRUError, match=message):
        QuantGRU.from_keras(tmp_path / f"m{suffix}")


def test_other_merge_modes(tmp_path):
    layer = keras.layers.Bidirectional(keras.layers.GRU(3), merge_mode="sum")
    keras.Sequential([keras.Input((None, 5)), layer]).save(tmp_path / "m.keras")
    with pytest.raises(QuantGRUError, match=r"merge_mode to be 'concat', got 'sum'"):
        QuantGRU.from_keras(tmp_path / "m.keras")


def test_files_without_a_gru(tmp_path):
    layers = [keras.layers.LSTM(4, return_sequences=True), keras.layers.Dense(2)]
    keras.Sequential([keras.Input((None, 5)), *layers]).save(tmp_path / "m.keras")
    with pytest.raises(QuantGRUError, match="no GRU"):
        QuantGRU.from_keras(tmp_path / "m.keras")


def test_files_that_are_none(tmp_path):
    with pytest.raises(QuantGRUError, match=r"got FileNotFoundError"):
        QuantGRU.from_keras(tmp_path / "absent.h5")
    with zipfile.ZipFile(tmp_path / "z.keras", "w") as archive:
        archive.writestr("config.json", "[")
    with pytest.raises(QuantGRUError, match="JSONDecodeError"):
        QuantGRU.from_keras(tmp_path / "z.keras")


def test_names_of_older_files(tmp_path):
    """tf.keras of TensorFlow 2 wrote 'kernel:0', and the name of the layer twice."""
    generator = np.random.default_rng(0)
    arrays = {
        "kernel:0": generator.normal(0, 1, (5, 12)),
        "recurrent_kernel:0": generator.normal(0, 1, (4, 12)),
        "bias:0": generator.normal(0, 1, (2, 12)),
    }
    path = tmp_path / "old.h5"
    with h5py.File(path, "w") as file:
        for place in ("one/one/gru_cell", "two/two/forward_gru/cell", "two/two/backward_gru/cell"):
            for name, value in arrays.items():
                file[f"model_weights/{place}/{name}"] = value.astype(np.float32)
    plain = QuantGRU.from_keras(path, "one")
    both = QuantGRU.from_keras(path, "two")
    assert both.bidirectional
    expected = QuantGRU.from_keras(list(arrays.values()))
    assert torch.equal(plain.weight_ih_l0, expected.weight_ih_l0)
    assert torch.equal(both.bias_hh_l0_reverse, expected.bias_hh_l0)


def test_activations_of_the_backward_layer(tmp_path):
    kinds = keras.layers
    other = kinds.GRU(3, go_backwards=True, activation="relu")
    layer = kinds.Bidirectional(kinds.GRU(3), backward_layer=other)
    keras.Sequential([keras.Input((None, 5)), layer]).save(tmp_path / "m.keras")
    with pytest.raises(QuantGRUError, match=r"activation to be 'tanh', got 'relu'"):
        QuantGRU.from_keras(tmp_path / "m.keras")
