"""Integer files at all optimization levels of ONNX Runtime, and in OpenVINO."""

import numpy as np
import pytest
import torch

from kept import kept
from quant_gru import QuantConfig, QuantGRU, export_onnx

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

C, H = 7, 9
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


@kept
def made(config, **options):
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=config, **options).eval()
    gru.calibrate(torch.randn(12, 4, C) + 0.3)
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def at_level(path, level):
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"input": x})[0]


def in_openvino(path):
    openvino = pytest.importorskip("openvino")
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(path), "CPU", hint)
    return lambda x: next(iter(compiled([x]).values()))


@pytest.mark.parametrize("time", [None, 1])
@pytest.mark.parametrize("preset", ["int8", "int8_wide", "w8a16", "int16"])
def test_codes_and_missing_values(preset, time, tmp_path):
    """NaN counts as 0; no optimizer may take `x == x` for true."""
    gru = made(getattr(QuantConfig, preset)())
    path = tmp_path / "gru.onnx"
    export_onnx(gru, path, torch.randn(time or 3, 2, C), time=time)
    assert b"IsNaN" not in path.read_bytes()
    x = 2 * torch.randn(time or 20, 5, C)
    x[0, 1, 2] = x[-1, 4, 0] = torch.nan
    x[0, 2, 1], x[0, 3, 3] = torch.inf, -torch.inf
    with torch.no_grad():
        expected = gru(torch.nan_to_num(x, 0.0, torch.inf, -torch.inf))[0].numpy()
    for level in LEVELS:
        assert np.array_equal(at_level(path, level)(x.numpy()), expected), level
    found = in_openvino(path)(x.numpy())
    scale = gru.get_quant_config("output.h")["scale"]
    codes = np.abs(np.rint((found - expected) / scale))
    if preset == "int8":
        assert codes.max() == 0
    # OpenVINO computes float64 in float32
    assert codes.max() <= 8
    assert (codes > 0).mean() < 0.1


@pytest.mark.parametrize("activation", ["exact", "pwl", "quadratic"])
@pytest.mark.parametrize("bits", [10, 14, 16])
def test_tables_beside_each_other(bits, activation, tmp_path):
    """Update and reset gate share a look-up where their tables are of one kind, else not."""
    config = QuantConfig.int16()
    for gate, width in (("z", bits), ("r", 15), ("g", bits)):
        config = config.replace(f"gate.{gate}_pre", bitwidth=width)
        config = config.replace(f"gate.{gate}_out", bitwidth=width)
    gru = made(config.replace_globals(activation=activation))
    report = export_onnx(gru, tmp_path / "gru.onnx", 2 * torch.randn(6, 2, C))
    assert not any(each.differing for each in report.values())


def test_16_bits_are_small(tmp_path):
    """Tables are segments: 65 536 entries for each gate were 370 kB."""
    path = tmp_path / "gru.onnx"
    export_onnx(made(QuantConfig.int16()), path, torch.randn(1, 1, C), time=1, verify=False)
    assert path.stat().st_size < 32_000


@pytest.mark.parametrize(("preset", "most"), [("int8", 60), ("int16", 85)])
def test_a_step_has_few_nodes(preset, most, tmp_path):
    """Each costs a runtime what starting an operator costs; weights are converted at loading."""
    gru = made(getattr(QuantConfig, preset)())
    path, seen = tmp_path / "gru.onnx", tmp_path / "seen.onnx"
    hx = torch.zeros(1, 1, H)
    export_onnx(gru, path, (torch.randn(1, 1, C), hx), batch=1, time=1, verify=False)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(seen)
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = [node.op_type for node in onnx.load(seen).graph.node]
    assert len(found) <= most, found
