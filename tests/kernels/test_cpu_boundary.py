"""Native codes and masks at the boundary of a layer against their definitions."""

import pytest
import torch

from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer.plan import Seam
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernels import _native, dispatch
from quant_gru.kernels.cpu import boundary

QUANTIZERS = [
    Quantizer(bits, signed, torch.tensor(scale).item(), zero)
    for bits, signed, scale, zero in [
        (8, True, 2.0**-5, 0),
        (8, False, 0.0123, 17),
        (4, True, 0.3, -8),
        (16, True, 2.0**-126, 5),
        (16, False, 3.1e-4, 65535),
        (1, True, 1.0, 0),
    ]
]


def values(quantizer: Quantizer, *shape: int) -> torch.Tensor:
    """Inside and far outside of the range, halfway between codes, and what is no number."""
    span = (quantizer.hi - quantizer.lo + 1) * quantizer.scale
    x = torch.randn(shape) * span
    halves = (torch.randint(quantizer.lo - 3, quantizer.hi + 4, shape) + 0.5) * quantizer.scale
    x = torch.where(torch.rand(shape) < 0.4, halves - quantizer.zero_point * quantizer.scale, x)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e38, -1e38])
    chosen = special[torch.randint(len(special), shape)]
    return torch.where(torch.rand(shape) < 0.02, chosen, x)


def layouts(x: torch.Tensor):
    yield x
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    yield torch.cat([x, x], dim=2)[..., : x.shape[2]]
    yield x[0]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_codes_of_real_values(quantizer):
    torch.manual_seed(0)
    for x in layouts(values(quantizer, 5, 7, 37)):
        codes, nan = boundary.quantize(quantizer, x)
        assert codes.dtype == quantizer.container
        assert torch.equal(codes.long(), quantizer.quantize(x))
        assert torch.equal(nan, x.isnan().any(-1))


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_mask_of_real_values(quantizer):
    torch.manual_seed(1)
    for x in layouts(values(quantizer, 5, 7, 37)):
        grad = torch.randn(x.shape)
        grad[..., 3] = torch.nan
        expected = grad * quantizer.inside(x)
        boundary.mask(quantizer, x, grad)
        assert torch.equal(grad.nan_to_num(9), expected.nan_to_num(9))


def sums(below, above):
    """Multipliers that reach beyond the range of the layer above, with ties."""
    for M, k in ((1 << 23, 23), (3 << 22, 23), (0xABCDEF, 24), (1 << 23, 24), (0x9ABCDE, 20)):
        yield WeightedSum((M,), k, above.zero_point, above.lo, above.hi, "c"), below


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("above", QUANTIZERS, ids=str)
def test_codes_and_mask_of_the_layer_below(directions, above):
    torch.manual_seed(2)
    for below in QUANTIZERS:
        codes = [
            torch.randint(below.lo, below.hi + 1, (4, 3, 9)).to(below.container)
            for _ in range(directions)
        ]
        for each, q in sums(below, above):
            seam = Seam([each] * directions, [q] * directions, above)
            unclamped = seam.unclamped(codes)
            expected = unclamped.clamp(above.lo, above.hi)
            found = boundary.requantize(seam, codes)
            assert found.dtype == above.container
            assert torch.equal(found.long(), expected)
            grad = torch.randn(expected.shape)
            masked = grad * (unclamped == expected)
            boundary.mask_requantized(seam, codes, grad)
            assert torch.equal(grad, masked)


def test_other_dtypes_and_widths_take_the_definition():
    wide = Quantizer(24, True, 2.0**-20)
    x = torch.randn(3, 2, 4)
    assert not boundary.takes(wide, x)
    for each in (x.double(), x.half()):
        assert not boundary.takes(QUANTIZERS[0], each)
        codes, _ = dispatch.CPU().quantize(QUANTIZERS[0], each)
        assert torch.equal(codes.long(), QUANTIZERS[0].quantize(each))


def test_gradients_are_those_of_the_reference(monkeypatch):
    """Two layers, both directions, values beyond the range: masks in and between layers."""
    torch.manual_seed(3)
    gru = QuantGRU(6, 9, 2, bidirectional=True, config=QuantConfig.int8()).train()
    gru.calibrate(torch.randn(8, 4, 6))
    gru.finalize_calibration()
    gru.use_quantization = True
    x = (3 * torch.randn(7, 5, 6)).requires_grad_()
    found = torch.autograd.grad(gru(x)[0].square().sum(), [x, *gru.parameters()])
    monkeypatch.setattr(_native.CPUBackward, "run", lambda *_: None)
    layered = torch.autograd.grad(gru(x)[0].square().sum(), [x, *gru.parameters()])
    monkeypatch.setattr(dispatch.cpu_boundary, "takes", lambda *_: False)
    monkeypatch.setattr(dispatch.cpu_boundary, "requantizes", lambda *_: False)
    expected = torch.autograd.grad(gru(x)[0].square().sum(), [x, *gru.parameters()])
    for a, b, c in zip(found, layered, expected, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)
