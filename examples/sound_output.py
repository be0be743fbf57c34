"""Spectrograms as one SVG, and sound files, with the standard library alone."""

from __future__ import annotations

import base64
import struct
import wave
import zlib
from pathlib import Path

import torch
from torch import Tensor

WIDTH, HEIGHT, LEFT, TOP = 753, 258, 50, 24  # two pixels for each of 129 bins
FLOOR = -60.0  # dB below the loudest point
# Black, purple, red, orange, white: lightness rises evenly.
COLOURS = torch.tensor([[0, 0, 4], [81, 18, 124], [183, 55, 121], [252, 137, 97], [252, 253, 191]])


def write_spectrograms(path: Path, panels: dict[str, Tensor], rate: int) -> None:
    """Draw the panels below each other, in the same colours.

    Args:
        path: The SVG to write.
        panels: By title, samples (S,), all of one length.
        rate: Samples per second.
    """
    powers = {title: _decibel(samples) for title, samples in panels.items()}
    loudest = max(float(power.max()) for power in powers.values())
    (samples, *_) = panels.values()
    seconds, y = len(samples) / rate, TOP
    parts = []
    for title, power in powers.items():
        codes = ((power - loudest) / -FLOOR + 1).clamp(0, 1).mul(255).byte().flip(0)
        image = base64.b64encode(_png(codes)).decode()
        parts.append(
            f'<text x="{LEFT}" y="{y - 6}" font-weight="bold">{title}</text>'
            f'<image x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" '
            f'preserveAspectRatio="none" href="data:image/png;base64,{image}"/>'
            f'<text x="{LEFT - 4}" y="{y + 9}" text-anchor="end">{rate / 2000:g} kHz</text>'
            f'<text x="{LEFT - 4}" y="{y + HEIGHT}" text-anchor="end">0</text>'
        )
        y += HEIGHT + TOP
    for mark in range(int(2 * seconds) + 1):
        x = LEFT + WIDTH * mark / 2 / seconds
        parts.append(f'<text x="{x:.0f}" y="{y - 8}" text-anchor="middle">{mark / 2:g} s</text>')
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{y}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n',
        encoding="utf-8",
    )


def write_wav(path: Path, samples: Tensor, rate: int) -> None:
    """Write samples (S,) in [-1, 1] with 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples.clamp(-1, 1) * 32767).short().numpy().tobytes())


def _decibel(samples: Tensor) -> Tensor:
    """Power (bins, frames) of Hann windows of 256 samples, in dB."""
    spectrum = torch.stft(samples, 256, 64, window=torch.hann_window(256), return_complex=True)
    return 20 * torch.log10(spectrum.abs() + 1e-6)


def _png(codes: Tensor) -> bytes:
    """A PNG of uint8 codes (height, width) with a palette."""
    height, width = codes.shape
    place = torch.linspace(0, len(COLOURS) - 1.001, 256)
    below, part = place.long(), place.frac()[:, None]
    palette = torch.lerp(COLOURS[below].float(), COLOURS[below + 1].float(), part).byte()
    rows = torch.nn.functional.pad(codes, (1, 0))  # each row begins with its filter, 0: none
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),
        b"PLTE": palette.numpy().tobytes(),
        b"IDAT": zlib.compress(rows.contiguous().numpy().tobytes(), 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )
