"""The quantizer against Python's exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant_gru import QuantGRUError
from quant_gru.integer.quantizer import FARTHEST, Quantizer, code_limits, container_dtype

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@st.composite
def quantizers(draw, most_bits=32):
    n, signed = draw(st.integers(1, most_bits)), draw(st.booleans())
    lo, hi = code_limits(n, signed)
    scale = draw(st.floats(2.0**-40, 2.0**40, width=32))
    if n > 20 or draw(st.booleans()):
        return Quantizer(n, signed, scale, draw(st.integers(lo, hi)))
    zero_point = draw(st.integers(hi - FARTHEST, lo + FARTHEST))
    return Quantizer(n, signed, scale, zero_point, far=True)


@given(quantizers(), st.lists(finite32, min_size=1, max_size=20))
def test_equals_the_formula_in_exact_arithmetic(q, values):
    with np.errstate(over="ignore", under="ignore"):
        quotients = np.array(values, np.float32) / np.float32(q.scale)
    expected = []
    for y in quotients.tolist():
        rounded = y if math.isinf(y) else round(Fraction(y))
        expected.append(int(min(max(rounded, q.lo - q.zero_point), q.hi - q.zero_point)))
    codes = q.quantize(torch.tensor(values))
    assert codes.dtype == torch.int64
    assert codes.tolist() == [e + q.zero_point for e in expected]


@given(quantizers(), st.lists(finite32, min_size=1, max_size=20))
def test_mask_marks_what_was_not_clamped(q, values):
    x = torch.tensor(values)
    inside = q.inside(x)
    y = torch.round(x / torch.tensor(q.scale)).to(torch.float64) + q.zero_point
    assert inside.tolist() == [(q.lo <= v <= q.hi) for v in y.tolist()]


@given(quantizers(most_bits=24), st.data())
def test_codes_survive_dequantize_and_quantize(q, data):
    codes = torch.tensor(data.draw(st.lists(st.integers(q.lo, q.hi), min_size=1)))
    assert torch.equal(q.quantize(q.dequantize(codes)), codes) or q.bits > 22


def test_ties_go_to_even():
    q = Quantizer(8, True, 1.0)
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, -128.5, -129.5])
    assert q.quantize(x).tolist() == [0, 2, 2, 0, -2, -2, 126, 127, -128, -128]


@pytest.mark.parametrize("zero_point", [-128, 127, 3])
def test_special_values(zero_point):
    q = Quantizer(8, True, 0.25, zero_point)
    inf = math.inf
    codes = q.quantize(torch.tensor([inf, -inf, math.nan, 3e38, -3e38, 1e-45]))
    assert codes.tolist() == [127, -128, zero_point, 127, -128, zero_point]


def test_other_dtypes_go_through_float32():
    q = Quantizer(16, True, 1.0)
    # 0.5 + 2^-30 is a float64 number above the tie, and 0.5 in float32
    assert q.quantize(torch.tensor([0.5 + 2.0**-30], dtype=torch.float64)).tolist() == [0]
    assert q.quantize(torch.tensor([1.5], dtype=torch.bfloat16)).tolist() == [2]


@pytest.mark.parametrize(
    ("lo", "hi", "dtype"),
    [
        (-128, 127, torch.int8),
        (0, 255, torch.uint8),
        (0, 256, torch.int16),
        (0, 65535, torch.int32),
        (-(2**31), 2**31 - 1, torch.int32),
        (0, 2**32 - 1, torch.int64),
        (0, 127, torch.int8),
    ],
)
def test_smallest_container(lo, hi, dtype):
    assert container_dtype(lo, hi) == dtype


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ((0, True, 1.0), "bits"),
        ((33, True, 1.0), "bits"),
        ((8, True, 0.0), "scale"),
        ((8, True, -1.0), "scale"),
        ((8, True, math.nan), "scale"),
        ((8, True, 2.0**-127), "scale"),
        ((8, True, 0.1), "float32"),
        ((8, True, 1.0, 128), "zero_point"),
        ((8, False, 1.0, -1), "zero_point"),
    ],
)
def test_bad_fields_are_named(fields, word):
    with pytest.raises(QuantGRUError, match=word):
        Quantizer(*fields)
