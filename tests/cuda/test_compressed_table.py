"""Compressed tables: every output code, and which tables cannot be compressed."""

import pytest
import torch

from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import build_table
from quant_gru.kernels.cuda.gates.compressed_table import (
    CODES,
    compress,
    extrapolated,
    most_segments,
)


def read(found, entries):
    """As compressed_table.cuh reads them."""
    code = torch.arange(entries)
    base, word = (found[code // CODES, i].to(torch.int64) for i in range(2))
    slope, bits = word >> 16 & 0xFFFF, word & 0xFFFF
    at = code % CODES
    return ((base + slope * at) >> 10) + (bits >> at & 1)


@pytest.mark.parametrize("reach", [1, 4, 8, 16, 32])
@pytest.mark.parametrize(("bits", "zero"), [(16, 0), (16, -2747), (13, 100)])
@pytest.mark.parametrize("activation", ["exact", "pwl", "quadratic"])
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_every_entry(function, activation, bits, zero, reach):
    pre = Quantizer(bits, True, reach * 2.0 ** (1 - bits), zero)
    tanh = function == "tanh"
    out = Quantizer(16, tanh, 2.0 ** (-15 if tanh else -16), 0)
    table = build_table(function, pre, out, activation)
    outputs = table(torch.arange(pre.lo, pre.hi + 1))
    found = compress(outputs)
    if found is None:
        assert bits == 13 or activation != "exact", "codes of 16 bits bend too little for that"
        return
    assert found.shape == (len(outputs) // CODES, 2)
    assert torch.equal(read(found, len(outputs)), outputs)


def test_steps_beyond_a_bit_are_no_lines():
    outputs = torch.arange(64)
    assert compress(outputs) is not None
    outputs[20:] += 3
    assert compress(outputs) is None
    assert compress(-torch.arange(64)) is None


@pytest.mark.parametrize("before", range(1, CODES))
def test_what_nobody_reads_bends_no_line(before):
    """Tables begin and end within a line, where they may be steep."""
    pre, out = Quantizer(16, True, 2.0**-14, 278), Quantizer(16, False, 2.0**-16, 0)
    outputs = build_table("sigmoid", pre, out, "exact")(torch.arange(pre.lo, pre.hi + 1))
    after = 2 * CODES - before
    found = compress(extrapolated(outputs, before, after))
    assert found is not None
    assert torch.equal(read(found, len(found) * CODES)[before:-after], outputs)


def test_slopes_fill_their_half():
    outputs = torch.arange(64) * 63 - 2000
    assert torch.equal(read(compress(outputs), 64), outputs)


@pytest.mark.parametrize("entries", [257, 4096, 65536])
def test_room_is_the_same_wherever_a_table_begins(entries):
    counts = {-(-(before + entries) // (2 * CODES)) * 2 for before in range(CODES)}
    assert max(counts) == most_segments(entries)
