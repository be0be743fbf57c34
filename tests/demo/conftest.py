from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

RATE = 8000


def tone_recordings(takes: int = 8, digits: int = 3, seed: int = 0) -> dict[str, Any]:
    """A small spoken-digits set whose digits are tones of different pitch and length."""
    rng = np.random.default_rng(seed)
    samples, label, speaker, take = [], [], [], []
    for digit in range(digits):
        for who in range(2):
            for t in range(takes):
                time = np.arange(int(rng.integers(800, 1600))) / RATE
                wave = np.sin(2 * np.pi * 300 * (digit + 1) * time) + 0.1 * rng.normal(
                    size=len(time)
                )
                samples.append((8000 * wave).astype(np.int16))
                label.append(digit)
                speaker.append(who)
                take.append(t)
    return {
        "samples": np.concatenate(samples),
        "offsets": np.cumsum([0, *map(len, samples)], dtype=np.int64),
        "label": np.array(label, dtype=np.uint8),
        "speaker": np.array(speaker, dtype=np.uint8),
        "take": np.array(take, dtype=np.uint8),
        "speaker_names": np.array(["ada", "bob"]),
        "sample_rate": np.array(RATE),
    }


@pytest.fixture
def write_npz(tmp_path: Path) -> Callable[..., Path]:
    """Write a small valid npz; keyword arguments replace keys, None leaves one out."""

    def write(**changes: Any) -> Path:
        arrays = tone_recordings() | changes
        path = tmp_path / "digits.npz"
        np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
        return path

    return write
