"""Coordinate descent on the scales of a cell, by the error of its integer run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quant_gru.calibration.guard import Judge
from quant_gru.calibration.tied import TIED
from quant_gru.config import CALIBRATED
from quant_gru.integer.qparams import PRE_ACTIVATION, QParams, float32
from quant_gru.integer.quantizer import MAX_SCALE, MIN_SCALE, Quantizer

# A change must reduce the error by this factor. Rounds end when no operator changes.
_BETTER = 0.9995
_ROUNDS = 8
# Steps of scales in octaves: powers of two, and parts of them for free scales.
_POT_STEPS, _FREE_STEPS = (-1.0, 1.0), (-1.0, 1.0, -0.25, 0.25, -0.0625, 0.0625)


def refined(qparams: QParams, judge: Judge) -> QParams:
    """Return scales with which the integer cell is closer to the float cell in steps of data.

    One operator after the other takes the best of its neighbours, until none is better.

    Args:
        qparams: The scales to begin with.
        judge: Runs the integer cell.
    """
    least = judge.error(qparams)
    for _ in range(_ROUNDS):
        before = least
        for name in CALIBRATED:
            tied = qparams.config.tie_x_and_h and name in TIED
            if tied or name not in qparams.quantizers:
                continue
            for neighbour in _neighbours(qparams, name):
                changed = _with(qparams, name, neighbour)
                found = judge.error(changed)
                if found < _BETTER * least:
                    qparams, least = changed, found
        if least == before:
            break
    return qparams


def _with(qparams: QParams, name: str, quantizer: Quantizer) -> QParams:
    """Return parameters with another quantizer of an operator, and its table."""
    tables = {
        output: table for output, table in qparams.tables.items() if PRE_ACTIVATION[output] != name
    }
    quantizers = {**qparams.quantizers, name: quantizer}
    return qparams.remade(qparams.config, quantizers, qparams.pinned, tables)


def _neighbours(qparams: QParams, name: str) -> Iterator[Quantizer]:
    """Yield quantizers of an operator with another scale, or another zero point."""
    quantizer = qparams.quantizers[name]
    lo, hi = quantizer.lo, quantizer.hi
    symmetric = qparams.config[name].is_symmetric
    middle = (lo + hi + 1) // 2
    for step in _POT_STEPS if qparams.pot else _FREE_STEPS:
        scale = float32(min(MAX_SCALE, max(MIN_SCALE, quantizer.scale * 2.0**step)))
        # the range keeps its middle, or is centred on 0
        moved = middle + round((quantizer.zero_point - middle) * 2.0**-step)
        for zero_point in {quantizer.zero_point} if symmetric else {moved, middle}:
            yield replace(quantizer, scale=scale, zero_point=min(hi, max(lo, zero_point)))
    if not symmetric:
        for share in (-0.25, -0.0625, 0.0625, 0.25):
            zero_point = quantizer.zero_point + round(share * (hi - lo))
            yield replace(quantizer, zero_point=min(hi, max(lo, zero_point)))
