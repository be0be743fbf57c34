"""What tests of whole calls on a GPU share: the same GRU on both devices."""

import copy

import torch

from quant_gru import QuantConfig, QuantGRU


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


def equal(got, expected):
    """Asserts that tensors are the same, NaN included, wherever they are."""
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=0, equal_nan=True)
