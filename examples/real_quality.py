"""PLCMOS, a published model that rates speech with lost packets as listeners do, in integers.

    python -m pip install --no-deps speechmos
    python examples/real_quality.py

PLCMOS (Diener et al., 2023; https://github.com/microsoft/PLC-Challenge) looks at a spectrum with
convolutions, reads it with two bidirectional GRUs of 32 units, and says a mean opinion score from
1 to 5. An input of random numbers stands for the listener; scores are means over several.
"""

from __future__ import annotations

import numpy as np
import torch
from onnx_network import OnnxNetwork
from real_common import RATE, Figures, Published, clips, main, package_file
from torch import Tensor, nn

FRAME, HOP = 512, 256  # samples
PACKET = RATE // 50  # samples
LISTENERS = 5
LOSSES = (0.0, 0.05, 0.1, 0.2)  # shares of the packets


class Quality(Published):
    """PLCMOS: convolutions and two bidirectional GRUs of 32 units."""

    name = "speechmos, PLCMOS: quality of speech"

    def __init__(self) -> None:
        self.model = OnnxNetwork(
            package_file("speechmos", "speechmos/plcmos_models/plcmos_v2.onnx")
        ).eval()
        self.listeners = torch.randn(LISTENERS, 64, generator=torch.Generator().manual_seed(0))
        self.calibration = [
            self.inputs(features(lost(clips(slice(0, 8), 2.0), share, seed=0)))
            for share in LOSSES[:3]
        ]
        self.test = [
            self.inputs(features(lost(clips(slice(8, 12), 2.0), share, seed=1))) for share in LOSSES
        ]
        with torch.no_grad():
            self.own = self.scores(self.model)

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, 1, T, 257), and a listener (N, 64) for each clip."""
        return x, self.listeners.repeat(len(x), 1)[: len(x)]

    def scores(self, model: nn.Module) -> Tensor:
        """The score of every test clip, a mean over listeners, (N,)."""
        found = [
            torch.stack([model(x, each.expand(len(x), -1)) for each in self.listeners]).mean(0)
            for x, _ in self.test
        ]
        return torch.cat(found)

    def figures(self, model: nn.Module) -> Figures:
        """The mean score, and how far scores are from those of the float model."""
        scores = self.scores(model)
        found = {"mean score": float(scores.mean())}
        if model is self.model:
            return found
        apart = (scores - self.own).abs()
        return found | {"mean error": float(apart.mean()), "largest error": float(apart.max())}


def lost(x: Tensor, share: float, seed: int) -> Tensor:
    """Clips (N, S) with a share of their packets set to zero."""
    generator = torch.Generator().manual_seed(seed)
    there = torch.rand(len(x), -(-x.shape[1] // PACKET), generator=generator) >= share
    return x * there.repeat_interleave(PACKET, 1)[:, : x.shape[1]]


def features(x: Tensor) -> Tensor:
    """Log powers (N, 1, T, 257) of clips (N, S); silence lies 120 dB below all else."""
    count = -(-(x.shape[1] + HOP) // HOP)
    x = torch.nn.functional.pad(x.double(), (HOP, FRAME))
    frames = x.unfold(1, FRAME, HOP)[:, :count] * torch.hamming_window(FRAME).double()
    power = torch.fft.rfft(frames).abs().square()
    least = torch.stack([each[each > 0].min() for each in power])[:, None, None]
    quiet = least.log() - 12 / np.log10(np.e)
    return (torch.where(power > 0, power.log(), quiet) / 20).float()[:, None]


if __name__ == "__main__":
    main(Quality)
