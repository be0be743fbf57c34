"""quantize_onnx: GRU nodes of other tools' files, calibrated, replaced and compared."""

import copy
import json
import weakref

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gru_graphs import Graph, two_grus
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from typer.testing import CliRunner

from quant_gru import (
    CalibrationError,
    ConfigError,
    FrozenQuantGRU,
    QuantGRUError,
    QuantGRUWarning,
    convert_model,
    quantize_onnx,
)
from quant_gru.cli import app

T, N, C, H = 9, 2, 5, 6


def run(model, feed):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return dict(
        zip((each.name for each in session.get_outputs()), session.run(None, feed), strict=True)
    )


def simple(**options):
    """One GRU between Tanh and Relu, with dynamic batch and time; and feeds."""
    graph = Graph(opset=options.pop("opset", 17), dtype=options.pop("dtype", "float32"))
    batch_first = options.get("layout", 0) == 1
    x = graph.input("x", ["N", "T", C] if batch_first else ["T", "N", C])
    feed = {"x": graph.normal(N, T, C) if batch_first else graph.normal(T, N, C)}
    D = 2 if options.get("direction") == "bidirectional" else 1
    if options.pop("lengths", False):
        options["lengths"] = graph.input("lengths", ["N"], TensorProto.INT32)
        feed["lengths"] = np.array([T, 4], np.int32)
    state = options.pop("state", None)
    if state is not None:
        shape = (N, D, H) if batch_first else (D, N, H)
        value = graph.normal(*shape) / 4
        if state == "constant":
            options["h0"] = graph.store("h0", value)
        else:
            options["h0"] = graph.input("h0", list(shape))
            feed["h0"] = value
    graph.add("Tanh", [x], ["before"])
    for name in graph.gru("before", C, H, **options):
        if name:
            graph.output(graph.add("Neg", [name], [f"minus_{name}"]))
    graph.output(graph.add("Exp", [x], ["aside"]))
    return graph.model(), feed


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize(
    ("lengths", "state"), [(False, None), (True, "input"), (True, "constant"), (False, "input")]
)
def test_every_form_of_a_node(direction, layout, lengths, state):
    model, feed = simple(direction=direction, layout=layout, lengths=lengths, state=state)
    q = quantize_onnx(model, feed, "int16")
    assert "GRU" not in {node.op_type for node in q.proto.graph.node}
    onnx.checker.check_model(q.proto, full_check=True)
    (node,) = q.report.nodes.values()
    assert set(node.codes) == {"output", "h_n"}
    assert all(each.values and not each.wrong for each in node.codes.values())
    assert q.report.outputs["aside"] == np.inf
    assert q.report.outputs["minus_gru_Y"] > 60
    assert q.report.outputs["minus_gru_Y_h"] > 60
    after = run(q.proto, feed)
    if not layout:  # ONNX Runtime refuses layout 1
        before = run(model, feed)
        assert np.array_equal(before["aside"], after["aside"])
        assert np.abs(before["minus_gru_Y"] - after["minus_gru_Y"]).max() < 2e-3
    if not lengths and state is None:
        other = {"x": np.concatenate([feed["x"], feed["x"]], axis=layout)}
        assert run(q.proto, other)["minus_gru_Y"].shape[layout] == 2 * T


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 21, 23])
def test_the_opset_is_raised_only_if_it_must_be(opset):
    model, feed = simple(opset=opset)
    q = quantize_onnx(model, feed, "int8")
    (found,) = (each.version for each in q.proto.opset_import if each.domain == "")
    assert found == max(opset, 17)
    assert any("opset raised" in note for note in q.report.notes) == (opset < 17)
    assert q.proto.producer_name == "another tool"
    props = {each.key: each.value for each in q.proto.metadata_props}
    assert props["task"] == "test"
    assert props["quant_gru.profile"] == "integer"


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes(dtype):
    model, feed = simple(dtype=dtype)
    q = quantize_onnx(model, feed, "int16")
    found = run(q.proto, feed)
    assert found["minus_gru_Y"].dtype == dtype
    assert q.report.outputs["minus_gru_Y"] > 50


@pytest.mark.parametrize("profile", ["qdq", "float", "node"])
def test_other_profiles(profile):
    model, feed = simple()
    q = quantize_onnx(model, feed, "int8_wide", profile)
    assert q.report.outputs["minus_gru_Y"] > 20
    assert ("GRU" in {node.op_type for node in q.proto.graph.node}) == (profile != "qdq")


@pytest.mark.parametrize("wanted", ["Y", "Y_h"])
@pytest.mark.parametrize("bias", [True, False])
def test_one_output_alone(wanted, bias):
    model, feed = simple(outputs=(wanted,), bias=bias)
    q = quantize_onnx(model, feed, "int8")
    (node,) = q.report.nodes.values()
    assert list(node.codes) == ["output" if wanted == "Y" else "h_n"]


def test_nothing_else_changes():
    model, feed = simple(bias=False)
    given = model.SerializeToString()
    q = quantize_onnx(model, feed, "int8")
    assert model.SerializeToString() == given
    others = [node for node in model.graph.node if node.op_type != "GRU"]
    kept = [node for node in q.proto.graph.node if node in others]
    assert kept == others
    assert list(q.proto.graph.input) == list(model.graph.input)
    assert [each.name for each in q.proto.graph.output] == [
        each.name for each in model.graph.output
    ]
    assert not {"gru_W", "gru_R"} & {each.name for each in q.proto.graph.initializer}


def test_nodes_with_the_same_weights_are_one_gru():
    model, feeds = two_grus(shared=True)
    q = quantize_onnx(model, feeds, "int8")
    assert q.grus["first"] is q.grus["second"]
    assert q.report.feeds == 1  # every fifth one
    alone, _ = two_grus(shared=False)
    other = quantize_onnx(alone, feeds, "int8")
    assert q.proto.ByteSize() < other.proto.ByteSize()


def test_choices_by_name():
    model, feeds = two_grus()
    q = quantize_onnx(model, feeds, {"fir*": None, "*": "int16"})
    assert list(q.grus) == ["second"]
    assert q.report.kept == {"first": "config has None for it"}
    assert "first" in str(q.report)
    with pytest.raises(ConfigError, match="to match a GRU, got 'third'"):
        quantize_onnx(model, feeds, {"third": "int8", "*": "int16"})


def test_states_of_a_stream_are_inputs():
    graph = Graph()
    x, h = graph.input("x", [1, 1, C]), graph.input("h", [1, 1, H])
    y, after = graph.gru(x, C, H, h0=h)
    graph.output(y)
    graph.output(after)
    feeds, state = [], np.zeros((1, 1, H), np.float32)
    model = graph.model()
    for _ in range(12):
        feeds.append({"x": graph.normal(1, 1, C), "h": state})
        state = run(model, feeds[-1])["gru_Y_h"]
    q = quantize_onnx(model, feeds, "int8_wide")
    assert "Scan" not in {node.op_type for node in q.proto.graph.node}
    assert q.report.feeds == 2
    assert q.report.outputs["gru_Y_h"] > 25


def test_what_the_result_offers(tmp_path):
    model, feeds = two_grus()
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    q = quantize_onnx(path, feeds, "int8", output=tmp_path / "int8.onnx")
    assert onnx.load(tmp_path / "int8.onnx") == q.proto
    q.save(tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "int8.onnx").read_bytes()
    # the module computes what the file computes
    expected = run(q.proto, feeds[0])
    for name, found in zip(expected, q.model(feeds[0]), strict=True):
        assert np.array_equal(expected[name], found.numpy())
    frozen = q.freeze()
    assert {type(each) for each in frozen.values()} == {FrozenQuantGRU}
    written = q.export_c(tmp_path / "c", steps=2)
    assert set(written) == {"first", "second"}
    assert (tmp_path / "c/second/second.c").exists()
    with pytest.warns(QuantGRUWarning, match="AIMET quantizes the input and the state"):
        q.export_encodings(tmp_path / "model.encodings", "1.0.0")
    names = json.loads((tmp_path / "model.encodings").read_text())
    assert {"first_W", "second_R"} <= {each["name"] for each in names["param_encodings"]}
    gain = q.operator_gain(progress=False)
    assert {row.module for row in gain.rows} == {"first", "second"}
    assert gain.base == pytest.approx(q.report.outputs["second_Y"], abs=3.0)
    assert json.loads(q.report.to_json())["nodes"]["first"]["kind"] == f"GRU({C}, {C})"
    text = str(q.report)
    assert "equal" in text
    assert f"{path.stat().st_size:,} bytes in float" in text
    copied = copy.deepcopy(q.model)
    assert torch.equal(copied(feeds[1])[0], q.model(feeds[1])[0])


def test_feeds_in_a_file(tmp_path):
    model, feeds = two_grus()
    one, many = tmp_path / "one.npz", tmp_path / "many.npz"
    np.savez(one, x=feeds[0]["x"])
    np.savez(many, x=np.stack([each["x"] for each in feeds]))
    assert any("that calibration saw" in each for each in quantize_onnx(model, one).report.notes)
    q = quantize_onnx(model, many)
    assert q.report.feeds == 1
    assert not q.report.notes
    tested = quantize_onnx(model, feeds[:5], test_feeds=feeds[5])
    assert tested.report.feeds == 1


def test_feeds_are_not_kept():
    """A generator may yield more than fits in memory; 16 feeds are copied for the report."""
    model, feeds = two_grus()
    given, most = [], 0

    def many():
        nonlocal most
        for _ in range(85):
            feed = {"x": feeds[0]["x"].copy()}
            given.append(weakref.ref(feed["x"]))
            yield feed
            del feed
            most = max(most, sum(each() is not None for each in given))

    q = quantize_onnx(model, many(), "int8")
    assert len(given) == 85
    assert q.report.feeds == 16
    assert most <= 3


def test_the_command(tmp_path):
    model, feeds = two_grus()
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "feeds.npz", x=np.stack([feed["x"] for feed in feeds]))

    def command(*options):
        given = [tmp_path / "model.onnx", "--feeds", tmp_path / "feeds.npz", *options]
        return CliRunner().invoke(app, ["quantize", *map(str, given)])

    out = command("--preset", "int8")
    written = tmp_path / "model_int8.onnx"
    assert out.exit_code == 0
    assert f"Wrote {written}" in out.stdout
    assert "second" in out.stdout
    assert "GRU" not in {node.op_type for node in onnx.load(written).graph.node}
    again = command("--preset", "int8")
    assert again.exit_code == 2
    assert "exists; --force overwrites" in again.stderr
    out = command("-o", tmp_path / "other.onnx", "--json", "--profile", "qdq")
    assert json.loads(out.stdout)["nodes"]["first"]["kind"] == f"GRU({C}, {C})"


def test_functions_are_inlined():
    inner = Graph()
    weights = inner.weights("w", C, H, 1)
    body = helper.make_function(
        "mine",
        "Block",
        ["x", *weights],
        ["y"],
        [
            helper.make_node(
                "GRU", ["x", *weights], ["y"], name="gru", hidden_size=H, linear_before_reset=1
            )
        ],
        [helper.make_opsetid("", 17)],
    )
    graph = Graph()
    x = graph.input("x", ["T", "N", C])
    graph.stored = inner.stored
    graph.nodes.append(helper.make_node("Block", [x, *weights], ["out"], domain="mine"))
    graph.output("out")
    parts = helper.make_graph(graph.nodes, "g", graph.inputs, graph.outputs, graph.stored)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    model = helper.make_model(parts, opset_imports=opsets, functions=[body], ir_version=8)
    q = quantize_onnx(model, {"x": graph.normal(T, N, C)}, "int8")
    assert q.report.notes[0] == "functions of the file were inlined"
    assert len(q.grus) == 1


def with_a_branch():
    """A GRU in the main graph and one in a branch."""
    graph = Graph()
    x = graph.input("x", ["T", "N", C])
    condition = graph.input("c", [], TensorProto.BOOL)
    graph.output(graph.gru(x, C, H, "outer", outputs=("Y",))[0])
    inner = Graph(1)
    inner.gru(x, C, H, "inner", outputs=("Y",))
    graph.stored += inner.stored
    made = helper.make_tensor_value_info("inner_Y", TensorProto.FLOAT, None)
    then = helper.make_graph(inner.nodes, "then", [], [made])
    other = helper.make_tensor_value_info("copy", TensorProto.FLOAT, None)
    otherwise = helper.make_graph(
        [helper.make_node("Identity", ["outer_Y"], ["copy"])], "otherwise", [], [other]
    )
    graph.add("If", [condition], ["chosen"], then_branch=then, else_branch=otherwise)
    graph.output("chosen")
    return graph.model(), {"x": graph.normal(T, N, C), "c": np.array(True)}


def test_a_node_in_a_branch():
    model, feed = with_a_branch()
    with pytest.raises(QuantGRUError, match="got 'inner' in a branch or loop"):
        quantize_onnx(model, feed)
    q = quantize_onnx(model, feed, on_error="keep")
    assert list(q.grus) == ["outer"]
    assert "in a branch" in q.report.kept["inner"]
    # what a branch reads of the main graph stays
    feed["c"] = np.array(False)
    found = run(q.proto, feed)
    assert np.array_equal(found["chosen"], found["outer_Y"])


def test_a_node_in_a_loop():
    graph, inner = Graph(), Graph(1)
    x = graph.input("x", [T, N, C])
    inner.gru("state", C, C, "inner", outputs=("Y",))
    inner.store("shape", np.array([T, N, C]))
    inner.add("Reshape", ["inner_Y", "shape"], ["after"])
    inner.add("Identity", ["go_on"], ["goes_on"])
    graph.stored += inner.stored

    def value(name, kind, shape):
        return helper.make_tensor_value_info(name, kind, shape)

    state, flag = (TensorProto.FLOAT, [T, N, C]), (TensorProto.BOOL, [])
    body = helper.make_graph(
        inner.nodes,
        "body",
        [value("i", TensorProto.INT64, []), value("go_on", *flag), value("state", *state)],
        [value("goes_on", *flag), value("after", *state)],
    )
    graph.store("times", np.array(2))
    graph.store("yes", np.array(True))
    graph.add("Loop", ["times", "yes", x], ["y"], body=body)
    graph.output(graph.gru("y", C, H, "outer", outputs=("Y",))[0])
    model, feed = graph.model(), {"x": graph.normal(T, N, C)}
    with pytest.raises(QuantGRUError, match="got 'inner' in a branch or loop"):
        quantize_onnx(model, feed)
    q = quantize_onnx(model, feed, on_error="keep")
    assert list(q.grus) == ["outer"]
    assert q.report.outputs["outer_Y"] > 20


def test_a_node_that_cannot_be_quantized():
    graph = Graph()
    x = graph.input("x", ["T", "N", C])
    for name, linear in (("good", 1), ("bad", 0)):
        graph.output(graph.gru(x, C, H, name, outputs=("Y",), linear_before_reset=linear)[0])
    model, feed = graph.model(), {"x": graph.normal(T, N, C)}
    with pytest.raises(QuantGRUError, match=r"linear_before_reset to be 1.*'bad'"):
        quantize_onnx(model, feed)
    with pytest.warns(QuantGRUWarning, match="node 'bad' stays float"):
        q = quantize_onnx(model, feed, on_error="keep")
    assert list(q.grus) == ["good"]
    assert q.report.outputs["bad_Y"] == np.inf


def test_what_is_refused(tmp_path):
    model, feed = simple()
    for feeds, text in (
        ([], "at least one feed"),
        ({}, "feed for the inputs 'x', got none"),
        ({**feed, "y": feed["x"]}, "feed for the inputs 'x', got 'x', 'y'"),
        ([feed["x"]], "a feed to be a dict"),
        (3, "feeds to be a dict of arrays"),
        (str(tmp_path / "none.npz"), "feeds to be an .npz file"),
        ({"x": feed["x"][..., :2]}, "ONNX Runtime runs|input_size"),
        ({"x": feed["x"] * np.nan}, "NaN"),
    ):
        with pytest.raises((QuantGRUError, CalibrationError), match=text):
            quantize_onnx(model, feeds, output=tmp_path / "out.onnx")
    with pytest.raises(QuantGRUError, match="on_error to be"):
        quantize_onnx(model, feed, on_error="ignore")
    plain = Graph()
    plain.add("Tanh", [plain.input("x", ["T"])], ["y"])
    plain.output("y")
    with pytest.raises(QuantGRUError, match="a GRU node in the main graph, got Tanh"):
        quantize_onnx(plain.model(), {"x": feed["x"]})
    assert not list(tmp_path.iterdir())
    for wrong in (tmp_path / "model.onnx", model):
        with pytest.raises(QuantGRUError, match="quantize_onnx"):
            convert_model(wrong)


@pytest.mark.slow
@settings(max_examples=15)
@given(data=st.data())
def test_random_graphs(data):
    """GRU nodes between random others: codes equal, what no GRU reaches equal bit for bit."""
    draw = data.draw
    graph = Graph(draw(st.integers(0, 999)), draw(st.sampled_from([11, 13, 17, 21])))
    values, safe, count = [graph.input("x", ["T", 2, 4])], [True], 0
    for index in range(draw(st.integers(2, 7))):
        at = draw(st.integers(0, len(values) - 1))
        kind = draw(st.sampled_from(["GRU", "GRU", "Tanh", "Add", "Mul", "MatMul", "Pass"]))
        name = f"n{index}"
        if kind == "GRU":
            direction = draw(st.sampled_from(["forward", "reverse"]))
            shared = draw(st.booleans())
            weights = graph.weights("shared", 4, 4, 1) if shared and not count else None
            if shared and count:
                weights = [f"shared_{each}" for each in "WRB"]
                if not any(each.name == "shared_W" for each in graph.stored):
                    weights = None
            y, _ = graph.gru(values[at], 4, 4, name, direction, outputs=("Y",), weights=weights)
            graph.store(f"{name}_shape", np.array([0, 2, 4]))
            graph.add("Reshape", [y, f"{name}_shape"], [name])
            count += 1
            safe.append(False)
        elif kind in ("Add", "Mul"):
            other = draw(st.integers(0, len(values) - 1))
            graph.add(kind, [values[at], values[other]], [name])
            safe.append(safe[at] and safe[other])
        elif kind == "MatMul":
            graph.store(f"{name}_w", graph.normal(4, 4))
            graph.add(kind, [values[at], f"{name}_w"], [name])
            safe.append(safe[at])
        else:
            graph.add("Identity" if kind == "Pass" else kind, [values[at]], [name])
            safe.append(safe[at])
        values.append(name)
    if not count:
        y, _ = graph.gru(values[-1], 4, 4, "last", outputs=("Y",))
        values.append(y)
        safe.append(False)
    for name in values[1:]:
        graph.output(name)
    model, feed = graph.model(), {"x": graph.normal(5, 2, 4)}
    q = quantize_onnx(model, feed, draw(st.sampled_from(["int8", "int8_wide", "w8a16"])))
    assert not any(each.wrong for node in q.report.nodes.values() for each in node.codes.values())
    before, after = run(model, feed), run(q.proto, feed)
    for name, untouched in zip(values[1:], safe[1:], strict=True):
        if untouched:
            assert np.array_equal(before[name], after[name])
