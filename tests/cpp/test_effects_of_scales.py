"""Scales whose effect on the states is least: those of the C++ library are Python's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from c_access import Access
from cpp_build import NEEDS_TOOLS
from random_calibrations import Batch, Calibration, calibration

from quant_gru import QuantConfig, QuantGRU
from quant_gru.calibration.windows import _LEAST, _VALUES
from quant_gru.config.schema import ScaleKind

pytestmark = NEEDS_TOOLS


def made_by_cpp(access: Access, case: Calibration) -> dict[str, Any]:
    """The parameter document of the C++ library."""
    found: dict[str, Any] = json.loads(access.calibrated(case))
    return found


def document(case: Calibration) -> dict[str, Any]:
    """The parameter document of Python."""
    return case.gru._state.document()


def heavy_gru(*sizes: int, config: QuantConfig) -> QuantGRU:
    """A GRU of two directions, with rows of weights that are 256 times larger."""
    torch.manual_seed(sum(sizes))
    gru = QuantGRU(*sizes, bidirectional=True, config=config)
    with torch.no_grad():
        for name, weight in gru.named_parameters():
            if name.startswith("weight"):
                weight[1] *= 256
                weight[8] *= 256
    return gru


def random_batch(T: int, lengths: list[int], C: int, states: tuple[int, int] | None) -> Batch:
    """A batch, with states (cells, H) if they are given."""
    torch.manual_seed(T)
    h0 = None if states is None else torch.rand(states[0], len(lengths), states[1]) - 0.5
    return torch.randn(T, len(lengths), C), h0, torch.tensor(lengths)


def test_more_windows_than_are_kept(access: Access) -> None:
    """Batches come in any order, with sequences of several windows."""
    C, H = 3, 128
    batches = [
        random_batch(96, [96, 96, 65, 64, 33, 32, 31, 1], C, (2, H)),
        random_batch(130, [130, 128, 97, 65, 40], C, None),
        random_batch(64, [64, 64, 50, 50, 33, 7], C, (2, H)),
    ]
    for x, _, _ in batches:
        x[32:64, :3] = 0  # the same window from several states
    kept = max(_LEAST, _VALUES // H)
    assert sum(int(lengths.sum()) for _, _, lengths in batches if lengths is not None) > kept
    config = QuantConfig.int8().replace_globals(scale_kind="free")
    gru = heavy_gru(C, H, config=config)
    case = calibration(gru, "histogram", batches)
    expected = document(case)
    assert made_by_cpp(access, case) == expected
    assert made_by_cpp(access, Calibration(gru, "histogram", batches[::-1])) == expected


@pytest.mark.parametrize("scale_kind", ["pot", "free"])
@pytest.mark.parametrize("preset", ["int8", "int8_wide", "int16"])
def test_rows_of_large_weights(access: Access, preset: str, scale_kind: ScaleKind) -> None:
    config = getattr(QuantConfig, preset)().replace_globals(scale_kind=scale_kind)
    batches = [random_batch(70, [70, 64, 33], 4, (4, 6)), random_batch(40, [40, 9], 4, None)]
    case = calibration(heavy_gru(4, 6, 2, config=config), "histogram", batches)
    assert made_by_cpp(access, case) == document(case)


def test_effects_matter(access: Access) -> None:
    """Without windows, the scales of these weights are others."""
    config = QuantConfig.int8()
    batch = random_batch(70, [70, 64, 33], 4, None)
    case = calibration(heavy_gru(4, 6, 2, config=config), "histogram", [batch])
    plain = heavy_gru(4, 6, 2, config=config)
    x, _, lengths = batch
    assert lengths is not None
    plain.calibrate(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))
    collector = plain._state._collector
    assert collector is not None
    collector.windows = None
    plain.finalize_calibration()
    assert document(case) != plain._state.document()
    assert made_by_cpp(access, case) == document(case)
