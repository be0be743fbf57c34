"""Spoken digits: loading, checking and task of the npz of examples/pack_spoken_digits.py."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quant_gru.demo.data import Sequences, Task
from quant_gru.demo.errors import DataError
from quant_gru.demo.frontend import LogMel

KEYS = ("samples", "offsets", "label", "speaker", "take", "speaker_names", "sample_rate")
TEST_TAKES = 5
# Two seconds: a spoken digit takes half a second, but a few recordings end with a long silence.
MAX_FRAMES = 128
# A band that is constant in training must not amplify the noise of the test set.
MIN_DEVIATION = 1e-3

Array = npt.NDArray[Any]
_UNREADABLE = (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Recordings:
    """Concatenated recordings, with their speakers and digits.

    Attributes:
        samples: int16 (S,), all recordings one after the other.
        offsets: int64 (N + 1,), recording i is `samples[offsets[i]:offsets[i + 1]]`.
        label: int64 (N,), the digit, 0..9.
        speaker: int64 (N,), index into `speaker_names`.
        take: int64 (N,), index of the repetition; 0..4 are the test set.
        speaker_names: One name per speaker.
        sample_rate: Samples per second.
    """

    samples: Array
    offsets: Array
    label: Array
    speaker: Array
    take: Array
    speaker_names: tuple[str, ...]
    sample_rate: int


def load_recordings(path: Path) -> Recordings:
    """Read and check a spoken-digits npz.

    Raises:
        DataError: The file is not such an npz; the message names the file, the key and the value.
    """
    arrays = _read(path)
    samples = _vector(arrays, "samples", path, dtype=np.int16)
    offsets = _vector(arrays, "offsets", path)
    names = arrays["speaker_names"]
    rate = arrays["sample_rate"]
    if names.ndim != 1 or names.dtype.kind != "U" or len(names) == 0:
        raise _error(path, "speaker_names", "a list of names", _describe(names))
    if rate.size != 1 or rate.dtype.kind not in "iu":
        raise _error(path, "sample_rate", "one integer", _describe(rate))
    _check_offsets(offsets, len(samples), path)
    count = len(offsets) - 1
    return Recordings(
        samples=samples,
        offsets=offsets,
        label=_index(arrays, "label", path, count, 10),
        speaker=_index(arrays, "speaker", path, count, len(names)),
        take=_index(arrays, "take", path, count, None),
        speaker_names=tuple(str(name) for name in names),
        sample_rate=int(rate.reshape(())),
    )


def spoken_task(path: Path) -> Task:
    """Return log-mel features of a spoken-digits npz as a task; takes 0..4 are the test set.

    Features are normalized to mean 0 and deviation 1 per band over all training frames.

    Raises:
        DataError: The file cannot be used; the message gives the reason.
    """
    recordings = load_recordings(path)
    features = _features(recordings, path)
    is_test = torch.from_numpy(recordings.take < TEST_TAKES)
    labels = torch.from_numpy(recordings.label)
    for kind, chosen in (("test", is_test), ("training", ~is_test)):
        if not chosen.any():
            rule = f"such that takes 0..{TEST_TAKES - 1} are for test, later ones for training"
            raise _error(path, "take", rule, f"no {kind} recording")
    unseen = set(labels[is_test].tolist()) - set(labels[~is_test].tolist())
    if unseen:
        raise _error(
            path,
            "label",
            "such that all tested digits occur in training",
            f"{min(unseen)} only in the test set",
        )

    train_index, test_index = (~is_test).nonzero()[:, 0], is_test.nonzero()[:, 0]
    frames = torch.cat([features[i] for i in train_index.tolist()])
    mean, deviation = frames.mean(0), frames.std(0, correction=0).clamp(min=MIN_DEVIATION)
    normalized = [(f - mean) / deviation for f in features]
    everything = Sequences(
        torch.nn.utils.rnn.pad_sequence(normalized, batch_first=True),
        torch.tensor([len(f) for f in features]),
        labels,
    )
    return Task(
        name=f"spoken digits ({path.name}), {len(recordings.speaker_names)} speakers",
        n_classes=10,
        train=everything.select(train_index),
        test=everything.select(test_index),
        epochs=15,
    )


def _features(recordings: Recordings, path: Path) -> list[Tensor]:
    try:
        log_mel = LogMel(recordings.sample_rate)
    except DataError as error:
        raise DataError(f"{error} ('{path}')") from error
    lengths = np.diff(recordings.offsets)
    shortest = int(lengths.argmin())
    if lengths[shortest] < log_mel.window:
        raise DataError(
            f"Expected recording {shortest} of '{path}' to be at least {log_mel.window} samples "
            f"long (one window at {recordings.sample_rate} Hz), got {lengths[shortest]}"
        )
    samples = torch.from_numpy(recordings.samples.astype(np.float32) / 32768.0)
    bounds = zip(recordings.offsets[:-1], recordings.offsets[1:], strict=True)
    return [log_mel(samples[start:end])[:MAX_FRAMES] for start, end in bounds]


def _read(path: Path) -> dict[str, Array]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"Expected --data to be an npz file, got '{path}' ({error.strerror})"
        ) from error
    with file:
        try:
            archive = np.load(file, allow_pickle=False)
        except _UNREADABLE as error:
            raise DataError(f"Expected --data to be an npz file, got '{path}'") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"Expected --data to be an npz file, got '{path}' (a single array)")
        missing = [key for key in KEYS if key not in archive]
        if missing:
            raise DataError(
                f"Expected '{path}' to be an npz file with the keys {', '.join(KEYS)}, "
                f"got none named {', '.join(missing)}"
            )
        return {key: _member(archive, key, path) for key in KEYS}


def _member(archive: Mapping[str, Array], key: str, path: Path) -> Array:
    try:
        return archive[key]
    except _UNREADABLE as error:
        raise _error(path, key, "a readable array", " ".join(str(error).split())) from error


def _vector(
    arrays: dict[str, Array], key: str, path: Path, dtype: type[np.generic] | None = None
) -> Array:
    """Return a one-dimensional integer array: int64, or exactly `dtype` if given."""
    array = arrays[key]
    wanted = np.dtype(dtype).name if dtype else "integer"
    fits = array.dtype == dtype if dtype else array.dtype.kind in "iu"
    if array.ndim != 1 or not fits:
        raise _error(path, key, f"a one-dimensional {wanted} array", _describe(array))
    return array if dtype else array.astype(np.int64)


def _index(arrays: dict[str, Array], key: str, path: Path, count: int, limit: int | None) -> Array:
    """Return one non-negative integer below `limit` per recording, int64 (count,)."""
    values = _vector(arrays, key, path)
    if len(values) != count:
        raise _error(path, key, f"{count} numbers, one per recording", f"{len(values)}")
    rule = "non-negative" if limit is None else f"in 0..{limit - 1}"
    wrong = (values < 0) | (values >= (np.iinfo(np.int64).max if limit is None else limit))
    if wrong.any():
        raise _error(path, key, rule, f"{values[wrong][0]} (recording {int(wrong.argmax())})")
    return values


def _check_offsets(offsets: Array, total: int, path: Path) -> None:
    if len(offsets) < 2:
        raise _error(path, "offsets", "at least 2 numbers", f"{len(offsets)}")
    if offsets[0] != 0 or offsets[-1] != total:
        rule = f"numbers from 0 to the {total} samples"
        raise _error(path, "offsets", rule, f"{offsets[0]} to {offsets[-1]}")
    lengths = np.diff(offsets)
    if (lengths <= 0).any():
        i = int((lengths <= 0).argmax())
        got = f"{offsets[i]} then {offsets[i + 1]} (recording {i} is empty)"
        raise _error(path, "offsets", "increasing", got)


def _describe(array: Array) -> str:
    return f"{array.dtype.name} of shape {array.shape}"


def _error(path: Path, key: str, rule: str, got: str) -> DataError:
    return DataError(f"Expected '{key}' of '{path}' to be {rule}, got {got}")
