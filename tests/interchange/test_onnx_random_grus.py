"""Random GRUs in the integer profile: ONNX Runtime gives the codes of the plan.

QUANT_GRU_PLANS sets the number of GRUs of each of the 4 kinds, 2 if it is not set.
"""

from __future__ import annotations

import os

import pytest
import torch
from random_grus import random_codes, random_gru

from quant_gru import export_onnx

pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")

PLANS = int(os.environ.get("QUANT_GRU_PLANS", "2"))


@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "w16a16", "mixed"])
def test_random_plans(kind, tmp_path):
    """Widths 1..16; layers, directions, zoneout, fused operators and all kinds of tables."""
    for seed in range(PLANS):
        gru, rng = random_gru(seed, kind)
        x = gru._plan().cells[0][0].x
        T, N = rng.choice((1, 1, 2, 5)), rng.choice((1, 1, 3))
        sizes = (N, T) if gru.batch_first else (T, N)
        example = x.dequantize(random_codes(x, rng, *sizes, gru.shape.input_size))
        D, H = gru.shape.directions, gru.shape.hidden_size
        states = torch.randn(gru.shape.num_layers * D, N, H)
        given = example if rng.random() < 0.5 else (example, states)
        report = export_onnx(gru, tmp_path / "gru.onnx", given)
        # the example, and one of twice its rows and steps
        assert report["output"].values == 5 * T * N * D * H, seed
        assert report["h_n"].values == 3 * N * gru.shape.num_layers * D * H, seed
        assert all(not each.differing for each in report.values()), seed
