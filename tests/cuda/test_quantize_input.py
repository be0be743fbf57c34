"""The input of whole calls, on the host: rows longer than what a warp holds at once."""

import ctypes

import pytest
import torch
from host_machine import COMPILER

from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernels import _native
from quant_gru.kernels._native import PLAIN
from quant_gru.kernels.cpu.plan_packing import pack_quantizer

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
DivisionC = structure(
    "DivisionC",
    **dict.fromkeys("scale inverse least most".split(), _FLOAT),
    exact=ctypes.c_int32,
)
TargetC = structure(
    "TargetC",
    **dict.fromkeys("codes bytes nan".split(), _POINTER),
    **dict.fromkeys("kind planes padded x_offset T N features nan_stride".split(), _INT),
    counts=_POINTER,
    stretches=_INT,
)
QuantizeInputC = structure(
    "QuantizeInputC",
    to=TargetC,
    real=_POINTER,
    **dict.fromkeys("step next zero".split(), _INT),
    **dict.fromkeys("scale lo hi".split(), _FLOAT),
    division=DivisionC,
    fours=ctypes.c_int32,
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.mark.parametrize("fours", [False, True], ids=["one by one", "in fours"])
@pytest.mark.parametrize("features", [4, 132, 644])
@pytest.mark.parametrize(
    "quantizer",
    [
        Quantizer(8, True, 2.0**-5, 3),
        Quantizer(8, False, float(torch.tensor(0.03)), 200),
        Quantizer(16, True, float(torch.tensor(1e-4)), -7),
    ],
    ids=["signed", "unsigned", "16 bits"],
)
def test_take(host, quantizer, features, fours):
    """Codes as planes of bytes, padding that is their zero, rows with NaN."""
    T, N, padded = 3, 3, -(-features // 16) * 16
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(T, N, features, generator=generator) * 3
    x[0, 1, features - 1], x[1, 2, 0] = torch.nan, -torch.inf
    x[1, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    planes = 1 if quantizer.bits == 8 else 2
    offset = 0 if quantizer.lo < 0 else 128
    bytes_ = torch.full((planes, T, N, padded), 99, dtype=torch.int8)
    nan = torch.full((N, 4), 9, dtype=torch.uint8)
    p = QuantizeInputC()
    p.to.bytes, p.to.nan, p.to.nan_stride = bytes_.data_ptr(), nan.data_ptr(), 4
    p.to.planes, p.to.padded, p.to.x_offset = planes, padded, offset
    p.to.T, p.to.N, p.to.features = T, N, features
    p.real, p.step, p.next = x.data_ptr(), N * features, features
    p.zero, p.scale, p.fours = quantizer.zero_point, quantizer.scale, fours
    p.lo = quantizer.lo - quantizer.zero_point
    p.hi = quantizer.hi - quantizer.zero_point
    made = _native.division_of(pack_quantizer(quantizer))
    ctypes.memmove(ctypes.addressof(p.division), made, len(made))
    host.launch(Kernel.of("boundary/quantize_input", "quantize_input", PLAIN), Grid((1, 1), 256), p)
    expected = torch.zeros(T, N, padded, dtype=torch.int64)
    expected[..., :features] = quantizer.quantize(x) - offset
    got = bytes_.to(torch.int64)
    assert torch.equal(got[0] if planes == 1 else 256 * got[0] + got[1] + 128, expected)
    assert torch.equal(nan[:, :T].t().bool(), x.isnan().any(-1))
