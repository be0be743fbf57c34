"""Tables of sigmoid and tanh against their float64 yardstick."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_gru.integer.qparams import fixed_range_quantizer, float32
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import FUNCTIONS, build_table, float_table

OUT = {"sigmoid": "gate.z_out", "tanh": "gate.g_out"}


def out_quantizer(function, bits, signed=None, symmetric=True, scale_kind="pot"):
    signed = function == "tanh" if signed is None else signed
    return fixed_range_quantizer(
        OUT[function], bits, signed=signed, symmetric=symmetric, scale_kind=scale_kind
    )


def all_codes(q):
    return np.arange(q.lo, q.hi + 1)


def evaluate(table, codes):
    return table(torch.from_numpy(codes)).numpy()


@pytest.mark.parametrize("zero_point", [0, -32768, 32767, 4321])
@pytest.mark.parametrize("reach", [4.0, 5.3, 8.0, 16.0, 64.0, 256.0])
@pytest.mark.parametrize("scale_kind", ["pot", "free"])
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_16_bit_tables_are_within_one_code_everywhere(function, scale_kind, reach, zero_point):
    scale = reach / 2.0**15 if scale_kind == "pot" else float32(reach / 32767)
    pre = Quantizer(16, True, float32(scale), zero_point)
    out = out_quantizer(function, 16, scale_kind=scale_kind)
    table = build_table(function, pre, out)
    codes = all_codes(pre)
    off = np.abs(evaluate(table, codes) - float_table(function, pre, out, codes))
    assert off.max() <= 1
    assert len(table.bounds) <= 256


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("out_bits", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_narrow_inputs_have_the_float64_table_itself(function, bits, out_bits):
    pre = Quantizer(bits, True, 2.0**-3, (1 << (bits - 1)) - 1)
    out = out_quantizer(function, out_bits)
    codes = all_codes(pre)
    table = build_table(function, pre, out)
    assert np.array_equal(evaluate(table, codes), float_table(function, pre, out, codes))


@pytest.mark.parametrize("bits", [13, 20, 24])
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_wide_inputs_are_close_in_real_terms(function, bits):
    pre = Quantizer(bits, True, 8 / 2.0 ** (bits - 1))
    out = out_quantizer(function, bits)
    codes = np.random.default_rng(0).integers(pre.lo, pre.hi + 1, 50_000)
    off = np.abs(
        evaluate(build_table(function, pre, out), codes) - float_table(function, pre, out, codes)
    )
    assert off.max() * out.scale <= max(1.01 * out.scale, 4e-6)


@pytest.mark.parametrize(
    ("function", "activation", "segments", "limit"),
    [
        ("sigmoid", "pwl", 16, 2.0e-3),
        ("tanh", "pwl", 16, 4.0e-3),
        ("sigmoid", "quadratic", 8, 1.2e-3),
        ("tanh", "quadratic", 8, 3.2e-3),
        ("sigmoid", "pwl", 64, 1.5e-4),
        ("tanh", "quadratic", 32, 1.0e-4),
    ],
)
def test_few_segments_fit_well(function, activation, segments, limit):
    pre = Quantizer(16, True, 2.0**-12)
    out = out_quantizer(function, 16)
    table = build_table(function, pre, out, activation, segments)
    codes = all_codes(pre)
    real = FUNCTIONS[function](pre.scale * codes)
    assert len(table.bounds) <= segments
    assert np.abs(out.scale * evaluate(table, codes) - real).max() <= limit


@pytest.mark.parametrize("activation", ["pwl", "quadratic"])
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_segments_join(function, activation):
    """Each segment ends exactly where the next begins, in the integers."""
    pre = Quantizer(12, True, 2.0**-8, 100)
    table = build_table(function, pre, out_quantizer(function, 12), activation)
    bounds, rows = table.bounds.tolist(), table.coefficients.tolist()
    assert len(rows[0]) == (2 if activation == "pwl" else 3)
    for start, end, row, following in zip(bounds, bounds[1:], rows, rows[1:], strict=False):
        T = end - start
        assert sum(c * T**p for p, c in enumerate(row)) == following[0]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("activation", ["pwl", "quadratic"])
def test_fewer_codes_than_segments(activation, bits):
    pre = Quantizer(bits, True, 1.0)
    out = out_quantizer("tanh", 8)
    codes = all_codes(pre)
    table = build_table("tanh", pre, out, activation, 16)
    off = np.abs(evaluate(table, codes) - float_table("tanh", pre, out, codes))
    assert off.max() <= 1


@settings(max_examples=60)
@given(
    st.sampled_from(["sigmoid", "tanh"]),
    st.integers(1, 24),
    st.integers(1, 24),
    st.sampled_from(["exact", "pwl", "quadratic"]),
    st.floats(2.0**-30, 4.0, width=32),
    st.booleans(),
    st.data(),
)
def test_evaluation_is_the_formula_in_exact_arithmetic(
    function, bits, out_bits, activation, scale, symmetric, data
):
    signed = data.draw(st.booleans())
    pre = Quantizer(bits, signed, scale)
    pre = Quantizer(bits, signed, scale, data.draw(st.integers(pre.lo, pre.hi)))
    out = out_quantizer(function, out_bits, data.draw(st.booleans()), symmetric)
    table = build_table(function, pre, out, activation)
    codes = data.draw(st.lists(st.integers(pre.lo, pre.hi), min_size=1, max_size=20))
    bounds, rows = table.bounds.tolist(), table.coefficients.tolist()
    for q, got in zip(codes, table(torch.tensor(codes)).tolist(), strict=True):
        clamped = min(max(q, bounds[0]), table.last)
        segment = max(i for i, start in enumerate(bounds) if start <= clamped)
        if table.segment_shift is not None:
            assert segment == (clamped - bounds[0]) >> table.segment_shift
        t = clamped - bounds[segment]
        total = sum(c * t**p for p, c in enumerate(rows[segment]))
        assert abs(total) < 1 << 62
        y = round(Fraction(total, 1 << table.shift)) + table.zero_point
        assert got == min(max(y, table.lo), table.hi)
        assert out.lo <= got <= out.hi


@pytest.mark.parametrize(
    ("name", "bits", "signed", "symmetric", "kind", "scale", "zero_point"),
    [
        ("gate.z_out", 8, False, True, "pot", 2.0**-8, 0),
        ("gate.z_out", 8, False, False, "pot", 2.0**-8, 0),
        ("gate.z_out", 8, False, False, "free", float32(1 / 255), 0),
        ("gate.r_out", 8, True, True, "pot", 2.0**-7, 0),
        ("gate.r_out", 8, True, True, "free", float32(1 / 127), 0),
        ("gate.r_out", 8, True, False, "pot", 2.0**-8, -128),
        ("gate.g_out", 8, True, False, "pot", 2.0**-7, 0),
        ("gate.g_out", 16, True, True, "free", float32(1 / 32767), 0),
        ("gate.g_out", 8, False, False, "pot", 2.0**-7, 128),
        ("gate.g_out", 1, True, True, "free", 1.0, 0),
        ("gate.z_out", 32, False, True, "pot", 2.0**-32, 0),
    ],
)
def test_fixed_ranges(name, bits, signed, symmetric, kind, scale, zero_point):
    q = fixed_range_quantizer(name, bits, signed=signed, symmetric=symmetric, scale_kind=kind)
    assert (q.scale, q.zero_point) == (scale, zero_point)


def test_a_gate_reaches_zero_and_one():
    pre = Quantizer(8, True, 0.25)
    for kind, top in (("pot", 255), ("free", 255)):
        out = out_quantizer("sigmoid", 8, scale_kind=kind)
        y = evaluate(build_table("sigmoid", pre, out), all_codes(pre))
        assert (y.min(), y.max()) == (0, top)
