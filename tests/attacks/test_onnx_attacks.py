"""ONNX files whose constants grow, are elsewhere, or are none."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from limits import MIB, memory, refused

from quant_gru import QuantGRU, QuantGRUError

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

SHAPE = (1, 6, 2)


def model(nodes: list[Any], stored: dict[str, Any], W: str = "W") -> Any:
    """A GRU(2, 2) whose W is the result of nodes."""
    nodes = [*nodes, helper.make_node("GRU", ["x", W, "R"], ["y"], "gru", None, None)]
    nodes[-1].attribute.extend(
        [
            helper.make_attribute("hidden_size", 2),
            helper.make_attribute("linear_before_reset", 1),
        ]
    )
    tensors = {"R": np.zeros(SHAPE, np.float32), **stored}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            value if isinstance(value, TensorProto) else numpy_helper.from_array(value, name)
            for name, value in tensors.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(" "), outputs.split(" "), **attributes)


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def concats(times: int, levels: int) -> Any:
    """Concat of the same tensor, at several levels."""
    nodes = [
        node("Concat", " ".join([f"c{i}"] * times), f"c{i + 1}", axis=2) for i in range(levels)
    ]
    return model(nodes, {"c0": zeros(*SHAPE)}, f"c{levels}")


GROWING = {
    "Concat of 300 times the same tensor, three levels": (concats(300, 3), "more than 32 times"),
    "Concat of twice the same tensor, 40 levels": (concats(2, 40), "more than 32 times"),
    "Concat of 40 000 times the same tensor": (concats(40_000, 1), "more than 32 times"),
    "DequantizeLinear that numpy would broadcast": (
        model(
            [node("DequantizeLinear", "a s", "W", axis=1)],
            {"a": zeros(20_000, 1, dtype=np.int8), "s": zeros(20_000)},
        ),
        "scales of another shape than the values",
    ),
    "DequantizeLinear with scales of more dimensions": (
        model(
            [node("DequantizeLinear", "a s", "W")],
            {"a": zeros(1, 20_000, dtype=np.int8), "s": zeros(20_000, 1)},
        ),
        "scales of another shape than the values",
    ),
    "QuantizeLinear with zero points of another shape": (
        model(
            [node("QuantizeLinear", "a s z", "W", axis=1)],
            {"a": zeros(20_000, 1), "s": zeros(1), "z": zeros(20_000, dtype=np.int8)},
        ),
        "scales of another shape than the values",
    ),
    "Split into a billion outputs": (
        model([node("Split", "a", "W", num_outputs=1 << 30)], {"a": zeros(*SHAPE)}),
        "num_outputs of another number",
    ),
    "Cast of numbers to text": (
        model([node("Cast", "a", "W", to=TensorProto.STRING)], {"a": zeros(1000, 1000)}),
        "Cast to text",
    ),
    "Constant with a sparse value": (
        model(
            [
                helper.make_node(
                    "Constant",
                    [],
                    ["W"],
                    sparse_value=helper.make_sparse_tensor(
                        numpy_helper.from_array(zeros(1)),
                        numpy_helper.from_array(zeros(1, dtype=np.int64)),
                        [1 << 20, 1 << 20],
                    ),
                )
            ],
            {},
        ),
        "attribute 'sparse_value'",
    ),
    "a tensor that declares more than it stores": (
        model([], {"W": TensorProto(name="W", data_type=1, dims=[1, 6 << 20, 1 << 20])}),
        "a well-formed constant",
    ),
    "a node that needs itself": (model([node("Identity", "W", "W")], {}), "Expected"),
    "an operator that makes values": (
        model([node("ConstantOfShape", "s", "W")], {"s": np.array([1 << 20, 1 << 20])}),
        "got the result of ConstantOfShape",
    ),
}


@pytest.mark.parametrize("case", GROWING)
def test_little_files_cannot_ask_for_much(case):
    made, message = GROWING[case]
    with refused(message):
        QuantGRU.from_onnx(made)


USUAL = {
    "scales per channel": [
        node("DequantizeLinear", "q s", "W", axis=1),
    ],
    "slices put together in another order": [
        node("Split", "a", "u v", axis=1, num_outputs=2),
        node("Concat", "v u", "c", axis=1),
        node("Transpose", "c", "d", perm=[0, 2, 1]),
        node("Transpose", "d", "e", perm=[0, 2, 1]),
        node("Identity", "e", "W"),
    ],
}


@pytest.mark.parametrize("case", USUAL)
def test_usual_constants(case):
    stored = {"q": zeros(*SHAPE, dtype=np.int8), "s": zeros(6), "a": zeros(*SHAPE)}
    assert QuantGRU.from_onnx(model(USUAL[case], stored)).hidden_size == 2


# --- values in other files


def external(location: str, shape: tuple[int, ...] = SHAPE) -> Any:
    tensor = TensorProto(name="W", data_type=1, dims=shape, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def test_values_beside_the_model(tmp_path):
    (tmp_path / "w.bin").write_bytes(np.ones(SHAPE, np.float32).tobytes())
    made = model([], {"W": external("w.bin")})
    onnx.save(made, tmp_path / "m.onnx")
    assert QuantGRU.from_onnx(tmp_path / "m.onnx").weight_ih_l0.eq(1).all()
    with refused("stored in another file; give the path of the model"):
        QuantGRU.from_onnx(made)


@pytest.mark.parametrize(
    "location", ["../secret.bin", "{absolute}", "link.bin", "../m/../secret.bin"]
)
def test_values_elsewhere_are_refused(location, tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"S" * 48)
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "link.bin").symlink_to(secret)
    location = location.replace("{absolute}", str(secret))
    (folder / "m.onnx").write_bytes(model([], {"W": external(location)}).SerializeToString())
    with refused("Expected a well-formed constant"):
        QuantGRU.from_onnx(folder / "m.onnx")


def test_one_file_named_by_many_tensors(tmp_path):
    """A file of 4 MiB, 150 times."""
    (tmp_path / "w.bin").write_bytes(bytes(4 * MIB))
    stored = {f"t{i}": external("w.bin", (1, 6, MIB // 6)) for i in range(150)}
    for name, tensor in stored.items():
        tensor.name = name
        tensor.external_data.add(key="length", value=str(MIB // 6 * 24))
    nodes = [node("Concat", " ".join(stored), "W", axis=2)]
    (tmp_path / "m.onnx").write_bytes(model(nodes, stored).SerializeToString())
    with refused("more than 32 times"):
        QuantGRU.from_onnx(tmp_path / "m.onnx")


def test_tensors_that_are_not_needed_are_not_read(tmp_path):
    made = model([], {"W": zeros(*SHAPE), "absent": external("absent.bin")})
    made.graph.initializer[-1].name = "absent"
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    assert QuantGRU.from_onnx(tmp_path / "m.onnx").hidden_size == 2


# --- numbers


def test_numbers_that_float32_cannot_hold():
    with refused(r"W \(node 'gru', the model\) to be numbers that float32 can hold, got 1e\+300"):
        QuantGRU.from_onnx(model([], {"W": np.full(SHAPE, 1e300)}))


def test_negative_sizes():
    tensor = TensorProto(name="W", data_type=1, dims=[1, 6, -2], float_data=[0.0] * 12)
    with refused(r"dims \[1, 6, -2\]"):
        QuantGRU.from_onnx(model([], {"W": tensor}))


def test_damaged_files(tmp_path):
    """Any change of any bytes: a GRU, or an error of ours."""
    raw = model(USUAL["scales per channel"], {"q": zeros(*SHAPE, dtype=np.int8), "s": zeros(6)})
    raw = raw.SerializeToString()
    path = tmp_path / "m.onnx"
    generator = np.random.default_rng(0)
    for cut in generator.integers(0, len(raw) - 40, 40):
        path.write_bytes(raw[:cut])
        with pytest.raises(QuantGRUError):
            QuantGRU.from_onnx(path)
    for _ in range(300):
        data = bytearray(raw)
        for at in generator.integers(0, len(raw), 4):
            data[at] = generator.integers(0, 256)
        path.write_bytes(bytes(data))
        with memory(64 * MIB), contextlib.suppress(QuantGRUError):
            QuantGRU.from_onnx(path)
