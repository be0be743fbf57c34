"""Weights of 4 bits and fewer in ONNX files: INT4, and INT2 where the opset has it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from random_grus import with_weights

from quant_gru import QuantConfig, QuantGRUWarning, export_onnx, quantize_onnx
from quant_gru.interchange.onnx import builder

C, H = 40, 64
pytestmark = pytest.mark.filterwarnings("ignore:one signed bit")


def bytes_by_type(model: onnx.ModelProto) -> dict[int, int]:
    """The bytes of all constants, in functions and bodies, too."""
    found: dict[int, int] = {}

    def visit(nodes) -> None:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    count(attribute.t)
                visit(attribute.g.node)

    def count(tensor: onnx.TensorProto) -> None:
        found[tensor.data_type] = found.get(tensor.data_type, 0) + len(tensor.raw_data)

    visit(model.graph.node)
    for function in model.functions:
        visit(function.node)
    for tensor in model.graph.initializer:
        count(tensor)
    return found


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("base", ["int8", "w8a16"])
def test_the_integer_profile(bits: int, base: str, tmp_path: Path) -> None:
    gru = with_weights(bits, base, C, H)
    report = export_onnx(gru, tmp_path / "gru.onnx", torch.randn(5, 2, C))
    assert all(each.differing == 0 for each in report.values())
    found = bytes_by_type(onnx.load(tmp_path / "gru.onnx"))
    assert found[TensorProto.INT4] >= 3 * H * (C + H) // 2
    assert found.get(TensorProto.INT8, 0) < 3 * H * C // 2


def test_an_opset_without_int4(tmp_path: Path) -> None:
    gru = with_weights(4, "int8", C, H)
    report = export_onnx(gru, tmp_path / "gru.onnx", torch.randn(5, 2, C), opset=20)
    assert all(each.differing == 0 for each in report.values())
    found = bytes_by_type(onnx.load(tmp_path / "gru.onnx"))
    assert TensorProto.INT4 not in found
    assert found[TensorProto.INT8] >= 3 * H * (C + H)


RUNTIME = tuple(map(int, onnxruntime.__version__.split(".")[:2]))


class Whole(torch.nn.Module):
    """A GRU between other layers."""

    def __init__(self, gru: torch.nn.Module) -> None:
        super().__init__()
        self.gru, self.head = gru, torch.nn.Linear(H, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gru(torch.clamp(x, -3, 3))
        return torch.relu(self.head(y))


@pytest.mark.slow
@pytest.mark.skipif(RUNTIME < (1, 25), reason="not for an ONNX Runtime without opset 25")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("bits", "type_"), [(2, "INT2"), (4, "INT4")])
def test_opset_25(bits: int, type_: str, whole: bool, tmp_path: Path) -> None:
    gru = with_weights(bits, "int8", C, H)
    model = Whole(gru).eval() if whole else gru
    report = export_onnx(model, tmp_path / "gru.onnx", torch.randn(5, 2, C), opset=25)
    assert report
    assert all(each.differing == 0 for each in report.values())
    written = onnx.load(tmp_path / "gru.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert {each.domain: each.version for each in written.opset_import} == {"": 25}
    assert written.ir_version == 13
    found = bytes_by_type(written)
    assert found[getattr(TensorProto, type_)] >= 3 * H * (C + H) * bits // 8
    assert found.get(TensorProto.INT8, 0) < 3 * H * C // 2


def test_an_onnx_ir_without_int2_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ir = builder.onnx_ir()
    types = SimpleNamespace(**{each.name: each for each in ir.DataType if each.name != "INT2"})
    older = SimpleNamespace(**{**vars(ir), "DataType": types, "__version__": "0.1"})
    b = builder.Builder(opset=25)
    monkeypatch.setattr(b, "_ir", older)
    with pytest.warns(QuantGRUWarning, match=r"Expected an onnx_ir with INT2 .* got 0\.1"):
        assert b.few_bits(-2, 1) == (ir.DataType.INT4.numpy(), 4)
    assert builder.Builder(opset=24).few_bits(-2, 1) == (ir.DataType.INT4.numpy(), 4)


@pytest.mark.parametrize("profile", ["qdq", "node", "float"])
@pytest.mark.parametrize("opset", [22, 23])
def test_opsets_in_other_profiles(opset: int, profile: str, tmp_path: Path) -> None:
    gru = with_weights(8, "w8a16", C, H)
    export_onnx(gru, tmp_path / "gru.onnx", torch.randn(5, 2, C), profile, opset=opset)
    written = onnx.load(tmp_path / "gru.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert {each.domain: each.version for each in written.opset_import} == {"": opset}
    assert written.ir_version == {22: 10, 23: 11}[opset]


def float_file(path: Path, opset: int) -> None:
    """A file of one GRU node."""
    rng = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> onnx.TensorProto:
        values = rng.uniform(-1, 1, shape).astype(np.float32) * H**-0.5
        return onnx.numpy_helper.from_array(values, name)

    weights = [tensor("W", 1, 3 * H, C), tensor("R", 1, 3 * H, H), tensor("B", 1, 6 * H)]
    node = helper.make_node(
        "GRU", ["x", "W", "R", "B"], ["y"], hidden_size=H, linear_before_reset=1, name="gru"
    )
    real = TensorProto.FLOAT
    x = helper.make_tensor_value_info("x", real, ["T", "N", C])
    y = helper.make_tensor_value_info("y", real, ["T", 1, "N", H])
    graph = helper.make_graph([node], "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=12)
    onnx.save(model, path)


@pytest.mark.parametrize(("opset", "bits", "type_"), [(21, 4, "INT4"), (25, 2, "INT2")])
def test_quantize_onnx(opset: int, bits: int, type_: str, tmp_path: Path) -> None:
    float_file(tmp_path / "float.onnx", opset)
    config = QuantConfig.int8()
    for name in ("weight.W", "weight.R"):
        config = config.replace(name, bitwidth=bits)
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.standard_normal((9, 2, C), dtype=np.float32)} for _ in range(4)]
    result = quantize_onnx(tmp_path / "float.onnx", feeds, config, output=tmp_path / "int.onnx")
    (node,) = result.report.nodes.values()
    assert node.codes
    assert all(each.differing == 0 for each in node.codes.values())
    found = bytes_by_type(onnx.load(tmp_path / "int.onnx"))
    assert found[getattr(TensorProto, type_)] >= 3 * H * (C + H) * bits // 8
