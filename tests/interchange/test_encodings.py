"""Encodings of AIMET: what is written, what is read back, what does not fit."""

import copy
import json
import os
import random

import numpy as np
import pytest
import torch

import quant_gru
from kept import kept
from quant_gru import (
    CalibrationError,
    ParameterError,
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    QuantGRUWarning,
)

# a warning of nearly every case here; test_separate_scales_warn is about it
pytestmark = pytest.mark.filterwarnings("ignore:AIMET quantizes the input")

VERSIONS = ("0.6.1", "1.0.0", "2.0.0")
C, H = 5, 4


@kept
def calibrated(config=None, *, seed=0, **options):
    torch.manual_seed(seed)
    gru = QuantGRU(C, H, config=config or QuantConfig.int8(), **options).eval()
    gru.calibration_method = "minmax"
    gru.calibrate(torch.randn(10, 3, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def scales_of(gru):
    return [[cell.quantizers, dict(cell.pinned)] for layer in gru._state.scales for cell in layer]


def onnx_model(*grus):
    """A float model with one node per layer of each GRU, named node0, node1, .."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    nodes, stored, count = [], [], 0
    for gru in grus:
        for layer in range(gru.num_layers):
            D = 2 if gru.bidirectional else 1
            parts = {"W": [], "R": [], "B": []}
            for d in range(D):
                haste = gru.to_haste(layer, d == 1)
                parts["W"].append(haste["kernel"].T)
                parts["R"].append(haste["recurrent_kernel"].T)
                parts["B"].append(torch.cat((haste["bias"], haste["recurrent_bias"])))
            for name, values in parts.items():
                value = torch.stack(values).numpy()
                stored.append(onnx.numpy_helper.from_array(value, f"{name}{count}"))
            nodes.append(
                helper.make_node(
                    "GRU",
                    [f"x{count}", *(f"{name}{count}" for name in "WRB")],
                    [f"y{count}", f"h{count}"],
                    name=f"node{count}",
                    hidden_size=H,
                    linear_before_reset=1,
                    direction="bidirectional" if D == 2 else "forward",
                )
            )
            count += 1
    FLOAT = onnx.TensorProto.FLOAT
    sizes = [gru.input_size if k == 0 else H for gru in grus for k in range(gru.num_layers)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(f"x{i}", FLOAT, ["T", "N", s]) for i, s in enumerate(sizes)],
        [helper.make_tensor_value_info(f"{k}{i}", FLOAT, None) for i in range(count) for k in "yh"],
        stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def random_config(seed):
    rng = random.Random(seed)
    config = QuantConfig(scale_kind=rng.choice(["pot", "free"]))
    for name in ("input.x", "output.h"):
        fields = {
            "bitwidth": rng.choice([4, 8, 12, 16, 24, 32]),
            "is_unsigned": rng.random() < 0.5,
            "is_symmetric": rng.random() < 0.5,
        }
        config = config.replace(name, **fields)
    for name in ("weight.W", "weight.R", "weight.bw", "weight.br"):
        granularity = rng.choice(["tensor", "gate", "channel"])
        config = config.replace(name, bitwidth=rng.randint(2, 16), granularity=granularity)
    return config


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_is_read_back(seed, version, tmp_path):
    """Another calibration, then the encodings and nothing else: equal boundary quantizers."""
    rng = random.Random(seed)
    options = {"num_layers": rng.randint(1, 2), "bidirectional": rng.random() < 0.5}
    options["bias"] = rng.random() < 0.8
    gru = calibrated(random_config(seed), **options)
    gru.export_encodings(tmp_path / "g.encodings", version)
    other = copy.deepcopy(gru)
    other.reset_calibration()
    other.calibrate(torch.randn(10, 3, C) * 3)
    other.finalize_calibration()
    assert scales_of(other) != scales_of(gru)
    other.load_encodings(tmp_path / "g.encodings")
    for mine, theirs in zip(scales_of(gru), scales_of(other), strict=True):
        for name in ("input.x", "output.h"):
            assert mine[0][name] == theirs[0][name]
        assert mine[1] == theirs[1] == {}  # the scales follow the weights, as before
    assert other.config == gru.config


@pytest.mark.parametrize("version", VERSIONS)
def test_the_parameter_file_beside_it_has_the_rest(version, tmp_path):
    gru = calibrated()
    gru.export_encodings(tmp_path / "g.encodings", version)
    other = copy.deepcopy(gru)
    other.reset_calibration()
    with pytest.raises(CalibrationError, match=r"parameter file beside them, or calibrate"):
        other.load_encodings(tmp_path / "g.encodings")
    other.load_quant_params(tmp_path / "g.quant_params.json")
    x = torch.randn(10, 3, C)
    assert torch.equal(other(x)[0], gru(x)[0])
    before = scales_of(other)
    other.load_encodings(tmp_path / "g.encodings")
    assert scales_of(other) == before


def test_numbers_of_each_version(tmp_path):
    gru = calibrated(QuantConfig.int8().replace("weight.R", granularity="gate"))
    gru.adjust_quant_config("x", scale=0.25, zero_point=-28)
    gru.adjust_quant_config("h", is_unsigned=True)
    gru.adjust_quant_config("h", scale=0.5, zero_point=7)
    path = tmp_path / "g.encodings"
    gru.export_encodings(path, "0.6.1")
    old = json.loads(path.read_text())
    x = {"bitwidth": 8, "dtype": "int", "is_symmetric": "False", "scale": 0.25, "offset": -100}
    assert old["activation_encodings"]["input_l0"] == [{**x, "min": -25.0, "max": 38.75}]
    assert old["activation_encodings"]["output_l0"][0]["offset"] == -7
    assert len(old["param_encodings"]["weight_hh_l0"]) == 3 * H  # a gate is H channels
    assert {e["offset"] for e in old["param_encodings"]["weight_hh_l0"]} == {-128}
    assert {e["is_symmetric"] for e in old["param_encodings"]["weight_hh_l0"]} == {"True"}
    gru.export_encodings(path, "1.0.0")
    found = {e["name"]: e for e in json.loads(path.read_text())["activation_encodings"]}
    assert found["input_l0"] == {
        "name": "input_l0",
        "dtype": "INT",
        "bw": 8,
        "is_sym": False,
        "scale": [0.25],
        "offset": [-100],
        "enc_type": "PER_TENSOR",
    }
    gru.export_encodings(path, "2.0.0")
    found = {e["name"]: e for e in json.loads(path.read_text())["encodings"]}
    names = {"name": "input_l0", "output_dtype": "int8"}
    assert found["input_l0"] == {**names, "y_scale": 0.25, "y_zero_point": -28}
    assert found["output_l0"]["output_dtype"] == "uint8"
    assert found["weight_ih_l0"]["axis"] == 0
    assert "y_zero_point" not in found["weight_ih_l0"]
    expected = gru.get_quant_config("R")["scale"]
    assert found["weight_hh_l0"]["y_scale"] == np.repeat(expected, H).tolist()


@pytest.mark.parametrize("version", VERSIONS)
def test_names_and_rows_of_an_onnx_model(version, tmp_path):
    gru = calibrated(num_layers=2)
    path, model = tmp_path / "g.encodings", onnx_model(gru)
    gru.export_encodings(path, version, onnx=model)
    other = copy.deepcopy(gru)
    other.adjust_quant_config("W", bitwidth=5)
    other.adjust_quant_config("h", bitwidth=4)
    other.load_encodings(path, onnx=model, nodes=["node0", "node1"])
    assert scales_of(other) == scales_of(gru)
    if version == "1.0.0":
        found = {e["name"]: e["scale"] for e in json.loads(path.read_text())["param_encodings"]}
        r, z, n = np.split(np.array(gru.get_quant_config("W", 1)["scale"]), 3)
        assert found["W1"] == np.concatenate((z, r, n)).tolist()
        assert sorted(found) == ["B0", "B1", "R0", "R1", "W0", "W1"]
        assert len(found["B0"]) == 6 * H


def test_nodes_are_found_by_their_weights(tmp_path):
    first, second = calibrated(seed=1), calibrated(seed=2)
    model = torch.nn.ModuleDict({"a": first, "b": second})
    swapped = onnx_model(second, first)
    path = tmp_path / "m.encodings"
    quant_gru.export_encodings(model, path, onnx=swapped)
    found = {e["name"]: e["scale"] for e in json.loads(path.read_text())["activation_encodings"]}
    assert found["x0"] == [second.get_quant_config("x")["scale"]]
    with pytest.raises(QuantGRUError, match=r"weights of layer 0 of the GRU'?, got none|'the GRU'"):
        calibrated(seed=3).export_encodings(path, onnx=swapped)
    with pytest.raises(QuantGRUError, match=r"nodes only beside an ONNX model"):
        first.export_encodings(path, nodes="node0")
    with pytest.raises(QuantGRUError, match=r"1 GRU node\(s\), one per layer, got 2"):
        first.export_encodings(path, onnx=swapped, nodes=["node0", "node1"])


@pytest.mark.parametrize("version", VERSIONS)
def test_whole_models(version, tmp_path):
    model = torch.nn.ModuleDict({"a": calibrated(seed=1), "b": calibrated(seed=2, num_layers=2)})
    path = tmp_path / "m.encodings"
    quant_gru.export_encodings(model, path, version)
    assert (tmp_path / "m.a.quant_params.json").exists()
    other = copy.deepcopy(model)
    for gru in other.values():
        gru.adjust_quant_config("x", bitwidth=6)
    quant_gru.load_encodings(other, path)
    assert all(scales_of(other[name]) == scales_of(model[name]) for name in "ab")
    assert '"b.weight_ih_l1"' in path.read_text()
    with pytest.raises(QuantGRUError, match="at least one QuantGRU, got none in Linear"):
        quant_gru.export_encodings(torch.nn.Linear(1, 1), path)


def test_what_has_no_place_is_named(tmp_path):
    gru = calibrated(bidirectional=True)
    path = tmp_path / "g.encodings"
    with pytest.warns(QuantGRUWarning, match=r"no place for .*R0: its directions have different"):
        gru.export_encodings(path, "2.0.0", onnx=onnx_model(gru))
    assert "R0" not in {e["name"] for e in json.loads(path.read_text())["encodings"]}
    gru = calibrated(QuantConfig.int8().replace("weight.bw", bitwidth=16))
    with pytest.warns(QuantGRUWarning, match=r"B0: its parts have widths 16, 8"):
        gru.export_encodings(path, onnx=onnx_model(gru))


def read_back(tmp_path, change, version="1.0.0", config=None):
    """Load encodings after `change(name -> entry)`."""
    gru = calibrated(config)
    path = tmp_path / "g.encodings"
    gru.export_encodings(path, version)
    data = json.loads(path.read_text())
    sections = [data.get(k, []) for k in ("encodings", "activation_encodings", "param_encodings")]
    change({e["name"]: e for section in sections for e in section}, data)
    path.write_text(json.dumps(data))
    before = scales_of(gru)
    try:
        gru.load_encodings(path)
    except ParameterError:
        assert scales_of(gru) == before
        raise
    return gru


def updates(tensor, **fields):
    return lambda entries, data: entries[tensor].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (updates("input_l0", scale=[0.3]), r"scale to be a power of two .*'input_l0'"),
        (updates("weight_ih_l0", offset=[-127] * 12), r"weights and biases are symmetric"),
        (updates("weight_ih_l0", scale=[0.5], offset=[-128] * 2), r"one offset per scale"),
        (updates("weight_ih_l0", scale=[0.5] * 2, offset=[-128] * 2), r"1 or 12 scales, got 2"),
        (updates("input_l0", scale=[0.5] * 2, offset=[-128] * 2), r"one scale .*TENSOR'\), got 2"),
        (updates("input_l0", enc_type="PER_CHANNEL"), r"got enc_type 'PER_CHANNEL' of an activ"),
        (updates("input_l0", is_sym=True, offset=[-108]), r"offset -128, or -127 or 0, got -108"),
        (updates("input_l0", dtype="FLOAT"), r"integer encoding of .*, got dtype 'FLOAT'"),
        (updates("input_l0", enc_type="LPBQ"), r"got enc_type 'LPBQ'"),
        (updates("input_l0", bw=33), r"a width from 1 to 32, got 33"),
        (updates("input_l0", bw=True), r"a width from 1 to 32, got True"),
        (updates("input_l0", scale=[0.0]), r"scales to be positive numbers, got 0.0"),
        (updates("input_l0", scale=["1"]), r"scales to be positive numbers, got '1'"),
        (updates("input_l0", scale=[]), r"at least one scale"),
        (updates("input_l0", scale=[1e-45]), r"normal positive float32"),
        (updates("input_l0", offset=[0.5]), r"to be integers, got 0.5"),
        (updates("input_l0", offset=[1]), r"zero point inside the codes, got 1"),
        (updates("input_l0", is_sym="x"), r"is_sym to be true or false"),
        (updates("input_l0", name=3), r"a 'name' in every entry"),
        (updates("input_l0", name="output_l0"), r"one encoding of 'output_l0', got two"),
        (lambda entries, data: data.update(version="3"), r"got '3'"),
        (lambda entries, data: data.update(param_encodings={}), r"to be a list, got dict"),
        (
            lambda entries, data: data.update(param_encodings=[], activation_encodings=[]),
            r"such as 'input_l0', got none",
        ),
    ],
)
def test_encodings_that_do_not_fit(change, message, tmp_path):
    with pytest.raises(ParameterError, match=message):
        read_back(tmp_path, change)


@pytest.mark.parametrize("offset", [-128, -127, 0])
def test_symmetric_encodings(offset, tmp_path):
    """Signed codes, signed codes without the lowest one, and unsigned codes."""
    gru = read_back(tmp_path, updates("input_l0", is_sym=True, offset=[offset]))
    q = gru._state.scales[0][0].quantizers["input.x"]
    assert q.lo - q.zero_point == offset


def test_an_activation_among_parameters(tmp_path):
    def move(entries, data):
        data["activation_encodings"].remove(entries["input_l0"])
        data["param_encodings"].append(entries["input_l0"])

    with pytest.raises(ParameterError, match=r"encoding of an activation, got .*'input_l0'"):
        read_back(tmp_path, move)


def test_ends_that_contradict_scale_and_offset(tmp_path):
    gru = calibrated()
    path = tmp_path / "g.encodings"
    gru.export_encodings(path, "0.6.1")
    data = json.loads(path.read_text())
    [entry] = data["activation_encodings"]["input_l0"]
    entry["max"] += entry["scale"]  # strict symmetry leaves out one code
    path.write_text(json.dumps(data))
    gru.load_encodings(path)
    entry["max"] *= 2
    path.write_text(json.dumps(data))
    with pytest.raises(ParameterError, match=r"max to be .* scale and offset\), got .*'input_l0'"):
        gru.load_encodings(path)


def test_names_with_a_mistake(tmp_path):
    def misspell(entries, data):
        entries["input_l0"]["name"] = "inputt_l0"

    with pytest.warns(QuantGRUWarning, match=r"of 'input_l0' \(it has 'inputt_l0'\), got none"):
        read_back(tmp_path, misspell)
    # an encoding of another tensor of the model is no mistake
    gru, model = wrapped_model()
    path = tmp_path / "m.encodings"
    gru.export_encodings(path, "2.0.0", onnx=model)
    data = json.loads(path.read_text())
    entries = {each["name"]: each for each in data["encodings"]}
    for name in ("start", "x0", "x_moved", "y_raw", "y_flat", "y0", "h0"):
        data["encodings"].remove(entries[name])
    data["encodings"].append({**entries["x0"], "name": "rest"})
    path.write_text(json.dumps(data))
    gru.load_encodings(path, onnx=model, nodes="node0")


def test_encodings_that_break_a_tie(tmp_path):
    def change(entries, data):
        entries["input_l0"]["scale"] = [1.0]

    config = QuantConfig.int8().replace_globals(tie_x_and_h=True)
    with pytest.warns(QuantGRUWarning, match=r"one scale and zero point \(tie_x_and_h true\)"):
        read_back(tmp_path, change, config=config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (updates("input_l0", bw=8), r"output_dtype and no bw"),
        (updates("input_l0", output_dtype="float8"), r"got output_dtype 'float8'"),
        (updates("weight_ih_l0", block_size=4), r"got blocks"),
        (updates("weight_ih_l0", axis=1), r"axis to be 0, got 1"),
        (updates("weight_ih_l0", axis="x"), r"axis to be an integer"),
        (updates("input_l0", y_zero_point=128), r"zero point inside the codes, got 128"),
    ],
)
def test_encodings_of_version_2_that_do_not_fit(change, message, tmp_path):
    with pytest.raises(ParameterError, match=message):
        read_back(tmp_path, change, "2.0.0")


def test_encodings_of_other_tensors_are_ignored(tmp_path):
    def add(entries, data):
        data["activation_encodings"].append({"name": "conv", "dtype": "FLOAT", "bw": 16})

    read_back(tmp_path, add)


def test_unsigned_codes_fit_a_signed_operator(tmp_path):
    """The same real values in codes of the other sign: the operator keeps its own."""

    def unsigned(entries, data):
        entries["input_l0"].update(output_dtype="uint8", y_zero_point=100, y_scale=0.25)

    gru = read_back(tmp_path, unsigned, "2.0.0")
    found = gru.get_quant_config("x")
    assert (found["is_unsigned"], found["zero_point"], found["scale"]) == (False, -28, 0.25)
    # a symmetric operator becomes unsigned where only unsigned codes have the zero point 0
    symmetric = QuantConfig()
    with_zero = updates("input_l0", output_dtype="uint8", y_scale=0.25)
    found = read_back(tmp_path, with_zero, "2.0.0", symmetric).get_quant_config("x")
    assert (found["is_unsigned"], found["is_symmetric"], found["zero_point"]) == (True, True, 0)
    found = read_back(tmp_path, unsigned, "2.0.0", symmetric).get_quant_config("x")
    assert (found["is_unsigned"], found["is_symmetric"], found["zero_point"]) == (False, False, -28)


def test_weights_keep_the_scales_of_a_file(tmp_path):
    change = updates("weight_ih_l0", scale=[0.5], offset=[-8], bw=4, enc_type="PER_TENSOR")
    gru = read_back(tmp_path, change)
    found = gru.get_quant_config("W")
    assert (found["scale"], found["bitwidth"]) == ([0.5], 4)
    assert gru.config["W"].granularity == "tensor"
    gru(torch.randn(10, 3, C))


def test_scales_are_rounded_to_float32(tmp_path):
    free = QuantConfig.int8().replace_globals(scale_kind="free")
    gru = read_back(tmp_path, updates("input_l0", scale=[0.1]), config=free)
    assert gru.get_quant_config("x")["scale"] == float(np.float32(0.1))


def test_arguments(tmp_path):
    gru = calibrated()
    with pytest.raises(QuantGRUError, match=r"one of 0\.6\.1, 1\.0\.0, 2\.0\.0, got '2'"):
        gru.export_encodings(tmp_path / "g.encodings", "2")
    assert not list(tmp_path.iterdir())
    with pytest.raises(CalibrationError):
        QuantGRU(C, H).export_encodings(tmp_path / "g.encodings")
    with pytest.raises(ParameterError, match="a file to exist"):
        gru.load_encodings(tmp_path / "absent")


def test_existing_files_remain_where_one_cannot_be_written(tmp_path, monkeypatch):
    calibrated().export_encodings(tmp_path / "g.encodings")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2
    calls, sync = iter(range(100)), os.fsync

    def fail(file):
        if next(calls) == 1:
            raise OSError(28, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(QuantGRUError, match=r"Expected a writable file, got No space left"):
        calibrated().export_encodings(tmp_path / "g.encodings", "2.0.0")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.filterwarnings("error:AIMET quantizes the input")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_separate_scales_warn(options, tmp_path):
    """AIMET would replace the scale of the input by that of the state, and say nothing."""
    expected = "input.x and output.h have different ones.*calibrate with tie_x_and_h=True"
    config = QuantConfig.int8().replace_globals(tie_x_and_h=True)
    gru = calibrated(config, bias=False, **options)
    path = tmp_path / "g.encodings"
    gru.export_encodings(path)
    gru.freeze().export_encodings(path)
    quant_gru.export_encodings(torch.nn.ModuleDict({"encoder": gru}), path)
    gru.adjust_quant_config("x", scale=2.0**-3, layer=0)
    with pytest.warns(QuantGRUWarning, match=expected):
        gru.export_encodings(path)
    with pytest.warns(QuantGRUWarning, match=expected):
        gru.freeze().export_encodings(path)
    with pytest.warns(QuantGRUWarning, match=r"\(modules 'encoder'\)"):
        quant_gru.export_encodings(torch.nn.ModuleDict({"encoder": gru}), path)


def wrapped_model():
    """A GRU behind a Transpose, before a Squeeze, with an initial state made of two halves."""
    onnx = pytest.importorskip("onnx")
    gru = calibrated(QuantConfig.int8().replace_globals(tie_x_and_h=True), bias=False)
    model = onnx_model(gru)
    graph, node = model.graph, model.graph.node[0]
    node.input[0], node.output[0] = "x_moved", "y_raw"
    node.input.extend(["", "start"])
    node.input[3] = ""
    before = [
        onnx.helper.make_node("Transpose", ["x0"], ["x_moved"], perm=[1, 0, 2]),
        onnx.helper.make_node("Concat", ["left", "right"], ["start"], axis=2),
    ]
    after = [
        onnx.helper.make_node("Squeeze", ["y_raw", "axis"], ["y_flat"]),
        onnx.helper.make_node("Concat", ["y_flat", "y_flat"], ["y0"], axis=0),
        onnx.helper.make_node("Relu", ["y_flat"], ["rest"]),
    ]
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    nodes = [*before, node, *after]
    copies = [onnx.NodeProto.FromString(each.SerializeToString()) for each in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return gru, model


@pytest.mark.filterwarnings("error:AIMET quantizes the input")
def test_moved_values_have_the_encoding_of_their_source(tmp_path):
    """AIMET puts quantizers at some of these tensors, and switches off those without encoding."""
    gru, model = wrapped_model()
    gru.export_encodings(tmp_path / "g.encodings", "2.0.0", onnx=model)
    found = {e["name"]: e for e in json.loads((tmp_path / "g.encodings").read_text())["encodings"]}
    weights = {"W0", "R0"}
    # both halves of the initial state may have scales of their own; "rest" is computed
    assert set(found) == weights | {"x0", "x_moved", "start", "y_raw", "y_flat", "y0", "h0"}
    assert len({json.dumps({**found[n], "name": ""}) for n in set(found) - weights}) == 1


@pytest.mark.parametrize("left", ["x0", "x_moved"])
def test_an_encoding_of_moved_values_is_that_of_the_input(left, tmp_path):
    """AIMET writes one of the tensors before and after a Transpose, and all scales are read."""
    gru, model = wrapped_model()
    path = tmp_path / "g.encodings"
    gru.export_encodings(path, "2.0.0", onnx=model)
    document = json.loads(path.read_text())
    kept = {"W0", "R0", left, "y_flat"}
    document["encodings"] = [each for each in document["encodings"] if each["name"] in kept]
    path.write_text(json.dumps(document))
    other = calibrated(gru.config, bias=False)
    other.adjust_quant_config("x", scale=2.0**-1)
    other.adjust_quant_config("h", scale=2.0**-1)
    other.load_encodings(path, onnx=model, nodes="node0")
    for name in ("x", "h"):
        assert other.get_quant_config(name) == gru.get_quant_config(name)


def test_unread_outputs_have_no_encoding(tmp_path):
    gru = calibrated()
    model = onnx_model(gru)
    del model.graph.output[1]
    with pytest.warns(QuantGRUWarning, match=r"nothing reads h0, .*disable_missing_quantizers=F"):
        gru.export_encodings(tmp_path / "g.encodings", onnx=model)
    assert "h0" not in (tmp_path / "g.encodings").read_text()
