"""The mean error of quantized weights in the bias: its value, bit for bit, and when it is exact."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_weights import example_qparams

from quant_gru import QuantConfig
from quant_gru.integer.bias_correction import LARGEST_FLOAT, InputMean, corrected
from quant_gru.integer.plan import build_weights
from quant_gru.integer.qparams import corrected_bias, float32


def by_fractions(b, w, codes, scale, mean, bits):
    """The corrected bias of one row in exact numbers, as docs/arithmetic.md has it."""
    terms = (len(mean) - 1).bit_length()
    resolution = 50 - bits - terms
    exponent = math.frexp(max(map(abs, mean)))[1]
    row = math.frexp(scale)[1]
    limit = 2 ** (51 - terms)
    total = 0
    for value, code, m in zip(w, codes, mean, strict=True):
        error = value - float(scale * code)  # one rounding each, in float64
        term = Fraction(math.ldexp(error, -row) * math.ldexp(m, resolution - exponent))
        total += max(-limit, min(limit, round(term)))
    shifted = b + math.ldexp(total, row + exponent - resolution)
    return float32(max(-LARGEST_FLOAT, min(LARGEST_FLOAT, shifted)))


numbers = st.floats(-(2.0**60), 2.0**60, width=32)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 40).flatmap(
        lambda n: st.tuples(
            st.lists(numbers, min_size=n, max_size=n),
            st.lists(st.integers(-(2**31), 2**31 - 1), min_size=n, max_size=n),
            st.lists(numbers, min_size=n, max_size=n),
        )
    ),
    b=numbers,
    scale=st.floats(2.0**-126, 2.0**127, width=32),
    bits=st.integers(1, 32),
)
def test_every_bit(rows, b, scale, bits):
    """Whatever the codes are, those of scales set by hand included."""
    w, codes, mean = rows
    found = corrected(
        torch.tensor([b] * 3),
        torch.tensor([w] * 3),
        torch.tensor([codes] * 3),
        torch.tensor([scale] * 3),
        InputMean(tuple(mean)),
        bits,
    )
    assert found.tolist() == [by_fractions(b, w, codes, scale, mean, bits)] * 3


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("kind", ["pot", "free"])
@pytest.mark.parametrize("C", [1, 7, 500])
def test_the_mean_output_is_that_of_the_float_weights(bits, kind, C):
    config = QuantConfig.int16().replace("W", bitwidth=bits).replace_globals(scale_kind=kind)
    generator = torch.Generator().manual_seed(bits)
    W, R = torch.randn((12, C), generator=generator), torch.randn((12, 4), generator=generator)
    bw = torch.randn(12, generator=generator)
    mean = 100 + torch.randn(C, generator=generator)
    qparams = replace(example_qparams(config), input_mean=InputMean(tuple(mean.tolist())))
    part = build_weights(qparams, W, R, bw, None)
    exact = W.double() @ mean.double() + bw
    codes = torch.cat((part.W[4:8], part.W[:4], part.W[8:])).double()
    scales = part.scales["weight.W"].double()
    scales = torch.cat((scales[4:8], scales[:4], scales[8:]))
    ours = scales * (codes @ mean.double()) + corrected_bias(qparams, W, bw)
    # the bias is a float32 number
    largest = float(corrected_bias(qparams, W, bw).abs().max())
    assert torch.allclose(ours, exact, rtol=0, atol=largest * 2.0**-24 + 1e-7 * C)


def test_the_order_of_features_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    W, mean = torch.randn((6, 300), generator=generator), torch.randn(300, generator=generator)
    codes, scales = (W * 32).round().clamp(-128, 127).long(), torch.full((6,), 2.0**-5)
    order = torch.randperm(300, generator=generator)
    b = torch.randn(6, generator=generator)
    first = corrected(b, W, codes, scales, InputMean(tuple(mean.tolist())), 8)
    other = InputMean(tuple(mean[order].tolist()))
    assert torch.equal(first, corrected(b, W[:, order], codes[:, order], scales, other, 8))


def test_nothing_changes_without_a_mean_or_with_zeros():
    W, R, bw = torch.randn(6, 3), torch.randn(6, 2), torch.randn(6)
    qparams = example_qparams()
    plain = build_weights(qparams, W, R, bw, None)
    zeros = replace(qparams, input_mean=InputMean((0.0, 0.0, -0.0)))
    same = build_weights(zeros, W, R, bw, None)
    assert torch.equal(same.bw, plain.bw)
    assert torch.equal(same.Bw, plain.Bw)


def test_a_gru_without_bias_and_with_nan():
    qparams = replace(example_qparams(), input_mean=InputMean((50.0, 60.0, 70.0)))
    W, R = torch.randn(6, 3), torch.randn(6, 2)
    without = build_weights(qparams, W, R, None, None)
    zeros = build_weights(qparams, W, R, torch.zeros(6), torch.zeros(6))
    assert without.Bw.any()
    assert torch.equal(without.Bw, zeros.Bw)
    W[1, 1] = torch.nan
    part = build_weights(qparams, W, R, torch.full((6,), torch.inf), None)
    assert not part.finite
    assert torch.equal(part.Bw, build_weights(qparams, W.nan_to_num(0), R, None, None).Bw)


def test_pinned_scales_keep_their_meaning():
    """The correction follows the codes of scales set by hand, even if most weights are clipped."""
    W, R, mean = torch.randn(6, 3), torch.randn(6, 2), (3.0, -5.0, 2.0)
    pinned = {"weight.W": (2.0**-9,), "weight.bw": (2.0**-3,)}
    config = QuantConfig.int8()
    for name in ("W", "bw"):
        config = config.replace(name, granularity="tensor")
    qparams = replace(example_qparams(config), input_mean=InputMean(mean), pinned=pinned)
    part = build_weights(qparams, W, R, None, None)
    codes = (W * 512).round().clamp(-128, 127)
    wanted = (W.double() - codes.double() / 512) @ torch.tensor(mean).double()
    wanted = (wanted.float() * 8).round().clamp(-128, 127)
    assert torch.equal(part.bw.float(), torch.cat((wanted[2:4], wanted[:2], wanted[4:])))
