"""Rules for quantization parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quant_gru.config import ACTIVATIONS, QuantConfig
from quant_gru.errors import QuantGRUError
from quant_gru.integer.bias_correction import InputMean
from quant_gru.integer.qparams import PRE_ACTIVATION, float32
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table, float_table
from quant_gru.parameters.schema import CellParams, Document, OperatorParams, TableParams


def exponent_of(scale: float) -> int | None:
    """Return exp2_inv of a scale 2^-exp2_inv, None for other scales."""
    mantissa, exponent = math.frexp(scale)
    return 1 - exponent if mantissa == 0.5 else None


def check_fields(operator: OperatorParams, name: str) -> None:
    """Raise if fields contradict each other, or are set where they have no meaning."""
    if name in ACTIVATIONS and operator.granularity is not None:
        raise QuantGRUError(f"Expected granularity to be null, got {operator.granularity!r}")
    if name not in ACTIVATIONS or operator.bitwidth is None:
        idle = (
            ("zero_point", "exp2_inv")
            if name not in ACTIVATIONS
            else ("scale", "zero_point", "exp2_inv")
        )
        for field in idle:
            if getattr(operator, field) is not None:
                raise QuantGRUError(
                    f"Expected {field} to be null, got {getattr(operator, field)!r}"
                )


def check_scale(quantizer: Quantizer, config: QuantConfig, name: str) -> None:
    """Raise if a quantizer breaks a rule of its configuration."""
    if config.scale_kind == "pot" and exponent_of(quantizer.scale) is None:
        raise QuantGRUError(
            f"Expected scale to be a power of two (scale_kind 'pot'), got {quantizer.scale!r}"
        )
    if config[name].is_symmetric and quantizer.zero_point != 0:
        raise QuantGRUError(f"Expected zero_point to be 0 (symmetric), got {quantizer.zero_point}")


def check_pinned(
    scale: float | Sequence[float], config: QuantConfig, name: str, hidden_size: int
) -> tuple[float, ...]:
    """Return scales of a weight, one per tensor, gate or channel; raise if they break a rule."""
    scales = [scale] if isinstance(scale, float) else list(scale)
    granularity = config[name].granularity or "channel"
    expected = {"tensor": 1, "gate": 3, "channel": 3 * hidden_size}[granularity]
    if len(scales) != expected:
        raise QuantGRUError(
            f"Expected {expected} scales (granularity {granularity!r}), got {len(scales)}"
        )
    for value in scales:
        check_scale(Quantizer(config[name].bitwidth or 1, True, value), config, name)
    return tuple(scales)


def check_mean(cell: CellParams, document: Document) -> InputMean | None:
    """Return the mean of a cell's input; raise if it does not fit."""
    given, shape = cell.input_mean, document.gru
    if given is None:
        return None
    if document.version == 1:
        raise QuantGRUError("Expected version to be 2 with input_mean, got 1")
    expected = shape.hidden_size * shape.directions if cell.layer else shape.input_size
    if len(given.values) != expected:
        raise QuantGRUError(f"Expected input_mean of {expected} features, got {len(given.values)}")
    mean = InputMean.of(given.values, given.exp2_inv)
    for value in mean.values:
        if float32(value) != value:
            raise QuantGRUError(f"Expected input_mean to be float32 numbers, got {value!r}")
    return mean


def check_table(table: TableParams, quantizers: Mapping[str, Quantizer], name: str) -> None:
    """Raise if the table of an operator is malformed or does not fit its quantizers."""
    pre, out = quantizers[PRE_ACTIVATION[name]], quantizers[name]
    rows = {len(row) for row in table.coefficients}
    ok = (
        len(table.bounds) == len(table.coefficients) > 0
        and rows in ({1}, {2}, {3})
        and all(a < b for a, b in zip(table.bounds, table.bounds[1:], strict=False))
        and pre.lo <= table.bounds[0] <= table.bounds[-1] <= table.last <= pre.hi
    )
    if not ok:
        raise QuantGRUError(
            f"Expected a table of ascending bounds in [{pre.lo}, {pre.hi}] with one row of 1 to 3 "
            f"coefficients each, got {len(table.bounds)} bounds up to {table.last} and "
            f"{len(table.coefficients)} rows"
        )
    if table.zero_point != out.zero_point or not out.lo <= table.lo <= table.hi <= out.hi:
        raise QuantGRUError(
            f"Expected the table's outputs to be codes in [{out.lo}, {out.hi}] with zero point "
            f"{out.zero_point}, got [{table.lo}, {table.hi}] and {table.zero_point}"
        )
    ends = [*table.bounds[1:], table.last + 1]
    for start, end, row in zip(table.bounds, ends, table.coefficients, strict=True):
        if sum(abs(c) * (end - start) ** p for p, c in enumerate(row)) >= 1 << 62:
            raise QuantGRUError(f"Expected sums below 2^62, got coefficients {row}")
    u = table.segment_shift
    if u is not None:
        even = [table.bounds[0] + (i << u) for i in range(len(table.bounds))]
        if table.bounds != even or table.last - table.bounds[-1] >= 1 << u:
            raise QuantGRUError(
                f"Expected {len(table.bounds)} segments of 2^{u} codes up to {table.last}, "
                "got others"
            )


def check_curve(table: Table, quantizers: dict[str, Quantizer], name: str) -> None:
    """Raise if an exact table deviates from its function, for example if swapped or truncated."""
    pre, out = quantizers[PRE_ACTIVATION[name]], quantizers[name]
    function = "tanh" if name == "gate.g_out" else "sigmoid"
    codes = np.unique(np.linspace(pre.lo, pre.hi, 257).astype(np.int64))
    off = np.abs(table(torch.from_numpy(codes)).numpy() - float_table(function, pre, out, codes))
    if off.max() * out.scale > 1e-3 and off.max() > 1:
        raise QuantGRUError(
            f"Expected the table to follow {function} over the codes [{pre.lo}, {pre.hi}] of "
            f"{PRE_ACTIVATION[name]!r}, got one of [{int(table.bounds[0])}, {table.last}] that is "
            f"up to {off.max() * out.scale:.3g} off"
        )
