"""Files of the profile `qdq` on a processor without VNNI."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import quant_gru
from quant_gru import QuantConfig, QuantGRU

onnx = pytest.importorskip("onnx")

TOOL = Path(__file__).parents[2] / "tools/without_vnni.py"
# Neither torch nor this library: they take longer to import than the runtimes.
RUN = """
import sys
import numpy as np
import onnxruntime
folder, runtime = sys.argv[1:]
x = np.load(folder + "/x.npy")
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
if runtime == "onnxruntime":
    y = onnxruntime.InferenceSession(folder + "/gru.onnx", options).run(None, {"input": x})[0]
else:
    import openvino
    wanted = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    y = openvino.Core().compile_model(folder + "/gru.onnx", "CPU", wanted)([x])[0]
np.save(folder + "/y.npy", y)
session = onnxruntime.InferenceSession(folder + "/product.onnx", options)
print(session.run(None, {"a": np.full((1, 64), 255, np.uint8)})[0].max())
"""


def product():
    """A product of unsigned and signed bytes, which saturates without VNNI."""
    weights = onnx.numpy_helper.from_array(np.full((64, 64), 127, np.int8), "b")
    a = onnx.helper.make_tensor_value_info("a", onnx.TensorProto.UINT8, [1, 64])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [1, 64])
    node = onnx.helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    graph = onnx.helper.make_graph([node], "product", [a], [y], [weights])
    opset = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="not for other processors than x86-64")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not for other systems than glibc")
@pytest.mark.skipif(not shutil.which("objdump") or not shutil.which("cc"), reason="needs binutils")
@pytest.mark.parametrize(("runtime", "most"), [("onnxruntime", 0), ("openvino", 6)])
def test_products_do_not_saturate(runtime, most, tmp_path):
    """With int8 weights, sums of two products leave 16 bits: up to 67 codes differ."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip(runtime)
    torch.manual_seed(0)
    gru = QuantGRU(40, 64, batch_first=True, config=QuantConfig.int8()).eval()
    gru.calibrate(torch.randn(4, 50, 40))
    gru.finalize_calibration()
    gru.use_quantization = True
    x = 2 * torch.randn(5, 20, 40)
    quant_gru.export_onnx(gru, tmp_path / "gru.onnx", x, "qdq", verify=False)
    onnx.save(product(), tmp_path / "product.onnx")
    np.save(tmp_path / "x.npy", x.numpy())
    command = [sys.executable, TOOL, sys.executable, "-c", RUN, tmp_path, runtime]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 64 * 255 * 127, "the processor has VNNI"
    with torch.no_grad():
        wrong = torch.from_numpy(np.load(tmp_path / "y.npy")) - gru(x)[0]
    step = gru.get_quant_config("output.h")["scale"]
    assert (wrong.abs().max() / step).round() <= most


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
