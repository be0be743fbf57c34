"""Files of the profile `qdq` on a processor without VNNI, which qemu emulates."""

import platform
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import quant_gru
from quant_gru import QuantConfig, QuantGRU

onnx = pytest.importorskip("onnx")

# Neither torch nor this library: emulated, they would take longer than the runtimes.
RUN = """
import sys
import numpy as np
folder, runtime = sys.argv[1:]
x = np.load(folder + "/x.npy")
if runtime == "onnxruntime":
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    y = onnxruntime.InferenceSession(folder + "/gru.onnx", options).run(None, {"input": x})[0]
else:
    import openvino
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    y = openvino.Core().compile_model(folder + "/gru.onnx", "CPU", options)([x])[0]
np.save(folder + "/y.npy", y)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not for other processors than x86-64")
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64")
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_products_do_not_saturate(runtime, tmp_path):
    """With int8 weights, sums of two products leave 16 bits: up to 67 codes differ."""
    pytest.importorskip(runtime)
    torch.manual_seed(0)
    gru = QuantGRU(40, 64, batch_first=True, config=QuantConfig.int8()).eval()
    gru.calibrate(torch.randn(4, 50, 40))
    gru.finalize_calibration()
    gru.use_quantization = True
    x = 2 * torch.randn(5, 20, 40)
    quant_gru.export_onnx(gru, tmp_path / "gru.onnx", x, "qdq", verify=False)
    np.save(tmp_path / "x.npy", x.numpy())
    command = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", RUN, tmp_path, runtime]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        wrong = torch.from_numpy(np.load(tmp_path / "y.npy")) - gru(x)[0]
    assert wrong.abs().max() / gru.get_quant_config("output.h")["scale"] < 7


@pytest.mark.parametrize("config", [QuantConfig.int8(), QuantConfig.w8a16()])
def test_weights_are_unsigned_as_activations_are(config, tmp_path):
    gru = QuantGRU(4, 6, config=config).eval()
    gru.calibrate(torch.randn(9, 2, 4))
    gru.finalize_calibration()
    path = tmp_path / "gru.onnx"
    quant_gru.export_onnx(gru, path, torch.randn(9, 2, 4), "qdq", verify=False)
    graph = onnx.load(path).graph
    graphs = [graph, *(each.g for node in graph.node for each in node.attribute)]
    types = [each.data_type for graph in graphs for each in graph.initializer]
    assert onnx.TensorProto.UINT8 in types
    assert onnx.TensorProto.INT8 not in types
