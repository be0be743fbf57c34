"""What tests of whole calls on a GPU share: the same GRU on both devices."""

import copy
import sys
from pathlib import Path

import torch

from quant_gru import QuantConfig, QuantGRU

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from bits import assert_same_bits


def pair(C, H, config="int8", **options):
    """The same GRU on the CPU and on the GPU."""
    torch.manual_seed(0)
    config = getattr(QuantConfig, config)() if isinstance(config, str) else config
    gru = QuantGRU(C, H, config=config, **options).eval()
    x = torch.randn(12, 8, C)
    gru.calibrate(x.transpose(0, 1) if gru.batch_first else x)
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru, copy.deepcopy(gru).cuda()


def of_random_ranges(C, H, config, seed, **options):
    """A GRU of two directions, whose tables may have to be read in different ways; on the CPU."""
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=config, bidirectional=True, **options).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        gru.weight_ih_l0_reverse.mul_(1 + torch.rand(()))
    gru.calibrate(torch.randn(12, 4, C) * (0.5 + 2 * torch.rand(())))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def equal(got, expected):
    """Asserts that tensors are the same, NaN included, wherever they are."""
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_bits(ours, theirs)
