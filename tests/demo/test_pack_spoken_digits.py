import importlib.util
import wave
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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


Prepare = Callable[[Path], None]
BAD: list[tuple[str, Prepare, str]] = [
    ("empty folder", lambda d: None, "to be a folder with wav files, got none"),
    (
        "name",
        lambda d: write_wav(d / "ada_1.wav", noise(0)),
        "{digit}_{speaker}_{take}.wav, got",
    ),
    (
        "text",
        lambda d: (d / "1_ada_1.wav").write_text("hello") and None,
        "to be a PCM wav file",
    ),
    (
        "no samples",
        lambda d: write_wav(d / "1_ada_1.wav", noise(0, 0)),
        "to be some samples, got 0",
    ),
    (
        "stereo",
        lambda d: write_wav(d / "1_ada_1.wav", noise(0), channels=2),
        "got 2 channel(s) with 16 bits",
    ),
    (
        "8 bits",
        lambda d: write_wav(d / "1_ada_1.wav", noise(0), width=1),
        "got 1 channel(s) with 8 bits",
    ),
    (
        "rates",
        lambda d: (
            [
                write_wav(d / "1_ada_1.wav", noise(0)),
                write_wav(d / "1_ada_2.wav", noise(0), rate=16000),
            ]
            and None
        ),
        "to be sampled at 8000 Hz, got 16000 Hz",
    ),
    (
        "twice",
        lambda d: [write_wav(d / f"1_ada_{t}.wav", noise(0)) for t in ("1", "01")] and None,
        "to be there once, got",
    ),
]


@pytest.mark.parametrize(("prepare", "message"), [bad[1:] for bad in BAD], ids=[b[0] for b in BAD])
def test_bad_folder(
    example: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prepare: Prepare,
    message: str,
) -> None:
    prepare(tmp_path)
    assert example.main([str(tmp_path), str(tmp_path / "out.npz")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("Error: Expected ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out.npz").exists()


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
