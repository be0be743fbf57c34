"""The C++ library reads files of quant-gru-pytorch as Python does."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from c_access import Access
from cpp_build import NEEDS_TOOLS
from quant_gru_pytorch_files import GENERATIONS, SHORT, file_of, their_file

from quant_gru import ConfigError, ParameterError, QuantConfig, QuantGRU
from quant_gru.config.quant_gru_pytorch import NEWER_NAMES
from quant_gru.parameters.document import from_document, to_document

pytestmark = NEEDS_TOOLS


def configuration(read: Callable[[], QuantConfig], path: Path) -> bytes | None:
    """The file that is written after reading; None for an error."""
    try:
        read().to_json(path)
    except ConfigError:
        return None
    return path.read_bytes()


GRANULARITY = {"quantization_granularity": "PER_GATE"}
CONFIGURATIONS: list[Any] = [
    *(file_of({name: {"bitwidth": 11}}) for name in NEWER_NAMES),
    file_of({name: {"bitwidth": 5 + i} for i, name in enumerate(SHORT)}, use_pot2_scale=False),
    file_of({"weight_ih": GRANULARITY, "bias_hh": {"quantization_granularity": "PER_TENSOR"}}),
    file_of({"update_gate_output": {"is_unsigned": True, "comment": "u"}}, use_pot2_scale=True),
    file_of({"input": {}, "input.x": {}}),
    file_of({"weight_ih": {"quantization_granularity": "x"}}),
    file_of({"weight_ih": {"quantization_granularity": []}}),
    file_of({"weight_ih": {**GRANULARITY, "granularity": "gate"}}),
    file_of({"input": GRANULARITY}),
    file_of({}, use_pot2_scale=1),
    file_of({}, use_pot2_scale=True, scale_kind="pot"),
    file_of({"update_gate": {}}),
    file_of({"input": 3}),
    {"GRU_config": {"operator_config": [], "default_config": 1}},
]


@pytest.mark.parametrize("data", CONFIGURATIONS, ids=lambda data: json.dumps(data)[35:90])
def test_configurations(access: Access, data: Any, tmp_path: Path) -> None:
    expected = configuration(lambda: QuantConfig.from_dict(data), tmp_path / "config.json")
    text = json.dumps(data).encode()
    if expected is None:
        with pytest.raises(ValueError, match="Expected"):
            access.config_text(text)
    else:
        assert access.config_text(text) == expected


@functools.cache
def calibrated(seed: int) -> QuantGRU:
    """A GRU of one layer with random kinds and granularities."""
    rng = random.Random(seed)
    config = QuantConfig.uniform(rng.choice((8, 12)), is_symmetric=rng.random() < 0.5)
    config = config.replace_globals(scale_kind=rng.choice(("pot", "free")))
    for name in ("weight.W", "weight.R", "weight.bw", "weight.br"):
        config = config.replace(name, granularity=rng.choice(("tensor", "gate", "channel")))
    bias, both = rng.random() < 0.7, rng.random() < 0.5
    torch.manual_seed(seed)
    gru = QuantGRU(3, 4, bias=bias, bidirectional=both, config=config)
    gru.calibrate(torch.randn(10, 3, 3))
    gru.finalize_calibration()
    return gru


def python_text(gru: QuantGRU, text: bytes, folder: Path) -> bytes | None:
    """Python's parameter file after it has read a file; None if that is an error."""
    path = folder / "params.json"
    path.write_bytes(text)
    other = QuantGRU(3, 4, bias=gru.bias, bidirectional=gru.bidirectional)
    try:
        other.load_quant_params(path)
    except ParameterError:
        return None
    other.export_quant_params(path)
    return path.read_bytes()


@pytest.mark.filterwarnings("ignore::quant_gru.QuantGRUWarning")
@pytest.mark.parametrize("seed", range(8))
def test_parameter_files(access: Access, seed: int, tmp_path: Path) -> None:
    gru = calibrated(seed)
    text = json.dumps(their_file(gru, list(GENERATIONS.values())[seed % 2])).encode()
    expected = python_text(gru, text, tmp_path)
    assert expected is not None
    assert access.parameters_text(text) == expected
    assert access.parameters_text(expected) == expected


def test_exponents_in_place_of_scales(access: Access, tmp_path: Path) -> None:
    gru = calibrated(1)
    data = their_file(gru, GENERATIONS["newer"])
    data["operators"]["input"] |= {"scale": None, "n": -3}
    data["operators"]["sub_one_minus_update"] = {}
    text = json.dumps(data).encode()
    expected = python_text(gru, text, tmp_path)
    assert expected is not None
    assert access.parameters_text(text) == expected


WRONG: list[tuple[list[str], Any]] = [
    (["model_info", "hidden_size"], "4"),
    (["model_info", "hidden_size"], 9),
    (["model_info", "input_size"], ...),
    (["model_info", "bias"], None),
    (["model_info"], 1),
    (["operators"], []),
    (["operators"], ...),
    (["operators", "output"], ...),
    (["operators", "output"], 1),
    (["operators", "outptu"], {}),
    (["operators", "h"], {"dtype": "INT8", "scale": 1}),
    *((["operators", "input", "dtype"], each) for each in ("FP8", "INT33", "INT0", "INT", "INT8 ")),
    (["operators", "input", "dtype"], None),
    *((["operators", "input", "scale"], each) for each in ([1, 2], None, -1, 0, "1", True, [])),
    *((["operators", "input", "scale"], each) for each in (1e-45, 1e39)),
    *((["operators", "input", "zero_point"], each) for each in (0.5, 1.0, 1 << 20, None, [], "0")),
    (["operators", "input", "symmetric"], "no"),
    (["operators", "weight_ih", "scale"], [1.0] * 5),
    (["operators", "weight_ih", "zero_point"], 3),
    (["operators", "weight_ih", "dtype"], "UINT8"),
    (["operators", "weight_ih", "symmetric"], False),
]


@pytest.mark.parametrize(("keys", "value"), WRONG)
def test_wrong_parameter_files(access: Access, keys: list[str], value: Any, tmp_path: Path) -> None:
    gru = calibrated(2)
    data = their_file(gru, GENERATIONS["newer"])
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    if value is ...:
        del place[keys[-1]]
    text = json.dumps(data).encode()
    assert python_text(gru, text, tmp_path) is None
    with pytest.raises(ValueError, match="Expected"):
        access.parameters_text(text)


VALUES: list[Any] = [
    None, True, 0, 1, -1, 8.0, 0.5, 1e39, 1e-40, 1 << 40, "INT8", "UINT16", "x", "", [], [1],
    [1, 2], [0.5] * 12, {}, {"dtype": "INT8", "scale": 1},
]  # fmt: skip
EXTRA = ("n", "extra", "scale", "use_pot2_scale", "bias", "input", "h", "Rh_add_br", "num_layers")


def random_change(rng: random.Random, data: dict[str, Any]) -> None:
    """Replace, remove or add a value at a random place of a file."""
    places: list[tuple[dict[str, Any], str]] = [(data, key) for key in data]
    for parent, key in places:  # grows while it is read
        if isinstance(parent[key], dict):
            places += [(parent[key], inner) for inner in parent[key]]
    parent, key = rng.choice(places)
    kind = rng.choice(("remove", "add", *["replace"] * 4))
    if kind == "remove":
        del parent[key]
    else:
        parent[key if kind == "replace" else rng.choice(EXTRA)] = rng.choice(VALUES)


@pytest.mark.filterwarnings("ignore::quant_gru.QuantGRUWarning")
def test_changed_parameter_files(access: Access) -> None:
    """Both read the same files, with the same results."""
    rng, gru, accepted = random.Random(0), calibrated(2), 0
    for i in range(120):
        data = their_file(gru, list(GENERATIONS.values())[i % 2])
        random_change(rng, data)
        try:
            found = from_document(data, "file")
        except ParameterError:
            with pytest.raises(ValueError, match="Expected"):
                access.parameters_text(json.dumps(data).encode())
        else:
            expected, accepted = to_document(found.shape, found.config, found.cells), accepted + 1
            assert json.loads(access.parameters_text(json.dumps(data).encode())) == expected
    assert 20 < accepted < 100
