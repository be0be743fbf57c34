"""The scripts of docs/coming_from.md that need another tool or its files, where it is installed."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from quant_gru_pytorch_files import GENERATIONS, file_of, their_file

import quant_gru
from quant_gru import QuantConfig, QuantGRU

# Deprecations of other tools are theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
FIRST = re.search(r"```python\n(.*?)^```$", PAGE, re.M | re.S)
SCRIPT = re.compile(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?<!-- no-run -->\n```python\n(.*?)^```$", re.M | re.S
)
SCRIPTS = dict(SCRIPT.findall(PAGE))


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The model of the page, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    found = {"__name__": "script"}
    exec(FIRST[1], found)
    return found


def run(title, names):
    exec(compile(SCRIPTS[title], title, "exec"), names)


def write_float_model(names):
    pytest.importorskip("onnx")
    plain = quant_gru.convert_model(names["model"])
    x = names["batches"][0][:1]
    quant_gru.export_onnx(plain, "model.onnx", x, profile="float", verify=False)


@torch.no_grad()
def decibels(gru, names):
    """Signal to noise of a quantized GRU with the weights of the model."""
    x = names["batches"][0]
    assert gru.use_quantization
    real = names["model"].gru(x)[0]
    return float(10 * torch.log10(real.square().sum() / (real - gru(x)[0]).square().sum()))


def test_each_script_is_tested():
    assert len(SCRIPTS) == PAGE.count("<!-- no-run -->") == 5


@pytest.mark.parametrize("generation", GENERATIONS)
def test_quant_gru_pytorch(generation, names):
    given = QuantGRU(16, 24, batch_first=True, config=QuantConfig.int8())
    given.load_state_dict(names["model"].gru.state_dict())
    given.calibrate(names["batches"][0])
    given.finalize_calibration()
    params = their_file(given, GENERATIONS[generation])
    z_out = "update_gate_output" if generation == "newer" else "gate.z_out"
    Path("their_params.json").write_text(json.dumps(params))
    Path("their_config.json").write_text(json.dumps(file_of({z_out: {"bitwidth": 9}})))
    run("quant-gru-pytorch", names)
    assert decibels(names["gru"], names) > 20
    assert QuantConfig.from_json("gru_quant_bitwidth_config.json")["z_out"].bitwidth == 9
    again = QuantGRU(16, 24, batch_first=True)
    again.load_quant_params("gru_params.json")
    assert again.get_quant_config() == names["gru"].get_quant_config()


@pytest.mark.slow
def test_aimet(names):
    quantsim = pytest.importorskip("aimet_onnx.quantsim")
    onnx = pytest.importorskip("onnx")
    write_float_model(names)
    simulation = quantsim.QuantizationSimModel(
        onnx.load("model.onnx"), param_type="int8", activation_type="int8"
    )
    feeds = [{"x": each[None].numpy()} for each in names["batches"][0]]
    simulation.compute_encodings(lambda session: [session.run(None, feed) for feed in feeds])
    simulation.export(".", "model", encoding_version="2.0.0")
    run("AIMET", names)
    gru = names["quantized"].gru
    (theirs,) = simulation.qc_quantize_op_dict["x"].get_encodings()
    for name in ("x", "h"):
        assert gru.get_quant_config(name)["scale"] == pytest.approx(theirs.delta, rel=1e-6)
    assert gru.get_quant_config("bw")["bitwidth"] == 32
    assert decibels(gru, names) > 20


def test_dynamically_quantized_weights(names):
    run("torch.ao, pt2e and torchao", names)
    assert decibels(names["gru"], names) > 25


def test_onnx_runtime(names):
    """Its quantizer leaves the GRU alone, and ours is exact on what it makes of the rest."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    write_float_model(names)
    run("ONNX Runtime's quantizer", names)
    operators = {node.op_type for node in onnx.load("rest.onnx").graph.node}
    assert {"GRU", "MatMulInteger"} <= operators
    (node,) = names["quantized"].report.nodes.values()
    assert node.sqnr > 25
    assert not any(each.differing for each in node.codes.values())
    assert "GRU" not in {node.op_type for node in onnx.load("model_int8.onnx").graph.node}


def test_keras(names):
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    gru = keras.layers.GRU(24, return_sequences=True, name="gru")
    keras.Sequential([keras.Input((40, 16)), gru, keras.layers.Dense(4)]).save("model.keras")
    run("TensorFlow Lite", names)
    assert list(Path("source").rglob("*.c"))
    assert names["gru"].batch_first
