import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from quant_gru.config import FUSIBLE, OPERATORS
from quant_gru.demo import DataError
from quant_gru.demo.comparison import Row
from quant_gru.demo.data import digits_task
from quant_gru.demo.run import DemoOptions, run_demo
from quant_gru.demo.training import predict
from quant_gru.kernels.dispatch import executor_name

EPOCHS = 12


@dataclass(frozen=True)
class Outcome:
    rows: dict[str, Row]
    text: str
    folder: Path


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    console = Console(file=io.StringIO(), width=80, highlight=False)
    rows = run_demo(DemoOptions(output=folder, epochs=EPOCHS), console)
    assert isinstance(console.file, io.StringIO)
    return Outcome({row.name: row for row in rows}, console.file.getvalue(), folder)


def test_accuracy(outcome: Outcome) -> None:
    rows = outcome.rows
    assert list(rows) == ["float", "int8", "int8_wide", "w8a16", "int16", "int4 weights"]
    assert rows["float"].accuracy >= 0.95
    assert rows["int8"].accuracy >= rows["float"].accuracy - 0.01
    assert rows["float"].agreement == 1.0
    assert rows["int16"].agreement >= 0.995
    assert rows["w8a16"].agreement >= 0.99
    assert rows["int8"].agreement >= 0.97


def test_weight_bytes(outcome: Outcome) -> None:
    """They are those of the file, with tables and parameters."""
    matrices, biases = 192 * (8 + 64), 2 * 192
    sizes = {name: row.weight_bytes for name, row in outcome.rows.items()}
    assert sizes.pop("float") == 4 * (matrices + biases)
    weights = {
        "int8": matrices,
        "int8_wide": matrices,
        "w8a16": matrices,
        "int16": 2 * matrices,
        "int4 weights": matrices // 2,
    }
    assert list(sizes) == list(weights)
    for name, size in sizes.items():
        rest = size - weights[name]
        # rows, tables and header; with 16-bit activations, three tables of 256 segments
        assert 1500 < rest < (12_000 if name in ("w8a16", "int16") else 4500), name


def test_sqnr_of_every_operator(outcome: Outcome) -> None:
    rows = outcome.rows
    assert rows["float"].sqnr == {}
    for name in ("int8", "int8_wide", "w8a16", "int16", "int4 weights"):
        fused = FUSIBLE if name == "int8_wide" else ()
        assert set(rows[name].sqnr) == set(OPERATORS) - set(fused)
    assert rows["int16"].sqnr["output.h"] > rows["int8"].sqnr["output.h"] + 30
    sqnr = [rows[name].sqnr["output.h"] for name in ("int8", "int8_wide", "w8a16")]
    assert sqnr == sorted(sqnr)
    assert rows["int4 weights"].sqnr["weight.R"] < rows["int8"].sqnr["weight.R"] - 15


def test_output_in_a_pipe(outcome: Outcome) -> None:
    lines = outcome.text.splitlines()
    folder = str(outcome.folder)
    assert [line for line in lines if len(line) > 80 and folder not in line] == []
    assert "\x1b" not in outcome.text
    assert "\r" not in outcome.text
    assert f"executor: {executor_name()}" in lines
    for word in ("Training in float", "Calibrating"):
        assert word not in outcome.text
    for operator in OPERATORS:
        assert sum(line.split()[:1] == [operator] for line in lines) == 1


def test_files(outcome: Outcome) -> None:
    assert sorted(path.name for path in outcome.folder.iterdir()) == [
        "classifier_int8.pt",
        "gru_int8.json",
    ]
    assert isinstance(json.loads((outcome.folder / "gru_int8.json").read_text()), dict)


def test_the_printed_code_runs(outcome: Outcome) -> None:
    load, parameters, convert = re.findall(r"(?:^    \S.*\n)+", outcome.text, re.MULTILINE)
    names: dict[str, Any] = {}
    exec(re.sub(r"^ +", "", load, flags=re.MULTILINE), names)
    test = digits_task(0).test
    accuracy = (predict(names["model"].eval(), test) == test.labels).double().mean().item()
    assert accuracy == outcome.rows["int8"].accuracy

    exec(parameters.strip(), names)
    again = (predict(names["model"].eval(), test) == test.labels).double().mean().item()
    assert again == accuracy

    names["model"] = torch.nn.Sequential(torch.nn.Identity(), torch.nn.GRU(8, 4))
    names["batches"] = [torch.rand(5, 2, 8)]
    exec(re.sub(r"^ +", "", convert, flags=re.MULTILINE), names)
    assert names["model"][1].use_quantization


def test_spoken_digits(write_npz: Callable[..., Path], tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    options = DemoOptions(write_npz(), tmp_path / "out", epochs=60, hidden_size=16)
    rows = {row.name: row for row in run_demo(options, console)}
    assert rows["float"].accuracy >= 0.9
    assert rows["int8"].agreement >= 0.9
    assert rows["int16"].agreement >= 0.95


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_output_folder_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    console = Console(file=io.StringIO())
    with pytest.raises(DataError, match=r"--output to be a folder that can be written, got"):
        run_demo(DemoOptions(output=tmp_path / name), console)
