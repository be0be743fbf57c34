"""The commands on the file of a frozen GRU: export, inspect, verify."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from quant_gru import FrozenQuantGRU, QuantConfig, QuantGRU
from quant_gru.cli import app
from quant_gru.errors import QuantGRUWarning

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def said(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def calibrated(seed: int = 0, **options: object) -> QuantGRU:
    torch.manual_seed(seed)
    gru = QuantGRU(5, 6, **{"config": QuantConfig.int8(), **options})
    gru.calibrate(torch.randn(20, 4, 5))
    gru.finalize_calibration()
    return gru


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "Word-2.safetensors"
    calibrated().freeze().save(path)
    return path


@pytest.mark.parametrize(
    "options",
    [[], ["--lengths"], ["--states"], ["--lengths", "--states"], ["--step"]],
    ids=" ".join,
)
def test_onnx(options: list[str], file: Path) -> None:
    out = said("export", file, "--to", "onnx", *options)
    target = file.with_suffix(".onnx")
    assert out.startswith(f"Wrote {target}\noutput: equal (")
    assert said("verify", file, "--against", target).count(": equal (") == 2


def test_layers_directions_and_batch_first(tmp_path: Path) -> None:
    file, target = tmp_path / "g", tmp_path / "g.onnx"
    gru = calibrated(num_layers=2, bidirectional=True, batch_first=True)
    gru.freeze().save(file)
    said("export", file, "--to", "onnx", "--lengths", "--states")
    assert said("verify", file, "--against", target).count(": equal (") == 2


def test_other_profiles_are_close(file: Path) -> None:
    calibrated(config=QuantConfig.int16().replace_globals(scale_kind="free")).freeze().save(file)
    target = file.with_name("qdq.onnx")
    said("export", file, "--to", "onnx", "--profile", "qdq", "--output", target)
    assert run("verify", file, "--against", target).exit_code == 1
    assert "codes differ" in said("verify", file, "--against", target, "--within", 20)


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_c(options: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "Word-2.safetensors"
    calibrated(**options).freeze().save(file)
    out = said("export", file, "--to", "c")
    folder = tmp_path / "Word-2_c"
    assert "bytes of constants" in out
    assert (folder / "word_2.c").exists()
    assert said("verify", file, "--against", folder).startswith("equal (")
    source = folder / "word_2.c"
    source.write_text(source.read_text().replace(" 1, Rh[i], 1)", " 1, Rh[i] + 5, 1)"))
    result = run("verify", file, "--against", folder)
    assert result.exit_code == 1
    assert not result.stdout.startswith("equal (")


def test_another_gru_differs(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    calibrated(seed=1).freeze().save(other)
    for form, target in (("onnx", "o.onnx"), ("c", "o_c")):
        said("export", other, "--to", form, "--output", tmp_path / target)
        if form == "onnx" or shutil.which("cc"):
            result = run("verify", file, "--against", tmp_path / target)
            assert result.exit_code == 1
            assert "codes differ" in result.stdout


def test_json_is_the_parameter_file(file: Path) -> None:
    said("export", file, "--to", "json")
    gru = calibrated(seed=3)
    gru.load_quant_params(file.with_suffix(".json"))
    assert json.loads(file.with_suffix(".json").read_text())["gru"]["hidden_size"] == 6
    assert "FrozenQuantGRU" in said("check", file)
    assert said("check", file.with_suffix(".json")).count("parameter file of a GRU(5, 6") == 1


@pytest.mark.parametrize("kind", ["pot", "free"])
@pytest.mark.parametrize("granularity", ["tensor", "gate", "channel"])
@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
def test_encodings_are_those_of_the_module(
    version: str, granularity: str, kind: str, tmp_path: Path
) -> None:
    config = QuantConfig.int8().replace_globals(scale_kind=kind, tie_x_and_h=True)
    for name in ("weight.W", "weight.R"):
        config = config.replace(name, granularity=granularity)
    gru = calibrated(config=config, bias=False)
    gru.freeze().save(tmp_path / "gru.safetensors")
    said("export", tmp_path / "gru.safetensors", "--to", "encodings", "--version", version)
    gru.export_encodings(tmp_path / "own.encodings", version)
    ours, theirs = (
        list(numbers(json.loads((tmp_path / name).read_text())))
        for name in ("gru.encodings", "own.encodings")
    )
    assert len(ours) > 10
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        if isinstance(mine, float) and kind == "free":
            assert mine == pytest.approx(other, rel=2**-15), name
        else:
            assert mine == other, name
    parameters = (tmp_path / "gru.quant_params.json").read_text()
    assert parameters == (tmp_path / "own.quant_params.json").read_text()


def numbers(data: object, name: str = ""):
    """Every value of a document with the path to it."""
    if isinstance(data, dict | list):
        pairs = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in pairs:
            yield from numbers(value, f"{name}.{key}")
    else:
        yield name, data


@pytest.mark.filterwarnings("default::quant_gru.QuantGRUWarning")
def test_biases_have_no_encoding(file: Path) -> None:
    result = run("export", file, "--to", "encodings")
    assert result.exit_code == 0
    assert "Warning: Encodings of a frozen GRU have none for its biases" in result.stderr
    assert "bias" not in file.with_suffix(".encodings").read_text()


def test_damaged_models_are_errors_or_compared(file: Path) -> None:
    said("export", file, "--to", "onnx", "--step")
    target, chance = file.with_suffix(".onnx"), random.Random(0)
    raw = target.read_bytes()
    for _ in range(60):
        data = bytearray(raw[: chance.choice([len(raw), len(raw), chance.randrange(len(raw))])])
        for _ in range(chance.randrange(4) if data else 0):
            data[chance.randrange(len(data))] = chance.randrange(256)
        target.write_bytes(data)
        result = run("verify", file, "--against", target)
        assert result.exit_code in (0, 1, 2)
        assert result.exit_code < 2 or result.stderr.startswith("Error: Expected ")


def test_inspect_warns_of_cut_biases(tmp_path: Path) -> None:
    gru = calibrated()
    with torch.no_grad():
        gru.weight_hh_l0.mul_(1e-12)
    with pytest.warns(QuantGRUWarning, match="Expected biases that sums"):
        gru.freeze().save(tmp_path / "cut.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        found = run("inspect", tmp_path / "cut.safetensors")
    assert found.exit_code == 0
    assert "weight.br of layer 0 that are too large" in found.stderr


def test_inspect(file: Path, tmp_path: Path) -> None:
    out = said("inspect", file)
    assert "gate.z_out      8     unsigned  0           2^-8" in out
    assert "W_l0         18 x 5  I8    90" in out
    parts = [
        int(line.split()[-1]) for line in out.splitlines() if line[:1] in "hcWRi" and "_l0" in line
    ]
    header, columns = (
        int(next(line for line in out.splitlines() if line.startswith(name)).split()[-1])
        for name in ("header", "columns")
    )
    assert f"\n{sum(parts) + header + columns} bytes, " in out
    assert sum(parts) + header + columns == file.stat().st_size
    assert out.rstrip().endswith("198 multiply-accumulates a step")
    calibrated().export_quant_params(tmp_path / "p.json")
    out = said("inspect", tmp_path / "p.json")
    assert "gate.z_out      8     unsigned" in out
    assert "multiply-accumulates" not in out


def test_nothing_is_overwritten_unless_asked(file: Path) -> None:
    target = file.with_suffix(".onnx")
    target.write_text("mine")
    result = run("export", file, "--to", "onnx")
    assert (result.exit_code, target.read_text()) == (2, "mine")
    assert result.stderr.startswith("Error: Expected --output to be new, got ")
    parameters = file.with_suffix(".quant_params.json")
    parameters.write_text("mine")
    result = run("export", file, "--to", "encodings")
    assert (result.exit_code, parameters.read_text()) == (2, "mine")
    said("export", file, "--to", "onnx", "--force")
    assert target.read_bytes() != b"mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "FILE", "--to", "c", "--profile", "qdq"], "--profile only with --to onnx"),
        (["export", "FILE", "--to", "onnx", "--name", "x"], "--name only with --to c"),
        (["export", "FILE", "--to", "json", "--version", "1"], "--version only with --to encod"),
        (["export", "FILE", "--to", "onnx", "--step", "--states"], "--step without --states"),
        (["export", "FILE", "--to", "c", "--name", "string"], "a name that is not taken in C"),
        (["export", "FILE", "--to", "encodings", "--version", "3"], "Expected version to be"),
        (["export", "none", "--to", "c"], "Expected a file to exist, got none (file 'none')"),
        (["export", "OTHER", "--to", "c"], "Expected a safetensors file"),
        (["inspect", "OTHER"], "Expected JSON"),
        (["verify", "FILE", "--against", "none"], "Expected a file to exist, got none"),
        (["verify", "FILE", "--against", "OTHER"], "a model that ONNX Runtime loads"),
        (["verify", "FILE", "--against", "FOLDER"], "C source of one GRU, got none"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "folder" / "text"
    other.parent.mkdir()
    other.write_text("no model")
    names = {"FILE": str(file), "OTHER": str(other), "FOLDER": str(tmp_path)}
    result = run(*(names.get(each, each) for each in arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: Expected ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "folder"}


@needs_compiler
def test_what_does_not_fit_is_named(file: Path, tmp_path: Path, monkeypatch) -> None:
    other = tmp_path / "other"
    gru = QuantGRU(4, 6)
    gru.calibrate(torch.randn(5, 2, 4))
    gru.finalize_calibration()
    gru.freeze().save(other)
    for form in ("onnx", "c"):
        said("export", other, "--to", form)
    for target in ("other.onnx", "other_c"):
        result = run("verify", file, "--against", tmp_path / target)
        assert result.exit_code == 2
        assert "Expected " in result.stderr
    (tmp_path / "other_c" / "other.c").write_text("not C")
    result = run("verify", other, "--against", tmp_path / "other_c")
    assert "Expected C source that compiles, got: " in result.stderr
    (tmp_path / "other_c" / "other.c").write_text(
        '#include "other.h"\n#include <stdlib.h>\nvoid other_init(other_state *s) { abort(); }\n'
        "void other_step(other_state *s, const other_input *x, other_code *y) {}\n"
        "void other_run(other_state *s, const other_input *x, size_t n, other_code *y) {}\n"
    )
    result = run("verify", other, "--against", tmp_path / "other_c")
    assert "Expected a program that counts codes, got exit status -6" in result.stderr
    monkeypatch.setenv("CC", "no-such-compiler")
    result = run("verify", other, "--against", tmp_path / "other_c")
    assert "Expected a C compiler, got none named no-such-compiler" in result.stderr


def test_a_frozen_gru_writes_its_parameters(tmp_path: Path) -> None:
    gru = calibrated(num_layers=2, bidirectional=True, batch_first=True)
    gru.export_quant_params(tmp_path / "a.json")
    FrozenQuantGRU.from_state_dict(gru.freeze().state_dict()).export_quant_params(
        tmp_path / "b.json"
    )
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
