"""Files of frozen GRUs: everything comes back, and wrong files are errors."""

from __future__ import annotations

import json
import os
import random
import struct

import pytest
import torch
from random_grus import KINDS, random_codes, random_gru
from safetensors.torch import load_file, save_file

from quant_gru import FrozenQuantGRU, ParameterError, QuantGRU


def inputs(gru: FrozenQuantGRU, rng: random.Random) -> torch.Tensor:
    cell = gru._plan().cells[0][0]
    T, N = rng.randint(1, 4), rng.randint(1, 3)
    codes = random_codes(cell.x, rng, T, N, cell.input_size)
    return codes.transpose(0, 1) if gru.batch_first else codes


@pytest.mark.parametrize("kind", KINDS)
def test_random_plans_come_back(kind, tmp_path):
    path = tmp_path / "gru.safetensors"
    for seed in range(6):
        gru, rng = random_gru(seed, kind, far=True)
        gru.save(path)
        other = FrozenQuantGRU.load(path)
        assert other.batch_first == gru.batch_first
        assert other.shape == gru.shape
        own, found = gru.state_dict(), other.state_dict()
        assert own.keys() == found.keys()
        assert all(torch.equal(own[key], found[key]) for key in own)
        x = inputs(gru, rng)
        for a, b in zip(gru.forward_integer(x), other.forward_integer(x), strict=True):
            assert torch.equal(a, b), (kind, seed)


def test_the_same_gru_gives_the_same_file(tmp_path):
    gru, _ = random_gru(3, "mixed")
    gru.save(tmp_path / "a")
    gru.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_calibrated_gru(tmp_path):
    gru = QuantGRU(5, 7, num_layers=2, bidirectional=True)
    x = torch.randn(9, 2, 5)
    gru.calibrate(x)
    gru.finalize_calibration()
    gru.use_quantization = True
    frozen = gru.freeze()
    frozen.save(tmp_path / "gru.safetensors")
    other = FrozenQuantGRU.load(str(tmp_path / "gru.safetensors"))
    for a, b in zip(frozen(x), other(x), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def saved(tmp_path):
    gru = QuantGRU(3, 4, num_layers=2)
    gru.calibrate(torch.randn(5, 2, 3))
    gru.finalize_calibration()
    path = tmp_path / "gru.safetensors"
    gru.freeze().save(path)
    return path


def parts(path):
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    header = json.loads(path.read_bytes()[8 : 8 + size])
    return load_file(path), header["__metadata__"]


def test_an_existing_file_remains_where_writing_fails(saved, monkeypatch):
    before = saved.read_bytes()
    gru = FrozenQuantGRU.load(saved)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ParameterError, match=r"Expected a writable file, got No space left"):
        gru.save(saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "other", "Expected format 'quant-gru-frozen' in the metadata, got 'other'"),
        ("version", "2", "Expected version '1' in the metadata, got '2'"),
        ("batch_first", "yes", "Expected 'batch_first' in the metadata to be 'true' or 'false'"),
        ("document", "[1]", "Expected 'document' to be an object, got list"),
        ("document", "[" * 100_000, "Expected JSON of moderate size"),
        ("document", "{", "Expected JSON, got an error at line 1"),
        ("document", "{}", "Expected format to be 'quant-gru-params', got None"),
        ("document", None, "Expected 'document' in the metadata, got none"),
    ],
)
def test_wrong_metadata(saved, key, value, message):
    tensors, metadata = parts(saved)
    metadata.pop(key)
    save_file(tensors, saved, metadata if value is None else {**metadata, key: value})
    with pytest.raises(ParameterError) as error:
        FrozenQuantGRU.load(saved)
    assert message in str(error.value)
    assert str(saved) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W_l0": None}, "at key 'W_l0', got none"),
        ({"W_l0": torch.zeros(2, 2, dtype=torch.int8)}, "Expected integers of shape (12, 3)"),
        ({"W_l0": torch.zeros(12, 3)}, "Expected integers of shape (12, 3)"),
        ({"Mx_l1": torch.zeros(12, dtype=torch.int32)}, "at key 'Mx_l1', got 0..0"),
        ({"kx_l1": torch.full((12,), 700, dtype=torch.int16)}, "Expected integers in [-600, 600]"),
        ({"sum.output.h_l1": None}, "Expected tensor 'sum.output.h_l1', got none"),
        ({"sum.output.h_l1": torch.zeros(3, dtype=torch.int64)}, "got torch.int64 (3,) [0, 0, 0]"),
        ({"table.gate.z_out.bounds_l0": torch.zeros(9)}, "'table.gate.z_out.bounds_l0' to be"),
        ({"between_l1": torch.zeros(1, 2, dtype=torch.int64)}, "Expected tensor 'between_l1'"),
        ({"more": torch.zeros(1)}, "Expected no tensor but those of a frozen GRU, got 'more'"),
        ({"plan": torch.zeros(1)}, "Expected no tensor but those of a frozen GRU, got 'plan'"),
    ],
)
def test_wrong_tensors(saved, change, message):
    tensors, metadata = parts(saved)
    tensors = {**tensors, **change}
    save_file({k: v for k, v in tensors.items() if v is not None}, saved, metadata)
    with pytest.raises(ParameterError) as error:
        FrozenQuantGRU.load(saved)
    assert message in str(error.value)
    assert str(saved) in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ParameterError, match="Expected a file to exist, got none"):
        FrozenQuantGRU.load(tmp_path / "none")
    with pytest.raises(ParameterError, match="Expected a regular file"):
        FrozenQuantGRU.load(tmp_path)
    with pytest.raises(ParameterError, match="Expected the path of a file, got 3"):
        FrozenQuantGRU.load(3)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ParameterError, match="Expected a regular file"):
        FrozenQuantGRU.load(tmp_path / "pipe")
