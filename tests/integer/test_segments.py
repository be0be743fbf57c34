"""Segments in 32 bits: every output is that of the table."""

import numpy as np
import pytest
import torch

from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.segments import segments_of
from quant_gru.integer.tables import build_table


def tables(function, bits, R, rounding):
    unit = 1 - bits[1] if function == "tanh" else -bits[1]
    for zero, stretch in ((0, 1.0), (-300, 1.0), (1234, 0.937)):
        pre = Quantizer(bits[0], True, float(np.float32(R * 2.0 ** (1 - bits[0]))), zero)
        out = Quantizer(bits[1], function == "tanh", float(np.float32(stretch * 2.0**unit)))
        yield pre, build_table(function, pre, out, rounding=rounding)


def are_equal(table, segments, first, last):
    codes = np.arange(first, last + 1)
    wanted = table(torch.from_numpy(codes)).numpy() - table.zero_point
    # what 32-bit integers compute of it
    i, t = (codes - segments.first) >> segments.u, (codes - segments.first) % (1 << segments.u)
    bend = segments.c2[i] * t
    rise = (segments.c1[i] + (bend >> segments.e)) * t
    sums = (segments.rests[i] << segments.s) + rise
    assert max(np.abs(each).max() for each in (bend, rise, sums)) < 1 << 31
    assert 0 <= segments.rests.min() <= segments.rests.max() < 1 << 16
    return np.array_equal(segments(codes), wanted)


@pytest.mark.parametrize("R", [0.3, 1.0, 2.0, 8.0, 40.0])
@pytest.mark.parametrize("bits", [(14, 8), (15, 16), (16, 12), (16, 16)])
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_every_output(function, bits, R):
    """R of 2 with 16 bits has slopes of 1/2, where every second output is a half."""
    rounding = "floor" if bits[0] == 15 else "half_even"
    for pre, table in tables(function, bits, R, rounding):
        for first, last in ((pre.lo, pre.hi), (int(table.bounds[0]), table.last)):
            segments = segments_of(table, first, last)
            assert segments is not None
            assert are_equal(table, segments, first, last)


def test_what_has_no_segments():
    pre, out = (Quantizer(bits, True, 2.0 ** (1 - bits)) for bits in (16, 30))
    assert segments_of(build_table("tanh", pre, out), pre.lo, pre.hi) is None
    spline = build_table("tanh", pre, Quantizer(16, True, 2.0**-15), "quadratic")
    assert segments_of(spline, pre.lo, pre.hi) is None
    listed = build_table("tanh", Quantizer(8, True, 2.0**-7), Quantizer(8, True, 2.0**-7))
    assert segments_of(listed, -128, 127) is None
