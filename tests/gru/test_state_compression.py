"""Fewer bits of the states kept for backward."""

import pytest
import torch
from gru_helpers import C, H, quantized, same, seeded, states

from quant_gru import ConfigError, QuantGRU
from quant_gru.autograd.state_compression import packed, unpacked
from quant_gru.integer.quantizer import Quantizer

T, N = 7, 3
QUANTIZERS = [
    Quantizer(8, True, 1.0, 3),
    Quantizer(8, False, 1.0, 100),
    Quantizer(16, True, 1.0, -5),
    Quantizer(16, False, 1.0, 0),
    Quantizer(5, True, 1.0, 0),
    Quantizer(4, False, 1.0, 2),
    Quantizer(32, True, 1.0, 0),
]


@pytest.mark.parametrize("q", QUANTIZERS, ids=lambda q: f"{q.bits}{'s' if q.signed else 'u'}")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("units", [1, 6, 7])
def test_codes_come_back_to_within_half_a_step(q, bits, units):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(q.lo, q.hi + 1, (T, N, units), generator=generator)
    codes[0, 0, 0], codes[-1, -1, -1] = q.lo, q.hi
    codes = codes.to(q.container)
    stash = packed(codes, q, bits)
    back = unpacked(stash, q, bits, units)
    assert back.dtype == codes.dtype
    step = 1 << max(q.bits - bits, 0)
    if step == 1:
        assert torch.equal(back, codes)
        return
    assert stash.dtype == torch.uint8
    assert stash.shape[-1] == (units if bits == 8 else -(-units // 2))
    off = (back.long() - codes.long()).abs()
    # at the upper end the nearest step is out of range
    assert (off <= torch.where(codes.long() > q.hi - step, step, step // 2)).all()


@pytest.mark.parametrize(("bits", "least", "most"), [(8, 1e-5, 0.03), (4, 1e-3, 0.5)])
def test_gradients_are_close(bits, least, most):
    gru = quantized("w8a16-fused", num_layers=2, bidirectional=True)
    found = []
    for gru.stash_bits in (None, bits):
        gru.zero_grad()
        gru(seeded(T, N, C), states(gru, N))[0].square().sum().backward()
        found.append([p.grad.clone() for p in gru.parameters()])
    for exact, lossy in zip(*found, strict=True):
        error = float((lossy - exact).norm() / exact.norm())
        assert error < most
    assert any(float((b - a).norm() / a.norm()) > least for a, b in zip(*found, strict=True))


def test_outputs_and_narrow_states_are_exact():
    gru = quantized("pot8")
    found = []
    for gru.stash_bits in (None, 8):
        gru.zero_grad()
        y, _ = gru(seeded(T, N, C))
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in gru.parameters())])
    same(*found)


@pytest.mark.parametrize("bits", [0, 3, 16, True, "8", 4.5, 8.0])
def test_refused(bits):
    with pytest.raises(ConfigError, match="4, 8 or None"):
        QuantGRU(C, H, stash_bits=bits)
