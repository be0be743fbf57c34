"""Files of frozen GRUs and of torch.save: what they declare, and what they would run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import MIB, memory, refused

from kept import calibrated_gru
from quant_gru import FrozenQuantGRU, ParameterError, QuantGRU, QuantGRUError
from quant_gru.cli import files
from quant_gru.parameters import document


def calibrated() -> QuantGRU:
    return calibrated_gru(3, 4, None, data=(5, 2), seed=None, num_layers=2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "gru.safetensors"
    calibrated().freeze().save(path)
    return path


def parts(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensors."""
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def joined(header: dict[str, Any], tensors: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


# --- safetensors


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, 0.5, -1])
def test_cut_files(saved: Path, cut: float) -> None:
    raw = saved.read_bytes()
    saved.write_bytes(raw[: int(len(raw) * cut) if cut == 0.5 else int(cut)])
    with refused("Expected"):
        FrozenQuantGRU.load(saved)


def a_header_of_exabytes(raw: bytes) -> bytes:
    return struct.pack("<Q", 1 << 62) + raw[8:]


def more_than_the_tensors(raw: bytes) -> bytes:
    return raw + b"x"


def an_entry(**changes: Any) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        header, tensors = parts(raw)
        header["W_l0"] = {**header["W_l0"], **changes}
        return joined(header, tensors)

    return change


def sizes_of(**changes: Any) -> Callable[[bytes], bytes]:
    def change(raw: bytes) -> bytes:
        header, tensors = parts(raw)
        text = json.loads(header["__metadata__"]["document"])
        text["gru"].update(changes)
        header["__metadata__"]["document"] = json.dumps(text)
        return joined(header, tensors)

    return change


ATTACKS = {
    "a header of exabytes": a_header_of_exabytes,
    "bytes after the tensors": more_than_the_tensors,
    "a tensor of terabytes": an_entry(shape=[1 << 20, 1 << 20]),
    "a tensor of no bytes": an_entry(data_offsets=[0, 0]),
    "a tensor of negative size": an_entry(shape=[-12, -3]),
    "a tensor whose size overflows": an_entry(shape=[1 << 62, 1 << 62]),
    "the bytes of another tensor": an_entry(data_offsets=[8, 44]),
    "bytes after the end": an_entry(data_offsets=[1 << 40, (1 << 40) + 36]),
    "another dtype": an_entry(dtype="F64"),
    "units without weights": sizes_of(hidden_size=2**31 - 1),
    "inputs without weights": sizes_of(input_size=2**31 - 1),
    "layers without weights": sizes_of(num_layers=2**31 - 1),
    "a direction without weights": sizes_of(bidirectional=True),
    "zoneout that is none": sizes_of(zoneout=1e999),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_files_that_declare_too_much(attack: str, saved: Path) -> None:
    saved.write_bytes(ATTACKS[attack](saved.read_bytes()))
    with refused("Expected"):
        FrozenQuantGRU.load(saved)


@pytest.mark.skipif(os.name == "nt", reason="needs files of POSIX")
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "terabyte"])
def test_paths_that_are_no_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    # a file is mapped, which takes addresses but no memory
    with memory(2 << 40, seconds=5), pytest.raises(ParameterError, match="Expected"):
        FrozenQuantGRU.load(path)


# a damaged scale is rounded with a warning first, then refused
@pytest.mark.filterwarnings("ignore:the scale of 'gate.z_out' was rounded")
def test_damaged_files(saved: Path) -> None:
    """Whatever a byte becomes, a file loads with valid integers or raises ParameterError."""
    raw, chance, loaded = saved.read_bytes(), random.Random(0), 0
    for _ in range(150):
        changed = bytearray(raw)
        for _ in range(chance.choice((1, 3, 20))):
            changed[chance.randrange(len(raw))] = chance.randrange(256)
        saved.write_bytes(changed)
        with memory(64 * MIB), contextlib.suppress(ParameterError):
            FrozenQuantGRU.load(saved)
            loaded += 1
    assert loaded < 150


# --- state_dicts


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, dtype=torch.uint8).expand(1 << 40),
        torch.zeros(1 << 40, dtype=torch.uint8, device="meta"),
        torch.zeros(1 << 20, dtype=torch.uint8).to_sparse(),
        torch.zeros(4, 4, dtype=torch.uint8),
        torch.zeros(16),
        "text",
        None,
    ],
    ids=["expanded", "meta", "sparse", "2-D", "float", "text", "none"],
)
def test_documents_that_are_no_text(tensor: Any) -> None:
    with refused("Expected a 1-D uint8 tensor"):
        document.from_tensor(tensor, "here")
    state = calibrated().freeze().state_dict()
    with refused("Expected a 1-D uint8 tensor"):
        FrozenQuantGRU.from_state_dict({**state, "plan": tensor})


@pytest.mark.parametrize("key", ["W_l0", "Bw_l1", "Mx_l0", "kh_l1"])
def test_expanded_integers(key: str) -> None:
    state = calibrated().freeze().state_dict()
    state[key] = torch.zeros(1, dtype=state[key].dtype).expand(1 << 20, 1 << 20)
    with refused("Expected"):
        FrozenQuantGRU.from_state_dict(state)


class Bomb:
    """An object whose reading runs code."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("save", [torch.save, lambda it, path: path.write_bytes(pickle.dumps(it))])
def test_no_code_of_a_file_runs(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save({"a.quantization": Bomb()}, tmp_path / "a.pt")
    with pytest.raises(QuantGRUError, match=r"Expected a file of tensors that torch\.load reads"):
        files.read(str(tmp_path / "a.pt"))
    assert not (tmp_path / "ran").exists()


def test_one_storage_that_many_entries_name(tmp_path: Path) -> None:
    """The text of each is read by itself, and they are few in a file of this size."""
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    torch.save({f"{i}.quantization": tensor for i in range(500)}, tmp_path / "a.pt")
    with refused("Expected", most=256 * MIB):
        files.read(str(tmp_path / "a.pt"))
