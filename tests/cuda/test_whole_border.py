"""The ends of whole calls, on the host: rows longer than what a warp holds at once."""

import sys
from pathlib import Path

import pytest
import torch

from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.cuda.launch import PLAIN, Grid, Kernel
from quant_gru.kernels.cuda.structures import KINDS, GiveC, TakeC

sys.path.insert(0, str(Path(__file__).parent))
from host_machine import COMPILER, Host, folder_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Host(folder_of(tmp_path_factory))


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
    T, N, padded = 2, 3, -(-features // 16) * 16
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(T, N, features, generator=generator) * 3
    x[0, 1, features - 1], x[1, 2, 0] = torch.nan, -torch.inf
    planes = 1 if quantizer.bits == 8 else 2
    offset = 0 if quantizer.lo < 0 else 128
    bytes_ = torch.full((planes, T, N, padded), 99, dtype=torch.int8)
    nan = torch.full((N, 4), 9, dtype=torch.uint8)
    p = TakeC()
    p.to.bytes, p.to.nan, p.to.nan_stride = bytes_.data_ptr(), nan.data_ptr(), 4
    p.to.planes, p.to.padded, p.to.x_offset = planes, padded, offset
    p.to.T, p.to.N, p.to.features = T, N, features
    p.real, p.step, p.next = x.data_ptr(), N * features, features
    p.zero, p.scale, p.fours = quantizer.zero_point, quantizer.scale, fours
    p.lo = quantizer.lo - quantizer.zero_point
    p.hi = quantizer.hi - quantizer.zero_point
    host.launch(Kernel.of("border", "take", PLAIN), Grid((1, 1), 256), p)
    expected = torch.zeros(T, N, padded, dtype=torch.int64)
    expected[..., :features] = quantizer.quantize(x) - offset
    got = bytes_.to(torch.int64)
    assert torch.equal(got[0] if planes == 1 else 256 * got[0] + got[1] + 128, expected)
    assert torch.equal(nan[:, :T].t().bool(), x.isnan().any(-1))


@pytest.mark.parametrize("H", [4, 132, 645, 644])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_give(host, dtype, H):
    """Values of all steps and of the last, in both directions; NaN from its step on."""
    T, N, D = 3, 2, 2
    generator = torch.Generator().manual_seed(H)
    ends = torch.iinfo(dtype)
    out = torch.randint(ends.min, ends.max + 1, (D, T, N, H), generator=generator).to(dtype)
    last = torch.stack((out[0, -1], out[1, 0])).contiguous()
    nan = torch.zeros(N, 4, dtype=torch.uint8)
    nan[1, 1] = 1
    finite = torch.ones(1, dtype=torch.uint8)
    y, h_n = torch.empty(T, N, D * H), torch.empty(D, N, H)
    last_nan = torch.empty(D, N)
    p = GiveC()
    p.flags.nan, p.flags.T, p.flags.stride = nan.data_ptr(), T, 4
    for d in range(D):
        p.flags.finite[d] = finite.data_ptr()
        p.out[d], p.last[d] = out[d].data_ptr(), last[d].data_ptr()
        p.kind[d], p.zero[d], p.scale[d] = KINDS[dtype], 5 * d, 0.25 / (d + 1)
    p.values, p.last_values, p.last_nan = y.data_ptr(), h_n.data_ptr(), last_nan.data_ptr()
    p.N, p.H, p.directions = N, H, D
    rows = T * N * D + D * N
    host.launch(Kernel.of("border", "give", PLAIN), Grid((-(-rows // 8), 1), 256), p)
    for d in range(D):
        values = (out[d].float() - 5 * d) * (0.25 / (d + 1))
        values[slice(1, None) if d == 0 else slice(0, 2), 1] = torch.nan
        ours = y[..., d * H : (d + 1) * H]
        torch.testing.assert_close(ours, values, rtol=0, atol=0, equal_nan=True)
        theirs = values[-1 if d == 0 else 0]
        torch.testing.assert_close(h_n[d], theirs, rtol=0, atol=0, equal_nan=True)
    assert last_nan[:, 1].isnan().all()
    assert (last_nan[:, 0] == 0).all()
