import importlib.util
import wave
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from quant_gru.demo.spoken import load_recordings, spoken_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "pack_spoken_digits.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pack_spoken_digits", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_wav(
    path: Path, samples: np.ndarray, rate: int = 8000, channels: int = 1, width: int = 2
) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())


def noise(seed: int, length: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).integers(-32768, 32768, length).astype("<i2")


def test_round_trip(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Take 10 sorts after take 2, and bob after ada, whatever the names of the files say.
    order = [(0, "ada", 2), (0, "ada", 10), (0, "bob", 0), (7, "ada", 1), (7, "ada", 6)]
    folder = tmp_path / "recordings"
    folder.mkdir()
    (folder / "README.md").write_text("not a recording")
    for i in (3, 0, 4, 2, 1):
        digit, who, take = order[i]
        write_wav(folder / f"{digit}_{who}_{take}.wav", noise(i, 400 + i))

    target = tmp_path / "packed.npz"
    assert example.main([str(folder), str(target)]) == 0
    assert "5 recordings" in capsys.readouterr().out
    found = load_recordings(target)
    assert found.speaker_names == ("ada", "bob")
    assert found.sample_rate == 8000
    for i, (digit, who, take) in enumerate(order):
        assert (found.label[i], found.take[i]) == (digit, take)
        assert found.speaker_names[found.speaker[i]] == who
        part = found.samples[found.offsets[i] : found.offsets[i + 1]]
        np.testing.assert_array_equal(part, noise(i, 400 + i))
    assert len(spoken_task(target).train) == 2


def write_folder(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, properties in files.items():
        write_wav(folder / name, **({"samples": noise(0)} | properties))


BAD: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "empty folder": ({}, "to be a folder with wav files, got none"),
    "name": ({"ada_1.wav": {}}, "{digit}_{speaker}_{take}.wav, got"),
    "no samples": ({"1_ada_1.wav": {"samples": noise(0, 0)}}, "to be some samples, got 0"),
    "stereo": ({"1_ada_1.wav": {"channels": 2}}, "got 2 channel(s) with 16 bits"),
    "8 bits": ({"1_ada_1.wav": {"width": 1}}, "got 1 channel(s) with 8 bits"),
    "rates": (
        {"1_ada_1.wav": {}, "1_ada_2.wav": {"rate": 16000}},
        "to be sampled at 8000 Hz, got 16000 Hz",
    ),
    "twice": ({"1_ada_1.wav": {}, "1_ada_01.wav": {}}, "to be there once, got"),
}


def assert_one_line_error(error: str, part: str) -> None:
    assert part in error
    assert error.startswith("Error: Expected ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("files", "message"), BAD.values(), ids=BAD)
def test_bad_folder(
    example: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    files: dict[str, dict[str, Any]],
    message: str,
) -> None:
    write_folder(tmp_path, files)
    assert example.main([str(tmp_path), str(tmp_path / "out.npz")]) == 2
    assert_one_line_error(capsys.readouterr().err, message)
    assert not (tmp_path / "out.npz").exists()


def test_text_named_wav(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1_ada_1.wav").write_text("hello")
    assert example.main([str(tmp_path), str(tmp_path / "out.npz")]) == 2
    assert_one_line_error(capsys.readouterr().err, "to be a PCM wav file")


def test_truncated_wav(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "1_ada_1.wav"
    write_wav(path, noise(0))
    path.write_bytes(path.read_bytes()[:-100])
    assert example.main([str(tmp_path), str(tmp_path / "out.npz")]) == 2
    assert "to be 400 samples, got 350" in capsys.readouterr().err


def test_input_and_output_names(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main([str(tmp_path / "none"), str(tmp_path / "out.npz")]) == 2
    assert "to be a folder of recordings" in capsys.readouterr().err
    assert example.main([str(tmp_path), str(tmp_path / "out.zip")]) == 2
    assert "ending in .npz" in capsys.readouterr().err
    write_wav(tmp_path / "1_ada_1.wav", noise(0))
    assert example.main([str(tmp_path), str(tmp_path / "none" / "out.npz")]) == 2
    assert "that can be written" in capsys.readouterr().err
