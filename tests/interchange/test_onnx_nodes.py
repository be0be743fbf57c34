"""GRU nodes of ONNX models become QuantGRUs: against ONNX Runtime, where it is installed."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_gru import QuantGRU, QuantGRUError, QuantGRUWarning

onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper

T, N = 6, 3
CLOSE = 1e-6
FLOAT = onnx.TensorProto.FLOAT


def gru_model(
    arrays, *, attributes=None, extra_nodes=(), stored=None, inputs=("x", "W", "R", "B"), opset=17
):
    """A model with one GRU node 'gru' from x to y and y_h."""
    hidden = arrays["R"].shape[2]
    given = {"hidden_size": hidden, "linear_before_reset": 1, **(attributes or {})}
    given = {key: value for key, value in given.items() if value is not None}
    node = helper.make_node("GRU", [*inputs], ["y", "y_h"], name="gru", **given)
    graph = helper.make_graph(
        [*extra_nodes, node],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [None, None, arrays["W"].shape[2]])],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in ("y", "y_h")],
        [numpy_helper.from_array(v, k) for k, v in (stored or arrays).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def arrays_of(generator, D=1, C=5, H=4, bias=True):
    shapes = {"W": (D, 3 * H, C), "R": (D, 3 * H, H), "B": (D, 6 * H)}
    if not bias:
        del shapes["B"]
    return {k: generator.normal(0, 0.5, shape).astype(np.float32) for k, shape in shapes.items()}


def run(model, feeds):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def assert_equal(gru, model, x):
    """y (T, D, N, H) and y_h (D, N, H) of ONNX Runtime are those of the GRU."""
    y, y_h = run(model, {"x": x})
    got, got_h = gru(torch.from_numpy(x))
    D, H = y.shape[1], y.shape[3]
    expected = y.transpose(0, 2, 1, 3).reshape(len(x), x.shape[1], D * H)
    assert np.abs(got.detach().numpy() - expected).max() <= CLOSE
    assert np.abs(got_h.detach().numpy() - y_h).max() <= CLOSE


@settings(max_examples=30, deadline=None)
@given(
    C=st.integers(1, 9),
    H=st.integers(1, 9),
    bias=st.booleans(),
    D=st.integers(1, 2),
    names=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_nodes(C, H, bias, D, names, seed):
    generator = np.random.default_rng(seed)
    attributes = {"direction": "bidirectional"} if D == 2 else {}
    if names:
        attributes["activations"] = ["Sigmoid", "Tanh"] * D
    arrays = arrays_of(generator, D, C, H, bias)
    inputs = ["x", "W", "R"] + ["B"] * bias
    model = gru_model(arrays, attributes=attributes, inputs=inputs)
    gru = QuantGRU.from_onnx(model)
    assert (gru.bias, gru.bidirectional, gru.batch_first) == (bias, D == 2, False)
    assert_equal(gru, model, generator.normal(0, 1, (T, N, C)).astype(np.float32))


def test_a_node_in_reverse():
    generator = np.random.default_rng(0)
    model = gru_model(arrays_of(generator), attributes={"direction": "reverse"})
    with pytest.raises(QuantGRUError, match=r"got 'reverse'; reverse=True"):
        QuantGRU.from_onnx(model)
    gru = QuantGRU.from_onnx(model, reverse=True)
    x = generator.normal(0, 1, (T, N, 5)).astype(np.float32)
    y, y_h = run(model, {"x": x})
    got, got_h = gru(torch.from_numpy(x).flip(0))
    assert np.abs(got.flip(0).detach().numpy() - y[:, 0]).max() <= CLOSE
    assert np.abs(got_h.detach().numpy() - y_h).max() <= CLOSE


def test_layout_one_has_the_batch_first():
    model = gru_model(arrays_of(np.random.default_rng(0)), attributes={"layout": 1})
    assert QuantGRU.from_onnx(model).batch_first


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [True, False])
def test_models_that_torch_exports(dynamo, tmp_path):
    if dynamo:
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    source = torch.nn.GRU(5, 4, 2, bidirectional=True)
    x = torch.randn(T, N, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(source, (x,), tmp_path / "m.onnx", dynamo=dynamo, verbose=False)
    model = onnx.load(tmp_path / "m.onnx")
    names = [node.output[0] for node in model.graph.node if node.op_type == "GRU"]
    gru = QuantGRU.from_onnx(tmp_path / "m.onnx", names)
    assert gru.num_layers == 2
    for mine, given_output in zip(gru(x), source(x), strict=True):
        assert (mine - given_output).abs().max() <= CLOSE
    with pytest.raises(QuantGRUError, match=r"node to name one of .*, got None"):
        QuantGRU.from_onnx(tmp_path / "m.onnx")


def test_weights_that_are_computed_from_initializers():
    """Dequantized, joined and reordered initializers, as exporters of quantized models write."""
    generator = np.random.default_rng(0)
    codes = generator.integers(-128, 128, (5, 12)).astype(np.int8)
    scale, zero = np.float32(0.01), np.int8(3)
    arrays = arrays_of(generator)
    stored = {
        "codes": codes,
        "scale": np.asarray(scale),
        "zero": np.asarray(zero),
        "axes": np.asarray([0], np.int64),
        "R": arrays["R"],
        "bw": arrays["B"][:, :12],
        "br": arrays["B"][:, 12:],
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["real"]),
        helper.make_node("Transpose", ["real"], ["rows"], perm=[1, 0]),
        helper.make_node("Unsqueeze", ["rows", "axes"], ["W"]),
        helper.make_node("Concat", ["bw", "br"], ["B"], axis=1),
    ]
    model = gru_model(arrays, extra_nodes=nodes, stored=stored)
    gru = QuantGRU.from_onnx(model)
    x = generator.normal(0, 1, (T, N, 5)).astype(np.float32)
    assert_equal(gru, model, x)


def test_half_and_double_weights_become_float32():
    generator = np.random.default_rng(0)
    arrays = arrays_of(generator)
    half = {name: value.astype(np.float16) for name, value in arrays.items()}
    gru = QuantGRU.from_onnx(gru_model(arrays, stored=half))
    assert gru.weight_ih_l0.dtype == torch.float32
    assert (gru.weight_ih_l0[4:8].detach().numpy() == half["W"][0, :4]).all()


def test_a_constant_initial_state_is_mentioned():
    arrays = arrays_of(np.random.default_rng(0))
    inputs = ["x", "W", "R", "B", "", "h"]
    for value in (0.0, 0.5):
        stored = {**arrays, "h": np.full((1, N, 4), value, np.float32)}
        model = gru_model(arrays, stored=stored, inputs=inputs)
        if value:
            with pytest.warns(QuantGRUWarning, match=r"initial_h .* give it as hx"):
                QuantGRU.from_onnx(model)
        else:
            QuantGRU.from_onnx(model)


def chain(first, last, count):
    """Nodes that hand a value on, `count` times."""
    names = [first, *(f"s{i}" for i in range(count - 1)), last]
    return [helper.make_node("Identity", [a], [b]) for a, b in itertools.pairwise(names)]


@pytest.mark.parametrize("count", [1, 199, 200, 1000])
def test_an_initial_state_late_in_a_graph_is_no_constant(count):
    """As in a streaming model of many GRUs, whose states are inputs."""
    arrays = arrays_of(np.random.default_rng(0))
    inputs = ["x", "W", "R", "B", "", "h"]
    model = gru_model(arrays, extra_nodes=chain("x", "h", count), inputs=inputs)
    assert QuantGRU.from_onnx(model).hidden_size == 4
    # the same chain of a constant is one, however long
    stored = {**arrays, "h0": np.full((1, N, 4), 0.5, np.float32)}
    model = gru_model(arrays, extra_nodes=chain("h0", "h", count), inputs=inputs, stored=stored)
    with pytest.warns(QuantGRUWarning, match=r"initial_h is a constant .* \(node 'gru', the model"):
        QuantGRU.from_onnx(model)


def test_weights_behind_too_many_nodes_name_their_node():
    arrays = arrays_of(np.random.default_rng(0))
    stored = {"V": arrays["W"], "R": arrays["R"], "B": arrays["B"]}
    model = gru_model(arrays, extra_nodes=chain("V", "W", 300), stored=stored)
    with pytest.raises(
        QuantGRUError, match=r"at most 200 nodes, got more \(W, node 'gru', the mod"
    ):
        QuantGRU.from_onnx(model)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"linear_before_reset": 0}, r"linear_before_reset to be 1, got 0"),
        ({"linear_before_reset": None}, r"linear_before_reset to be 1, got 0"),
        ({"clip": 1.0}, r"no clip"),
        ({"activations": ["Sigmoid", "Relu"]}, r"activations to be .*Tanh.*got .*relu"),
        ({"activations": ["Sigmoid"]}, r"activations to be"),
        ({"activation_alpha": [0.5]}, r"no activation_alpha"),
        ({"activation_beta": [0.5]}, r"no activation_beta"),
        ({"direction": "both"}, r"got 'both'"),
        ({"direction": "bidirectional"}, r"W to be of shape \(2, 12, 5\), got \(1, 12, 5\)"),
        ({"layout": 2}, r"layout to be 0 or 1, got 2"),
        ({"hidden_size": 5}, r"hidden_size to be 4, as R has it, got 5"),
        ({"hidden": 4}, r"an attribute of GRU, got 'hidden'; did you mean 'hidden_size'"),
    ],
)
def test_attributes_that_do_not_fit(attributes, message):
    model = gru_model(arrays_of(np.random.default_rng(0)), attributes=attributes)
    with pytest.raises(QuantGRUError, match=message):
        QuantGRU.from_onnx(model)


def test_hidden_size_may_be_left_out():
    model = gru_model(arrays_of(np.random.default_rng(0)), attributes={"hidden_size": None})
    assert QuantGRU.from_onnx(model).hidden_size == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W": np.zeros((1, 12), np.float32)}, r"W to have 3 dimensions"),
        ({"W": np.zeros((1, 9, 5), np.float32)}, r"W to be of shape \(1, 12, 5\)"),
        ({"R": np.zeros((1, 12, 5), np.float32)}, r"W to be of shape \(1, 15, 5\)"),
        ({"B": np.zeros((1, 12), np.float32)}, r"B to be of shape \(1, 24\), got \(1, 12\)"),
        ({"W": np.zeros((1, 12, 5), np.int8)}, r"W to be of a float dtype, got int8"),
        ({"W": np.zeros((1, 12, 0), np.float32)}, r"W to be of shape"),
    ],
)
def test_weights_that_do_not_fit(change, message):
    arrays = arrays_of(np.random.default_rng(0))
    with pytest.raises(QuantGRUError, match=message):
        QuantGRU.from_onnx(gru_model(arrays, stored={**arrays, **change}))


def test_weights_that_are_no_constants():
    arrays = arrays_of(np.random.default_rng(0))
    with pytest.raises(QuantGRUError, match=r"a constant, got one that depends on 'x'"):
        QuantGRU.from_onnx(gru_model(arrays, inputs=("x", "x", "R", "B")))
    nodes = [helper.make_node("Exp", ["V"], ["W"])]
    stored = {"V": arrays["W"], "R": arrays["R"], "B": arrays["B"]}
    with pytest.raises(QuantGRUError, match=r"got the result of Exp"):
        QuantGRU.from_onnx(gru_model(arrays, extra_nodes=nodes, stored=stored))
    with pytest.raises(QuantGRUError, match=r"Expected the input R, got none"):
        QuantGRU.from_onnx(gru_model(arrays, inputs=("x", "W")))


def test_nodes_by_name():
    arrays = arrays_of(np.random.default_rng(0))
    model = gru_model(arrays)
    second = helper.make_node(
        "GRU", ["x", "W", "R", "B"], ["z", ""], name="other", linear_before_reset=1, hidden_size=4
    )
    model.graph.node.append(second)
    for name in ("gru", "y", "y_h", "other", "z"):
        assert QuantGRU.from_onnx(model, name).hidden_size == 4
    with pytest.raises(QuantGRUError, match=r"node to name one of 'gru', 'other', got None"):
        QuantGRU.from_onnx(model)
    with pytest.raises(QuantGRUError, match=r"got 'ohter'.* did you mean 'other'"):
        QuantGRU.from_onnx(model, "ohter")
    with pytest.raises(QuantGRUError, match=r"at least one node"):
        QuantGRU.from_onnx(model, [])
    with pytest.raises(QuantGRUError, match=r"'other' to continue node 'gru'.*input_size=4"):
        QuantGRU.from_onnx(model, ["gru", "other"])
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Relu", ["x"], ["y"]))
    with pytest.raises(QuantGRUError, match=r"a GRU node in the main graph, got Relu"):
        QuantGRU.from_onnx(model)


def test_files_that_are_none(tmp_path):
    with pytest.raises(QuantGRUError, match="FileNotFoundError"):
        QuantGRU.from_onnx(tmp_path / "absent.onnx")
    with pytest.raises(QuantGRUError, match="opset 7 or later, got 3"):
        QuantGRU.from_onnx(gru_model(arrays_of(np.random.default_rng(0)), opset=3))


def test_onnx_is_needed_only_here(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(
        QuantGRUError, match=r"the package 'onnx' .*pip install \"quant-gru\[onnx\]"
    ):
        QuantGRU.from_onnx("m.onnx")
