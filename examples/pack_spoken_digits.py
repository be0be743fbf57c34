"""Pack the recordings of the Free Spoken Digit Dataset into the npz that the demo reads.

The data set (https://github.com/Jakobovski/free-spoken-digit-dataset, CC BY-SA 4.0) is a folder of
files named {digit}_{speaker}_{take}.wav, 8 kHz, 16-bit, mono:

    git clone https://github.com/Jakobovski/free-spoken-digit-dataset
    python examples/pack_spoken_digits.py free-spoken-digit-dataset/recordings spoken_digits.npz
    quant-gru demo --data spoken_digits.npz

The recordings stand in the order of digit, then speaker name, then take (as a number). Keys:

    samples        int16 (S,)      all recordings end to end
    offsets        int64 (N + 1,)  recording i is samples[offsets[i]:offsets[i + 1]]
    label          uint8 (N,)      digit, 0..9
    speaker        uint8 (N,)      index into speaker_names
    take           int32 (N,)      repetition; takes 0..4 are the usual test set
    speaker_names  str (K,)        sorted
    sample_rate    int64 ()        samples per second
"""

from __future__ import annotations

import argparse
import re
import sys
import wave
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

NAME = re.compile(r"(?P<digit>[0-9])_(?P<speaker>[^_]+)_(?P<take>[0-9]{1,6})\.wav")


class PackError(ValueError):
    """A folder or recording that cannot be packed."""


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """Samples, int16 (S,), and sample rate of a 16-bit mono wav file."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, count, _, _ = file.getparams()
            data = file.readframes(count)
    except (wave.Error, EOFError, OSError) as error:
        raise PackError(f"Expected '{path}' to be a PCM wav file, got: {error}") from error
    if (channels, width) != (1, 2):
        raise PackError(
            f"Expected '{path}' to be mono with 16 bits per sample, "
            f"got {channels} channel(s) with {8 * width} bits"
        )
    samples = np.frombuffer(data, dtype="<i2").astype(np.int16)
    if len(samples) == 0 or len(samples) != count:
        raise PackError(f"Expected '{path}' to be {count or 'some'} samples, got {len(samples)}")
    return samples, rate


def pack(folder: Path) -> dict[str, Any]:
    """The arrays of the npz, by key, for all wav files of `folder`."""
    if not folder.is_dir():
        raise PackError(f"Expected the input to be a folder of recordings, got '{folder}'")
    found = []
    for path in folder.glob("*.wav"):
        match = NAME.fullmatch(path.name)
        if match is None:
            raise PackError(
                f"Expected names to be {{digit}}_{{speaker}}_{{take}}.wav, got '{path}'"
            )
        found.append((int(match["digit"]), match["speaker"], int(match["take"]), path))
    if not found:
        raise PackError(f"Expected '{folder}' to be a folder with wav files, got none")
    found.sort()
    for first, second in pairwise(found):
        if first[:3] == second[:3]:
            raise PackError(
                f"Expected each digit, speaker and take to be there once, "
                f"got '{first[3].name}' and '{second[3].name}'"
            )
    names = sorted({speaker for _, speaker, _, _ in found})
    if len(names) > 256:
        raise PackError(f"Expected at most 256 speakers, got {len(names)}")

    recordings, rate = [], 0
    for _, _, _, path in found:
        samples, this_rate = read_wav(path)
        if rate not in (0, this_rate):
            raise PackError(f"Expected '{path}' to be sampled at {rate} Hz, got {this_rate} Hz")
        rate = this_rate
        recordings.append(samples)
    return {
        "samples": np.concatenate(recordings),
        "offsets": np.cumsum([0, *map(len, recordings)], dtype=np.int64),
        "label": np.array([digit for digit, _, _, _ in found], dtype=np.uint8),
        "speaker": np.array([names.index(who) for _, who, _, _ in found], dtype=np.uint8),
        "take": np.array([take for _, _, take, _ in found], dtype=np.int32),
        "speaker_names": np.array(names),
        "sample_rate": np.array(rate, dtype=np.int64),
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line: folder in, npz out. Exit code 2 and one line if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="folder with {digit}_{speaker}_{take}.wav")
    parser.add_argument("output", type=Path, help="npz file to write")
    options = parser.parse_args(arguments)
    try:
        if options.output.suffix != ".npz":
            raise PackError(
                f"Expected the output to be a name ending in .npz, got '{options.output}'"
            )
        arrays = pack(options.folder)
        try:
            np.savez_compressed(options.output, **arrays)
        except OSError as error:
            reason = error.strerror or error
            raise PackError(
                f"Expected the output to be a file that can be written, "
                f"got '{options.output}' ({reason})"
            ) from error
    except PackError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    seconds = len(arrays["samples"]) / int(arrays["sample_rate"])
    print(
        f"{options.output}: {len(arrays['label'])} recordings, {seconds:.0f} s, "
        f"speakers {', '.join(arrays['speaker_names'])}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
