"""JSON files of every kind: hostile text, and documents that declare more than they have."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import MIB, memory, refused

from kept import calibrated_gru
from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.cli import files

C, H = 3, 2


def calibrated() -> QuantGRU:
    return calibrated_gru(C, H, data=(9, 2), seed=None)


GRU = calibrated()


def public_document(gru: QuantGRU) -> dict[str, Any]:
    """A parameter file of quant-gru-pytorch, whose operators have our older names."""
    operators = {}
    for name, entry in gru.get_quant_config().items():
        scale = entry["scale"]
        operators[name.partition(".")[2]] = {
            "dtype": f"{'UINT' if entry['is_unsigned'] else 'INT'}{entry['bitwidth']}",
            "symmetric": entry["is_symmetric"],
            "scale": scale,
            "zero_point": entry["zero_point"],
            "enc_type": "PER_CHANNEL" if isinstance(scale, list) else "PER_TENSOR",
        }
    sizes = {"input_size": C, "hidden_size": H, "bias": True, "bidirectional": False}
    return {"model_info": sizes, "operators": operators}


def write_configuration(path: Path) -> None:
    GRU.config.to_json(path)


def write_parameters(path: Path) -> None:
    GRU.export_quant_params(path)


def write_public_parameters(path: Path) -> None:
    path.write_text(json.dumps(public_document(GRU)))


def write_encodings(path: Path) -> None:
    GRU.export_encodings(path)


def read_configuration(path: Path) -> None:
    QuantGRU(C, H).load_bitwidth_config(path)


def read_parameters(path: Path) -> None:
    QuantGRU(C, H).load_quant_params(path)


def read_encodings(path: Path) -> None:
    copy.deepcopy(GRU).load_encodings(path)


def read_checkpoint(path: Path) -> None:
    """The document in a state_dict."""
    text = bytearray(path.read_bytes() or b" ")
    state = {**GRU.state_dict(), "quantization": torch.frombuffer(text, dtype=torch.uint8)}
    try:
        QuantGRU(C, H).load_state_dict(state)
    except RuntimeError as error:  # torch collects the messages of modules
        raise QuantGRUError(str(error)) from None


def check(path: Path) -> None:
    """The command `quant-gru check`."""
    files.read(str(path))


Reader = Callable[[Path], None]
READERS: dict[Reader, Reader] = {
    read_configuration: write_configuration,
    read_parameters: write_parameters,
    read_encodings: write_encodings,
    read_checkpoint: write_parameters,
    check: write_parameters,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "Expected"),
        (b"\xff\xfe{\x00}\x00", "Expected UTF-8|Expected"),
        (b"[" * 200_000, "Expected JSON of moderate size"),
        (b'{"a":' * 100_000, "Expected JSON of moderate size"),
        (b"[1" + b"0" * 100_000 + b"]", "Expected JSON of moderate size"),
        (b"[1e999]", "to be finite, got 1e999"),
        (b"[-1e999]", "to be finite, got -1e999"),
        (b"[NaN]", "to be finite, got NaN"),
        (b"[-Infinity]", "to be finite, got -Infinity"),
        (b'{"a": 1, "a": 2}', "named once, got 'a' twice"),
        (b'"\\ud800"', "Expected"),
        (b"null", "Expected"),
        (b"[]", "Expected"),
    ],
    ids=str,
)
def test_hostile_text(reader: Reader, text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with refused(message):
        reader(path)


@pytest.mark.parametrize("reader", READERS)
def test_long_text(reader: Reader, tmp_path: Path) -> None:
    """Memory is a small multiple of the bytes, whatever they say."""
    path = tmp_path / "x.json"
    for part in (b"[],", b"{},", b'"",', b"0,", b"1.5,"):
        path.write_bytes(b"[" + part * (MIB // 4 // len(part)) + b"0]")
        with refused("Expected", most=32 * MIB):
            reader(path)


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path such as 'gru.hidden_size' or 'cells.0.layer'."""
    found = copy.deepcopy(document)
    *parents, last = path.split("/")
    at: Any = found
    for each in parents:
        at = at[int(each)] if isinstance(at, list) else at[each]
    at[int(last) if isinstance(at, list) else last] = value
    return found


HUGE = 2**31 - 1
TABLE = "cells/0/tables/gate.z_out"
OPERATOR = "cells/0/operators"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("gru/hidden_size", HUGE),
        ("gru/input_size", HUGE),
        ("gru/num_layers", HUGE),
        ("gru/num_layers", 10**30),
        ("gru/hidden_size", -1),
        ("gru/hidden_size", 1e300),
        ("cells", []),
        (f"{TABLE}/last", 2**62),
        (f"{TABLE}/bounds", [0, 2**62]),
        (f"{TABLE}/shift", 62),
        (f"{TABLE}/zero_point", 10**30),
        (f"{TABLE}/hi", 10**30),
        (f"{OPERATOR}/input.x/bitwidth", 33),
        (f"{OPERATOR}/input.x/scale", 1e300),
        (f"{OPERATOR}/input.x/scale", 1e-300),
        (f"{OPERATOR}/input.x/scale", 0.0),
        (f"{OPERATOR}/input.x/zero_point", 10**30),
        (f"{OPERATOR}/input.x/exp2_inv", 10**30),
        (f"{OPERATOR}/weight.W/scale", [1.0] * 100_000),
        ("config/GRU_config/default_config/segments", HUGE),
    ],
)
def test_parameters_that_declare_too_much(place: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_parameters(path)
    path.write_text(json.dumps(changed(json.loads(path.read_text()), place, value)))
    for reader in (read_parameters, read_checkpoint):
        with refused("Expected"):
            reader(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("model_info/hidden_size", HUGE),
        ("model_info/input_size", 10**30),
        ("model_info/hidden_size", 1.5),
        ("operators/x/dtype", "INT1000000000"),
        ("operators/x/scale", 1e300),
        ("operators/x/scale", [1.0] * 100_000),
        ("operators/x/zero_point", 10**30),
        ("operators/W/scale", [1.0] * 100_000),
        ("operators/W/scale", 1e-300),
    ],
)
def test_public_parameters_that_declare_too_much(place: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    document = public_document(GRU)
    path.write_text(json.dumps(document))
    QuantGRU(C, H).load_quant_params(path)
    path.write_text(json.dumps(changed(document, place, value)))
    with refused("Expected"):
        read_parameters(path)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("gate.z_pre", {"bitwidth": 10**30}),
        ("gate.z_pre", {"bitwidth": 8.0}),
        ("gate.z_pre", {"bitwidth": True}),
        ("__class__", {"bitwidth": 8}),
        ("x" * 100_000, {"bitwidth": 8}),
    ],
)
def test_configurations_that_declare_too_much(name: str, setting: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    document = QuantConfig().to_dict()
    document["GRU_config"]["operator_config"][name] = setting
    path.write_text(json.dumps(document))
    with refused("Expected"):
        read_configuration(path)


WRITERS = {
    "configuration": (write_configuration, read_configuration),
    "parameters": (write_parameters, read_parameters),
    "public parameters": (write_public_parameters, read_parameters),
    "encodings": (write_encodings, read_encodings),
    "checkpoint": (write_parameters, read_checkpoint),
}


@pytest.mark.filterwarnings("ignore:AIMET quantizes the input", "ignore:Expected an encoding of")
@pytest.mark.parametrize("kind", WRITERS)
def test_damaged_files(kind: str, tmp_path: Path) -> None:
    """Whatever a byte becomes: a GRU, or an error of ours that leaves it as it was."""
    write, read = WRITERS[kind]
    path, chance = tmp_path / "x.json", random.Random(0)
    write(path)
    good = path.read_bytes()
    for _ in range(100):
        data = bytearray(good[: chance.choice([len(good), len(good), chance.randrange(len(good))])])
        for _ in range(chance.randrange(1, 4) if data else 0):
            data[chance.randrange(len(data))] = chance.choice(b'0123456789.-e"[]{},: ax')
        path.write_bytes(bytes(data))
        with memory(64 * MIB), contextlib.suppress(QuantGRUError):
            read(path)
