"""Log-mel front end: one row of features per 16 ms of samples. Formulas are in docs/demo.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quant_gru.demo.errors import DataError

WINDOW_SECONDS = 0.032
HOP_SECONDS = 0.016
# Above the residue of 16-bit rounding in a band (about 1e-7), so that digital silence and quiet
# rooms give similar features.
POWER_FLOOR = 1e-6
MIN_RATE, MAX_RATE = 4000, 192_000


def hertz_to_mel(frequency: Tensor) -> Tensor:
    """`2595 * log10(1 + f / 700)`, same shape (O'Shaughnessy, Speech Communication, 1987)."""
    return 2595.0 * torch.log10(1.0 + frequency / 700.0)


def mel_to_hertz(mel: Tensor) -> Tensor:
    """Return the inverse of `hertz_to_mel`, same shape."""
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


def mel_filters(n_mels: int, n_fft: int, sample_rate: int) -> Tensor:
    """Return triangles of height 1, evenly spaced in mel from 0 to half the sample rate.

    Returns:
        float32 (n_mels, n_fft // 2 + 1).
    """
    top = hertz_to_mel(torch.tensor(sample_rate / 2, dtype=torch.float64))
    steps = torch.arange(n_mels + 2, dtype=torch.float64) / (n_mels + 1)
    edges = mel_to_hertz(top * steps)
    bins = torch.arange(n_fft // 2 + 1, dtype=torch.float64) * (sample_rate / n_fft)
    left, centre, right = (edges[i : i + n_mels, None] for i in range(3))
    rising = (bins - left) / (centre - left)
    falling = (right - bins) / (right - centre)
    return torch.minimum(rising, falling).clamp(min=0.0).to(torch.float32)


@dataclass(frozen=True)
class LogMel:
    """`log(mel @ |STFT|^2 + 1e-6)`: Hann windows of 32 ms every 16 ms, no padding at the ends.

    Attributes:
        sample_rate: Samples per second, 4000..192000.
        n_mels: Features per step.
    """

    sample_rate: int
    n_mels: int = 32

    def __post_init__(self) -> None:
        if not MIN_RATE <= self.sample_rate <= MAX_RATE:
            raise DataError(
                f"Expected sample_rate to be in {MIN_RATE}..{MAX_RATE}, got {self.sample_rate}"
            )

    @property
    def window(self) -> int:
        """Samples of one window, which is the length of its Fourier transform."""
        return round(WINDOW_SECONDS * self.sample_rate)

    @property
    def hop(self) -> int:
        """Samples from one window to the next."""
        return round(HOP_SECONDS * self.sample_rate)

    @cached_property
    def _filters(self) -> Tensor:
        return mel_filters(self.n_mels, self.window, self.sample_rate)

    @cached_property
    def _hann(self) -> Tensor:
        return torch.hann_window(self.window)

    def __call__(self, samples: Tensor) -> Tensor:
        """Return the features of one recording.

        Args:
            samples: float32 (S,) in [-1, 1], at least one window long.

        Returns:
            float32 (1 + (S - window) // hop, n_mels).

        Raises:
            DataError: The recording is shorter than one window.
        """
        if len(samples) < self.window:
            raise DataError(
                f"Expected a recording to be at least {self.window} samples long "
                f"(one window at {self.sample_rate} Hz), got {len(samples)}"
            )
        spectrum = torch.stft(
            samples,
            n_fft=self.window,
            hop_length=self.hop,
            window=self._hann,
            center=False,
            return_complex=True,
        )
        power = spectrum.real.square() + spectrum.imag.square()
        return torch.log(self._filters @ power + POWER_FLOOR).T
