"""The commands that analyse a model that a function gives: `report`, `tune`, and `bench`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from quant_gru import QuantConfig
from quant_gru.cli import app

SOURCE = """
import torch

def load():
    torch.manual_seed(0)
    return torch.nn.GRU(4, 6), [torch.randn(20, 3, 4)]

def pair():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.GRU(4, 6), "b": torch.nn.GRU(6, 3)})
    return model, [torch.randn(20, 3, 4)], lambda m, x: m["b"](m["a"](x)[0])

def quantized():
    import quant_gru
    model, batches = load()
    return quant_gru.calibrate_model(quant_gru.convert_model(model, "int16"), batches), batches

def wrong():
    return 3

def no_module():
    return 3, []

number = 3
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_report(source: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("report", f"{source}:load", "-o", page, "--preset", "int8", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["operators"]) == 17
    assert {row["bits"] for row in found["operators"]} == {8}
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    again = run("report", f"{source}:load", "-o", page)
    assert again.exit_code == 2
    assert "Expected --output to be a new file" in again.stderr
    assert run("report", f"{source}:quantized", "-o", page, "--force").exit_code == 0
    assert "16 bits" in page.read_text(encoding="utf-8")


def test_tune(source: str, tmp_path: Path) -> None:
    target = tmp_path / "widths.json"
    result = run(
        "tune",
        f"{source}:load",
        "--flash",
        700,
        "--group",
        "gate.*",
        "--widths",
        "8,4",
        "-o",
        target,
    )
    assert result.exit_code == 0, result.stderr
    assert "no other widths have less predicted error within the budget" in result.stdout
    config = QuantConfig.from_json(target)
    gates = [each.bitwidth for name, each in config.operators.items() if name.startswith("gate.")]
    assert len(set(gates)) == 1
    assert max(each.bitwidth or 0 for each in config.operators.values()) <= 8


@pytest.mark.slow
def test_tune_of_several_grus_and_other_budgets(source: str, tmp_path: Path) -> None:
    target = tmp_path / "widths.json"
    limits = ("--flash", 2000, "--packed", 1900, "--bits", 8)
    result = run("tune", f"{source}:pair", *limits, "--json", "-o", target)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["chosen"]["sizes"]["packed"] <= 1900
    assert found["chosen"]["sizes"]["flash"] <= 2000
    assert found["chosen"]["sizes"]["average_bits"] <= 8
    for name in ("a", "b"):
        config = QuantConfig.from_json(tmp_path / f"widths.{name}.json")
        widths = {key: each.bitwidth for key, each in config.operators.items()}
        assert widths == found["chosen"]["widths"][name]


def test_bench() -> None:
    shape = ("--input-size", 3, "--hidden-size", 4, "--steps", 5, "--json")
    result = run("bench", *shape)
    assert result.exit_code == 0, result.stderr
    ways = {row["name"]: row for row in json.loads(result.stdout)["ways"]}
    assert {"float", "int8", "int8_wide", "w8a16", "int16"} <= set(ways)
    assert all(row["step"] > 0 and row["sequence"] > 0 for row in ways.values())
    assert ways["float"]["weights"] == 4 * (3 * 4 * (3 + 4) + 2 * 12)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.py", "Expected MODEL to be like FILE.py:FUNCTION, got 'mine.py'"),
        ("nowhere.py:load", "Expected a Python file, got none"),
        ("no_such_package.at_all:load", "Expected a module or a Python file"),
        ("{source}:nothing", "Expected a function 'nothing'"),
        ("{source}:number", "Expected a function 'number'"),
        ("{source}:wrong", "to return a model and batches, or these and forward_fn, got int"),
        ("{source}:no_module", "to return a module, got int"),
    ],
)
def test_bad_sources(source: str, name: str, text: str) -> None:
    result = run("tune", name.format(source=source), "--flash", 100)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


def test_bad_budgets(source: str) -> None:
    assert "Expected one of --flash" in run("tune", f"{source}:load").stderr
    assert "like 4,8,16" in run("tune", f"{source}:load", "--flash", 1, "--widths", "4;8").stderr
    assert "the least of each" in run("tune", f"{source}:load", "--flash", "0.1 kB").stderr
    assert "such as '60 kB', got '1 kb'" in run("tune", f"{source}:load", "--flash", "1 kb").stderr
