"""ONNX files of models with many GRUs of one step: what is in them, and how much."""

import numpy as np
import pytest
import torch
from gru_helpers import seeded

from quant_gru import calibrate_model, convert_model, export_onnx
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import build_table
from sweeps import first_of

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

SIZES = (8, 4, 8, 8)
# preset -> bytes of a GRU, and operators that a step runs
LIMITS = {
    "int8": (8_000, 32),
    "int8_wide": (10_500, 33),
    "w8a16": (14_500, 43),
    "int16": (15_000, 43),
}


class Steps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.grus = torch.nn.ModuleList(torch.nn.GRU(6, size) for size in SIZES)

    def forward(self, x, states):
        pairs = zip(self.grus, states, strict=True)
        return tuple(value for gru, state in pairs for value in gru(x, state))


def given(T, N):
    return seeded(T, N, 6), [torch.zeros(1, N, size) for size in SIZES]


@pytest.fixture(scope="module", params=first_of(LIMITS, 0))
def written(request, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("steps") / "steps.onnx"
    model = convert_model(Steps().eval(), request.param)
    calibrate_model(model, [given(40, 8)], lambda m, batch: m(*batch))
    report = export_onnx(model, path, given(1, 1), batch=1, time=1)
    return request.param, path, report


def operators_that_run(path):
    """The operators that depend on an input, with all functions in the place of their calls."""
    from onnx import inliner

    graph = inliner.inline_local_functions(onnx.load(path)).graph
    changing = {each.name for each in graph.input}
    found = []
    for node in graph.node:
        if changing.intersection(node.input):
            changing.update(node.output)
            found.append(node.op_type)
    return found


def test_every_code_is_that_of_the_plan(written):
    assert written[2]
    assert not any(each.wrong for each in written[2].values())


def test_bytes(written):
    preset, path, _ = written
    assert path.stat().st_size < LIMITS[preset][0] * len(SIZES)


def test_operators_of_a_step(written):
    preset, path, _ = written
    assert 28 < len(operators_that_run(path)) / len(SIZES) <= LIMITS[preset][1]


def test_shapes_are_left_to_readers(written):
    """They follow from the inputs, so that a file notes none; names are short."""
    proto = onnx.load(written[1])
    assert not proto.graph.value_info
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True).graph
    known = {each.name: each.type for each in (*inferred.value_info, *inferred.output)}
    made = [name for node in proto.graph.node for name in node.output]
    assert len(made) == len(set(made))
    for name in made:
        dims = known[name].tensor_type.shape.dim
        assert all(dim.HasField("dim_value") for dim in dims), name
    inner = set(made) - {each.name for each in proto.graph.output}
    assert max(map(len, inner)) < 8


def test_openvino_takes_all_steps(written):
    """In it the lists are made of float32, so that 16-bit codes may differ."""
    openvino = pytest.importorskip("openvino")
    preset, path, _ = written
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    call = openvino.Core().compile_model(str(path), "CPU", hint)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x, states = given(1, 1)
    arrays = [x.numpy(), *(state.numpy() for state in states)]
    names = [each.name for each in session.get_inputs()]
    expected = session.run(None, dict(zip(names, arrays, strict=True)))
    for found, wanted in zip(call(arrays).values(), expected, strict=True):
        tolerance = 0 if preset == "int8" else 1e-3
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


# --- lists of tables


@pytest.mark.parametrize("R", first_of([1.1, 0.3, 1.0, 4.0, 8.0, 100.0], 2))
@pytest.mark.parametrize("bits", [(10, 8), (11, 12), (12, 12), (13, 8), (15, 16), (16, 16)])
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_a_list_has_every_output_of_its_table(function, bits, R):
    from onnx.reference import ReferenceEvaluator

    from quant_gru.interchange.onnx.builder import Builder, model_of, proto_of
    from quant_gru.interchange.onnx.lookups import is_even, is_stored, list_of, outputs

    pre = Quantizer(bits[0], signed=True, scale=float(np.float32(R * 2.0 ** (1 - bits[0]))))
    unit = 1 - bits[1] if function == "tanh" else -bits[1]
    out = Quantizer(bits[1], signed=function == "tanh", scale=2.0**unit)
    table = build_table(function, pre, out, "exact")
    assert is_stored(table) or is_even(table)
    wanted = outputs(table)
    for dtype in ("FLOAT", "DOUBLE"):
        b = Builder()
        found, count = list_of(b, table, dtype)
        model = model_of(b, [], {"list": (b.op("Identity", found), dtype, [count])})
        proto = proto_of(model)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        session = ort.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        for (entries,) in (session.run(None, {}), ReferenceEvaluator(proto).run(None, {})):
            assert len(entries) == count
            np.testing.assert_array_equal(entries[: len(wanted)].astype(np.int64), wanted)
