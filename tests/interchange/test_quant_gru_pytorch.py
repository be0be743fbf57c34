"""Configuration and parameter files of quant-gru-pytorch."""

import copy
import json

import pytest
import torch
from quant_gru_pytorch_files import GENERATIONS, SHORT, file_of, their_file

from kept import kept
from quant_gru import ConfigError, ParameterError, QuantConfig, QuantGRU
from quant_gru.config import OPERATORS, WEIGHTS
from quant_gru.config.quant_gru_pytorch import NEWER_NAMES

C, H = 5, 4


def test_every_operator_has_a_newer_name():
    assert sorted(NEWER_NAMES[name] for name in SHORT) == sorted(OPERATORS)


@pytest.mark.parametrize("name", NEWER_NAMES)
def test_newer_names(name):
    config = QuantConfig.from_dict(file_of({name: {"bitwidth": 11}}))
    assert config == QuantConfig().replace(NEWER_NAMES[name], bitwidth=11)


def test_granularity_and_scales(tmp_path):
    operators = {
        "weight_ih": {"bitwidth": 8, "quantization_granularity": "PER_TENSOR"},
        "weight_hh": {"bitwidth": 8, "quantization_granularity": "PER_GATE"},
        "bias_ih": {"bitwidth": 16, "quantization_granularity": "PER_CHANNEL"},
        "update_gate_output": {"bitwidth": 8, "is_symmetric": False, "is_unsigned": True},
    }
    path = tmp_path / "c.json"
    path.write_text(json.dumps(file_of(operators, use_pot2_scale=False)))
    gru = QuantGRU(C, H)
    gru.load_bitwidth_config(path)
    kinds = [gru.config[name].granularity for name in WEIGHTS]
    assert kinds == ["tensor", "gate", "channel", "channel"]
    assert gru.config.scale_kind == "free"
    assert gru.config["weight.bw"].bitwidth == 16
    given = file_of({}, use_pot2_scale=True)
    assert QuantConfig.from_dict(given).scale_kind == "pot"
    assert given == file_of({}, use_pot2_scale=True)  # unchanged


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (file_of({"input": {}, "input.x": {}}), r"'input' and 'input.x', which name the same"),
        (file_of({"weight_ih": {"quantization_granularity": "x"}}), r"PER_CHANNEL, got 'x'"),
        (file_of({"weight_ih": {"quantization_granularity": []}}), r"PER_CHANNEL, got \[\]"),
        (
            file_of({"weight_ih": {"quantization_granularity": "PER_GATE", "granularity": "gate"}}),
            r"got both \(operator 'weight_ih'",
        ),
        (file_of({"input": {"quantization_granularity": "PER_GATE"}}), r"granularity to be absent"),
        (file_of({}, use_pot2_scale=1), r"use_pot2_scale to be true or false, got 1"),
        (file_of({}, use_pot2_scale=True, scale_kind="pot"), r"one of scale_kind and use_pot2"),
        (file_of({"update_gate": {}}), r"known operator, got 'update_gate'"),
        (file_of({"input": 3}), r"'input.x'|its settings"),
    ],
)
def test_errors_of_configurations(data, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        QuantConfig.from_dict(data)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"c\.json"):
        QuantConfig.from_json(path)


@kept
def calibrated(config=None, **options):
    torch.manual_seed(0)
    # their files have no mean of the input
    config = (config or QuantConfig.int8()).replace_globals(correct_bias=False)
    gru = QuantGRU(C, H, config=config, **options).eval()
    gru.calibrate(torch.randn(10, 3, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("kind", ["pot", "free"])
@pytest.mark.parametrize("granularity", ["tensor", "gate", "channel"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_parameter_files(generation, kind, granularity, bidirectional, tmp_path):
    """The file of a GRU's scales gives a GRU of the same weights the same codes."""
    rounding = {"older": "half_away", "newer": "half_even"}[generation]
    config = QuantConfig.int8().replace_globals(scale_kind=kind, rounding=rounding)
    for name in WEIGHTS:
        config = config.replace(name, granularity=granularity)
    gru = calibrated(config, bidirectional=bidirectional)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(their_file(gru, GENERATIONS[generation])))
    other = copy.deepcopy(gru)
    other.reset_calibration()
    other.load_quant_params(path)
    x = torch.randn(10, 3, C)
    assert torch.equal(other(x)[0], gru(x)[0])
    assert other.config.scale_kind == kind
    assert other.config.rounding == rounding
    assert other.config["W"].granularity == granularity
    path = tmp_path / "again.json"
    other.export_quant_params(path)
    other.load_quant_params(path)
    assert torch.equal(other(x)[0], gru(x)[0])


def test_a_gru_without_biases_and_exponents(tmp_path):
    gru = calibrated(bias=False)
    data = their_file(gru, GENERATIONS["newer"])
    for entry in data["operators"].values():
        scale = entry.pop("scale")
        n = [-torch.tensor(s).log2().int().item() for s in torch.tensor(scale).flatten().tolist()]
        entry["n"] = n if isinstance(scale, list) else n[0]
    for name in ("bias_ih", "bias_hh"):
        data["operators"][name]["n"] = []
    data["operators"]["sub_one_minus_update"] = {}
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    other = copy.deepcopy(gru)
    other.reset_calibration()
    other.load_quant_params(path)
    x = torch.randn(10, 3, C)
    assert torch.equal(other(x)[0], gru(x)[0])


def changed(path, value):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(["model_info", "hidden_size"], 9), r"hidden_size=4.* got .*hidden_size=9|scales"),
        (changed(["model_info", "hidden_size"], "4"), r"the sizes of a GRU"),
        (lambda data: data["model_info"].pop("input_size"), r"got 'input_size'"),
        (changed(["model_info", "use_pot2_scale"], True), r"^$"),
        (changed(["operators"], []), r"'operators' to be an object, got list"),
        (lambda data: data["operators"].pop("output"), r"operator 'output.h', got none"),
        (changed(["operators", "outptu"], {}), r"known operator, got 'outptu'"),
        (changed(["operators", "h"], {"dtype": "INT8", "scale": 1}), r"'output.h' once"),
        (changed(["operators", "input", "dtype"], "FP8"), r"INT or UINT with a width, got 'FP8'"),
        (changed(["operators", "input", "dtype"], "INT33"), r"bitwidth .*33|1 to 32"),
        (changed(["operators", "input", "scale"], [1, 2]), r"one scale"),
        (changed(["operators", "input", "n"], 77), r"scale to be 2\^-n, got .* and n 77"),
        (changed(["operators", "weight_ih", "enc_type"], "PER_TENSOR"), r"one scale .*, got 12"),
        (changed(["operators", "input", "scale"], None), r"positive numbers, got \[None\]"),
        (changed(["operators", "input", "scale"], -1), r"positive numbers, got \[-1\]"),
        (changed(["operators", "input", "zero_point"], 0.5), r"an integer, got \[0.5\]"),
        (changed(["operators", "input", "zero_point"], 200), r"in \[-128, 127\], got 200"),
        (changed(["operators", "input", "symmetric"], "no"), r"symmetric to be true or false"),
        (changed(["operators", "weight_ih", "scale"], [1.0] * 5), r"12 scales"),
        (changed(["operators", "weight_ih", "zero_point"], 3), r"signed and symmetric"),
        (changed(["operators", "weight_ih", "dtype"], "UINT8"), r"signed and symmetric"),
    ],
)
def test_errors_of_parameter_files(change, message, tmp_path):
    gru = calibrated()
    data = their_file(gru, GENERATIONS["newer"])
    change(data)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    if message == "^$":
        gru.load_quant_params(path)
        return
    with pytest.raises(ParameterError, match=message):
        gru.load_quant_params(path)


def test_a_missing_direction(tmp_path):
    gru = calibrated(bidirectional=True)
    data = their_file(gru, GENERATIONS["newer"])
    del data["operators_reverse"]
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ParameterError, match=r"'operators_reverse' to be an object, got NoneType"):
        gru.load_quant_params(tmp_path / "p.json")
