"""Files of frozen GRUs: everything comes back, and wrong files are errors."""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_grus import KINDS, first_version, random_codes, random_gru
from safetensors.torch import load_file, save_file

from quant_gru import FrozenQuantGRU, ParameterError, QuantConfig, QuantGRU
from quant_gru.config import FUSIBLE, OPERATORS
from quant_gru.execution.frozen_plan import BUFFERS
from quant_gru.interchange.plan_tensors import derived_tensors, sums_of_cell
from quant_gru.parameters.columns import column
from quant_gru.parameters.packed import pack
from sweeps import batches

ACTIVATIONS = ("exact", "pwl", "quadratic")


def inputs(gru: FrozenQuantGRU, rng: random.Random) -> torch.Tensor:
    cell = gru._plan().cells[0][0]
    T, N = rng.randint(1, 4), rng.randint(1, 3)
    codes = random_codes(cell.x, rng, T, N, cell.input_size)
    return codes.transpose(0, 1) if gru.batch_first else codes


@pytest.mark.parametrize(("kind", "first", "end"), batches(dict.fromkeys(KINDS, 6), 2))
def test_random_plans_come_back(kind, first, end, tmp_path):
    path = tmp_path / "gru.safetensors"
    for seed in range(first, end):
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
        ("version", "3", "Expected version '1' or '2' in the metadata, got '3'"),
        ("version", "1", "Expected key 'layer', got none"),
        ("batch_first", "yes", "Expected 'batch_first' in the metadata to be 'true' or 'false'"),
        ("document", "[1]", "Expected 'document' to be an object, got list"),
        ("document", "[" * 100_000, "Expected JSON of moderate size"),
        ("document", "{", "Expected JSON, got an error at line 1"),
        ("document", "{}", "Expected key 'operators', got none"),
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
        ({"integers_l1": None}, "Expected tensor 'integers_l1' of bytes, got none"),
        ({"integers_l1": torch.zeros(9)}, "of bytes, got torch.float32 (9,)"),
        ({"integers_l1": torch.zeros(9, dtype=torch.uint8)}, "Expected columns of 1 to 64 bits"),
        ({"columns": None}, "Expected tensor 'columns' of bytes, got none"),
        ({"W_l0_reverse": torch.zeros(12, 3)}, "Expected no tensor but those of a frozen GRU"),
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


def rows(cell: dict[str, list[int]], rest: bytes) -> torch.Tensor:
    """The integers of a cell."""
    raw = b"".join(column(cell[name]) for name in BUFFERS[2:]) + rest
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("Mx", 0, "at key 'Mx_l0', got 0.."),
        ("kh", 700, "Expected integers in [-600, 600] at key 'kh_l0'"),
        ("Bw", 1 << 40, "at key 'Bw_l0'"),
        ("sums", 1, "Expected tensor 'integers_l0' to be what the document and the weights"),
        ("more", 1, "Expected tensor 'integers_l0' to be what the document and the weights"),
    ],
)
def test_wrong_integers(saved, name, value, message):
    tensors, metadata = parts(saved)
    gru = FrozenQuantGRU.load(saved)
    state = gru.state_dict()
    cell = {key: state[f"{key}_l0"].tolist() for key in BUFFERS[2:]}
    sums = sums_of_cell(gru._plan(), 0, 0)
    assert torch.equal(tensors["integers_l0"], rows(cell, column(sums)))
    if name in cell:
        cell[name][1] = value
    else:
        sums = [*sums, value] if name == "more" else [sums[0] + value, *sums[1:]]
    tensors["integers_l0"] = rows(cell, column(sums))
    save_file(tensors, saved, metadata)
    with pytest.raises(ParameterError) as error:
        FrozenQuantGRU.load(saved)
    assert message in str(error.value)


@pytest.mark.parametrize(("kind", "first", "end"), batches(dict.fromkeys(KINDS, 4), 2))
def test_files_of_the_first_version(kind, first, end, tmp_path):
    """They give the module that files of this version give."""
    path = tmp_path / "gru.safetensors"
    for seed in range(first, end):
        gru, rng = random_gru(seed, kind, far=True)
        path.write_bytes(first_version(gru))
        old = FrozenQuantGRU.load(path)
        old.save(path)
        new = FrozenQuantGRU.load(path)
        states = [each.state_dict() for each in (gru, old, new)]
        for state in states[1:]:
            assert state.keys() == states[0].keys()
            assert all(torch.equal(state[key], states[0][key]) for key in state)
        x = inputs(gru, rng)
        results = [each.forward_integer(x) for each in (gru, old, new)]
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0])), (kind, seed)


@st.composite
def configs(draw: st.DrawFn) -> QuantConfig:
    """A preset, or any widths."""
    preset = draw(st.sampled_from(["int8", "int8_wide", "w8a16", "int16", None]))
    if preset is not None:
        return getattr(QuantConfig, preset)()
    config = QuantConfig.int8()
    common = draw(st.integers(1, 32))
    for name in OPERATORS:
        bits = draw(st.one_of(st.just(common), st.integers(1, 32)))
        config = config.replace(name, bitwidth=bits)
    for name in FUSIBLE:
        if draw(st.booleans()):
            config = config.replace(name, bitwidth=None)
    kind, activation = draw(st.sampled_from(["pot", "free"])), draw(st.sampled_from(ACTIVATIONS))
    return config.replace_globals(scale_kind=kind, activation=activation)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::quant_gru.QuantGRUWarning")
@settings(max_examples=30, deadline=None)
@given(configs(), st.integers(1, 3), st.booleans(), st.integers(0, 1 << 20))
def test_files_of_live_grus(config, layers, both, seed):
    """Both versions have the plan of the live GRU, from which every executor computes."""
    generator = torch.Generator().manual_seed(seed)
    gru = QuantGRU(5, 6, num_layers=layers, bidirectional=both, config=config, zoneout=0.1).eval()
    x = torch.randn(7, 3, 5, generator=generator)
    gru.calibrate(x)
    gru.finalize_calibration()
    gru.use_quantization = True
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder) / "old", Path(folder) / "new"
        old.write_bytes(first_version(gru.freeze()))
        gru.freeze().save(new)
        loaded = [FrozenQuantGRU.load(old), FrozenQuantGRU.load(new)]
    live = gru._source().plan
    numbers = derived_tensors(live)
    for frozen in loaded:
        plan = frozen._plan()
        found = derived_tensors(plan)
        assert found.keys() == numbers.keys()
        assert all(torch.equal(found[key], numbers[key]) for key in found)
        for mine, its in zip(plan.cells, live.cells, strict=True):
            for a, b in zip(mine, its, strict=True):
                assert torch.equal(a.weights.W, b.weights.W)
                assert torch.equal(a.weights.R, b.weights.R)
                for one, other in ((a.weights.Wx, b.weights.Wx), (a.weights.Rh, b.weights.Rh)):
                    assert torch.equal(one.multipliers[0].long(), other.multipliers[0].long())
                    assert torch.equal(one.shift.long(), other.shift.long())
                assert torch.equal(a.weights.Bw.long(), b.weights.Bw.long())
                assert torch.equal(a.weights.Br.long(), b.weights.Br.long())
        assert all(map(torch.equal, frozen(x), gru(x)))


def test_a_file_that_an_older_library_wrote(tmp_path):
    path = Path(__file__).parent / "version_1.qgru"
    assert parts(path)[1]["version"] == "1"
    old = FrozenQuantGRU.load(path)
    old.save(tmp_path / "gru.safetensors")
    new = FrozenQuantGRU.load(tmp_path / "gru.safetensors")
    assert (tmp_path / "gru.safetensors").stat().st_size < path.stat().st_size / 4
    x = torch.randn(7, 3, old.shape.input_size)
    assert all(map(torch.equal, old(x), new(x)))


def golden(path: Path) -> Iterator[tuple[bytes, int, int, list[bytes]]]:
    """The cases of a file of tests/cpp/make_golden.py: a frozen file, T, N, and five arrays."""
    raw, at = path.read_bytes(), 8

    def word() -> int:
        nonlocal at
        at += 8
        return int.from_bytes(raw[at - 8 : at], "little")

    def array() -> bytes:
        nonlocal at
        size = word()
        found = raw[at : at + size]
        at += size + -size % 8
        return found

    for _ in range(int.from_bytes(raw[:8], "little")):
        yield array(), word(), word(), [array() for _ in range(5)]


@pytest.mark.parametrize("name", ["golden.bin", "packed.bin"])
def test_results_of_files_that_were_written_before(name, tmp_path):
    """Those of golden.bin have version 1, those of packed.bin version 2."""
    cases = 0
    for raw, T, N, (x, h0, lengths, y, h_n) in golden(
        Path(__file__).parents[2] / "cpp/tests" / name
    ):
        (tmp_path / "gru").write_bytes(raw)
        assert parts(tmp_path / "gru")[1]["version"] == ("1" if name == "golden.bin" else "2")
        gru = FrozenQuantGRU.load(tmp_path / "gru")
        if lengths:
            continue
        size = (N, T, -1) if gru.batch_first else (T, N, -1)
        values = torch.frombuffer(bytearray(x), dtype=torch.float32).reshape(size)
        states = torch.frombuffer(bytearray(h0), dtype=torch.float32) if h0 else None
        cells = gru.shape.num_layers * gru.shape.directions
        found = gru(values, states if states is None else states.reshape(cells, N, -1))
        for mine, its in zip(found, (y, h_n), strict=True):
            wanted = torch.frombuffer(bytearray(its), dtype=torch.float32).reshape(mine.shape)
            assert torch.equal(mine.nan_to_num(7), wanted.nan_to_num(7))
            assert torch.equal(mine.isnan(), wanted.isnan())
        cases += 1
    assert cases > 5


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("table.gate.z_out.bounds_l0", torch.zeros(9)),
        ("sum.output.h_l0", torch.zeros(3, dtype=torch.int64)),
        ("sum.output.h_l0", None),
    ],
)
def test_wrong_tensors_of_the_first_version(name, changed, saved):
    path = saved
    path.write_bytes(first_version(FrozenQuantGRU.load(path)))
    tensors, metadata = parts(path)
    tensors.pop(name)
    save_file(tensors if changed is None else {**tensors, name: changed}, path, metadata)
    with pytest.raises(ParameterError, match=f"Expected tensor '{name}'"):
        FrozenQuantGRU.load(path)


def weights_of(bits: int) -> QuantConfig:
    config = QuantConfig.int8()
    for name in ("weight.W", "weight.R"):
        config = config.replace(name, bitwidth=bits)
    return config


def sizes(config: QuantConfig, folder: Path) -> tuple[float, float]:
    """The bytes of file and state_dict of a GRU(40, 64), as shares of those of its parameters."""
    gru = QuantGRU(40, 64, config=config)
    gru.calibrate(torch.randn(50, 8, 40, generator=torch.Generator().manual_seed(0)))
    gru.finalize_calibration()
    frozen = gru.freeze()
    frozen.save(folder / "gru.safetensors")
    size = sum(each.nbytes for each in gru.parameters())
    state = sum(each.nbytes for each in frozen.state_dict().values())
    return (folder / "gru.safetensors").stat().st_size / size, state / size


@pytest.mark.filterwarnings("ignore:one signed bit")
@pytest.mark.parametrize(
    ("config", "file", "state"),
    [
        (QuantConfig.int8(), 0.3, 0.3),
        (QuantConfig.int8_wide(), 0.3, 0.32),
        (QuantConfig.int16(), 0.62, 0.64),
        (weights_of(4), 0.16, 0.3),
        (weights_of(2), 0.09, 0.3),
        (weights_of(1), 0.06, 0.3),
    ],
)
def test_bytes(config, file, state, tmp_path):
    found = sizes(config, tmp_path)
    assert found[0] <= file
    assert found[1] <= state


def test_equal_tables_are_in_the_file_once(tmp_path):
    found = []
    for layers in (1, 2):
        gru, _ = random_gru(1, "w16a16")
        document = gru._document()
        cell = document["cells"][0]
        cells = [{**cell, "layer": i, "input_mean": None} for i in range(layers)]
        found.append(len(pack({**document, "cells": cells})[1]))
    assert found[1] - found[0] < 200


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
