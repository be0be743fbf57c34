"""AIMET reads the encodings of every version. Run with `pip install aimet-onnx pytest`."""

import pytest
import torch
from test_encodings import VERSIONS, calibrated, onnx_model

from quant_gru import QuantConfig, QuantGRU

onnx = pytest.importorskip("onnx")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def _aimet():
    """Import it where tests run, not where they are collected: it takes seconds."""
    global aimet_onnx
    aimet_onnx = pytest.importorskip("aimet_onnx")


CONFIGS = {
    "int8": QuantConfig.int8(),
    "int16": QuantConfig.int16(),
    "w8a16": QuantConfig.w8a16(),
    "symmetric": QuantConfig(),
    "free-gate": QuantConfig.int8()
    .replace_globals(scale_kind="free")
    .replace("weight.W", granularity="gate")
    .replace("weight.R", granularity="tensor"),
}
# AIMET quantizes the biases of the model, which has no corrected ones
CONFIGS = {name: config.replace_globals(correct_bias=False) for name, config in CONFIGS.items()}


def real_weights(gru):
    """The real values of the codes, under nn.GRU's names."""
    codes = gru.trace_codes(torch.zeros(1, 1, gru.input_size))
    found = {}
    for name, parameter in (
        ("W", "weight_ih"),
        ("R", "weight_hh"),
        ("bw", "bias_ih"),
        ("br", "bias_hh"),
    ):
        z, r, n = codes[f"weight.{name}_l0"].double().chunk(3)
        rows = torch.cat((r, z, n))
        scale = torch.tensor(gru.get_quant_config(name)["scale"]).double()
        scale = scale.repeat_interleave(len(rows) // len(scale))
        found[f"{parameter}_l0"] = (rows.T * scale).T.float()
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_aimet_quantizes_as_we_do(name, version, tmp_path):
    """AIMET's QDQ model has our scales, zero points, and the real values of our weight codes."""
    gru, path = calibrated(CONFIGS[name]), tmp_path / "g.encodings"
    model = onnx_model(gru)
    gru.export_encodings(path, version, onnx=model)
    made = aimet_onnx.encodings_to_onnx_qdq(model, str(path), force_activation_as=None)
    read = QuantGRU.from_onnx(made)
    for parameter, value in real_weights(gru).items():
        assert torch.equal(read.get_parameter(parameter), value), parameter
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in made.graph.initializer}
    for tensor, operator in (("x0", "x"), ("y0", "h"), ("h0", "h")):
        expected = gru.get_quant_config(operator)
        scale, zero = stored[f"{tensor}_scale"], stored[f"{tensor}_zero_point"]
        # codes of the other sign stand for the same real values
        half = 1 << (expected["bitwidth"] - 1)
        shift = half * (int(zero.dtype.kind == "i") - int(not expected["is_unsigned"]))
        assert (float(scale), int(zero) + shift) == (expected["scale"], expected["zero_point"])
