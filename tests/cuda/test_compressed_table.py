"""Compressed tables: every output code, and which tables cannot be compressed."""

from dataclasses import replace

import pytest
import torch
from gate_structs import cell_of

from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import build_table
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.plan.structure import FrozenNumbers

CODES = 16  # per line


def compress(outputs):
    """Lines of outputs, int32 (entries / 16, 2), or None."""
    found = _native.compressed(outputs.tolist())
    return None if found is None else lines_of(found)


def lines_of(found):
    return torch.frombuffer(bytearray(found), dtype=torch.int32).view(-1, 2)


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


def test_slopes_fill_their_half():
    outputs = torch.arange(64) * 63 - 2000
    assert torch.equal(read(compress(outputs), 64), outputs)


@pytest.fixture(scope="module")
def frozen():
    gru = QuantGRU(3, 2, config=QuantConfig.w8a16()).eval()
    gru.calibrate(torch.randn(6, 2, 3))
    gru.finalize_calibration()
    return gru._plan().cells[0][0].frozen


@pytest.mark.parametrize("before", range(CODES))
def test_what_nobody_reads_bends_no_line(frozen, before):
    """Tables begin and end within a line, where they may be steep."""
    pre, out = Quantizer(16, True, 2.0**-14, 16 - before), Quantizer(16, False, 2.0**-16, 0)
    table = build_table("sigmoid", pre, out, "exact")
    names = {"gate.z_pre": pre, "gate.z_out": out}
    made = FrozenNumbers(
        replace(
            frozen,
            quantizers={**frozen.quantizers, **names},
            tables={**frozen.tables, "gate.z_out": table},
        )
    )
    ((direct, lines), *_), z = made.native.tables(), cell_of(made, "double").z
    outputs = torch.frombuffer(bytearray(direct), dtype=torch.float32).to(torch.int64)
    assert torch.equal(outputs, table(torch.arange(pre.lo, pre.hi + 1)) - table.zero_point)
    at = pre.lo - pre.zero_point - z.line_origin
    assert (at, z.line_origin % CODES) == (before, 0)
    found = lines_of(lines)
    assert len(found) == z.line_count
    assert torch.equal(read(found, len(found) * CODES)[at : at + z.entries], outputs)
