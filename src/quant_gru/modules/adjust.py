"""Changes of single operators of calibrated parameters: pure functions from QParams to QParams."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from quant_gru.calibration.search import covering_quantizer
from quant_gru.config import FIXED_RANGE, WEIGHTS, QuantConfig
from quant_gru.config.operators import FUSIBLE, SIGMOIDS
from quant_gru.errors import ConfigError, QuantGRUError
from quant_gru.integer.qparams import (
    PRE_ACTIVATION,
    QParams,
    fixed_range_quantizer,
    float32,
    reciprocal_scale,
)
from quant_gru.integer.quantizer import FARTHEST, Quantizer, code_limits
from quant_gru.parameters.checks import check_pinned, check_scale


@dataclass(frozen=True)
class Change:
    """A requested change of one operator; None leaves a field unchanged."""

    bitwidth: int | None = None
    is_symmetric: bool | None = None
    is_unsigned: bool | None = None
    scale: Any = None
    exp2_inv: int | None = None
    zero_point: int | None = None
    fused: bool = False

    @property
    def touches_numbers(self) -> bool:
        """Whether the change sets a scale or zero point explicitly."""
        return not (self.scale is None and self.exp2_inv is None and self.zero_point is None)

    def apply_to_config(self, config: QuantConfig, name: str) -> QuantConfig:
        """Return the configuration with this change; raise ConfigError if it breaks a rule."""
        fields = {
            field: value
            for field in ("bitwidth", "is_symmetric", "is_unsigned")
            if (value := getattr(self, field)) is not None
        }
        if self.fused:
            if name not in FUSIBLE:
                raise ConfigError(f"Expected one of {', '.join(FUSIBLE)} to be fused, got {name!r}")
            if fields or self.touches_numbers:
                raise ConfigError(
                    "Expected fused to be the only change of an operator, got others beside it "
                    f"(operator {name!r})"
                )
            return config.replace(name, bitwidth=None)
        return config.replace(name, **fields) if fields else config


def adjust(qparams: QParams, name: str, change: Change, hidden_size: int) -> QParams:
    """Return parameters with one operator changed, and everything derived from it rebuilt.

    A change of only the width keeps the real range: exp2_inv grows by the added bits, and the zero
    point is rescaled and clamped. A change of symmetry or signedness selects the smallest scale
    that covers the old real range.

    Raises:
        QuantGRUError: The change breaks a rule; the message names the operator.
    """
    config = change.apply_to_config(qparams.config, name)
    try:
        if name in WEIGHTS:
            return _adjust_weight(qparams, config, name, change, hidden_size)
        if change.fused:
            kept = {key: q for key, q in qparams.quantizers.items() if key != name}
            return qparams.remade(config, kept, qparams.pinned, qparams.tables)
        if config[name].bitwidth is None:
            raise QuantGRUError(
                "Expected an operator with a width of its own, got one that is fused"
            )
        if name not in qparams.quantizers:
            raise QuantGRUError(
                "Expected a calibrated operator, got one that was fused at calibration; "
                "reset_calibration(), set its width and calibrate again"
            )
        quantizer = _adjusted(qparams, config, name, change)
        check_scale(quantizer, config, name)
    except ConfigError:
        raise
    except QuantGRUError as error:
        raise ConfigError(f"{error} (operator {name!r})") from None
    quantizers = {**qparams.quantizers, name: quantizer}
    affected = {out for out, pre in PRE_ACTIVATION.items() if name in (out, pre)}
    tables = {out: table for out, table in qparams.tables.items() if out not in affected}
    try:
        return qparams.remade(config, quantizers, qparams.pinned, tables)
    except QuantGRUError as error:  # names its operator
        raise ConfigError(str(error)) from None


def _adjusted(qparams: QParams, config: QuantConfig, name: str, change: Change) -> Quantizer:
    new = _reshaped(qparams, config, name)
    scale = _scale(change, config, new.scale)
    if name in SIGMOIDS:
        scale = reciprocal_scale(scale, name)
    zero_point = new.zero_point
    if change.zero_point is not None:
        if isinstance(change.zero_point, bool) or not isinstance(change.zero_point, int):
            raise QuantGRUError(f"Expected zero_point to be an integer, got {change.zero_point!r}")
        zero_point = change.zero_point
    return Quantizer(new.bits, new.signed, scale, zero_point, new.far)


def _reshaped(qparams: QParams, config: QuantConfig, name: str) -> Quantizer:
    """Return the quantizer with the width, symmetry and signedness of `config`."""
    old, before, after = qparams.quantizers[name], qparams.config[name], config[name]
    assert after.bitwidth is not None
    if old.is_outside and not after.is_symmetric:
        signed = not after.is_unsigned
        zero_point = old.zero_point - old.lo + code_limits(old.bits, signed)[0]
        moved = replace(old, signed=signed, zero_point=zero_point)
        return _with_width(moved, after.bitwidth, False, config.scale_kind)
    if name in FIXED_RANGE and old == _default(qparams.config, name):
        return _default(config, name)
    if before.is_unsigned != after.is_unsigned or after.is_symmetric > before.is_symmetric:
        low, high = (old.scale * (code - old.zero_point) for code in (old.lo, old.hi))
        return covering_quantizer(
            low,
            high,
            bits=after.bitwidth,
            signed=not after.is_unsigned,
            symmetric=after.is_symmetric,
            scale_kind=config.scale_kind,
        )
    return _with_width(old, after.bitwidth, after.is_symmetric, config.scale_kind)


def _default(config: QuantConfig, name: str) -> Quantizer:
    operator = config[name]
    assert operator.bitwidth is not None
    return fixed_range_quantizer(
        name,
        operator.bitwidth,
        signed=not operator.is_unsigned,
        symmetric=operator.is_symmetric,
        scale_kind=config.scale_kind,
    )


def _with_width(old: Quantizer, bits: int, symmetric: bool, scale_kind: str) -> Quantizer:
    """Return the same real range in another width: the lowest code keeps its real value."""
    if bits == old.bits:
        return old
    lo, hi = code_limits(bits, old.signed)
    if scale_kind == "pot":
        ratio = 2.0 ** (bits - old.bits)
    elif symmetric:
        ratio = max(hi, 1) / max(old.hi, 1)
    else:
        ratio = (hi - lo) / (old.hi - old.lo)
    lowest = old.lo - old.zero_point
    if old.is_outside:
        # a wider range, if zero would be too many codes away
        while max(abs(lowest * ratio), abs(lowest * ratio + hi - lo)) > FARTHEST - 1 and ratio > 1:
            ratio /= 2
    zero_point = 0 if symmetric else round(lo - lowest * ratio)
    if not old.is_outside:
        zero_point = min(max(zero_point, lo), hi)
    return Quantizer(bits, old.signed, float32(old.scale / ratio), zero_point, old.far)


def _scale(change: Change, config: QuantConfig, current: float) -> float:
    if change.exp2_inv is not None:
        if isinstance(change.exp2_inv, bool) or not isinstance(change.exp2_inv, int):
            raise QuantGRUError(f"Expected exp2_inv to be an integer, got {change.exp2_inv!r}")
        if not -127 <= change.exp2_inv <= 126:
            raise QuantGRUError(f"Expected exp2_inv to be in -127..126, got {change.exp2_inv}")
        scale = 2.0**-change.exp2_inv
        if change.scale is not None and _number(change.scale) != scale:
            raise QuantGRUError(
                f"Expected scale and exp2_inv to agree, got {change.scale!r} and {change.exp2_inv}"
            )
        return scale
    return current if change.scale is None else _number(change.scale)


def _number(value: Any) -> float:
    try:
        scale = float32(float(value))
    except (TypeError, ValueError, OverflowError):
        raise QuantGRUError(f"Expected scale to be a number, got {value!r}") from None
    if not (math.isfinite(scale) and scale > 0):
        raise QuantGRUError(f"Expected scale to be positive and finite, got {value!r}")
    return scale


def _adjust_weight(
    qparams: QParams, config: QuantConfig, name: str, change: Change, hidden_size: int
) -> QParams:
    if change.zero_point not in (None, 0):
        raise QuantGRUError(
            f"Expected zero_point of a weight to be 0 (symmetric), got {change.zero_point}"
        )
    pinned = dict(qparams.pinned)
    if change.scale is not None or change.exp2_inv is not None:
        given = change.scale if change.exp2_inv is None else _scale(change, config, 1.0)
        values = given.tolist() if hasattr(given, "tolist") else given
        listed = list(values) if isinstance(values, (list, tuple)) else [values]
        scales = [_number(value) for value in listed]
        if len(scales) == 1:
            groups = {"tensor": 1, "gate": 3}.get(config[name].granularity or "", 3 * hidden_size)
            scales = scales * groups
        pinned[name] = check_pinned(scales, config, name, hidden_size)
    elif name in pinned:
        bits, old_bits = config[name].bitwidth, qparams.config[name].bitwidth
        assert bits is not None
        assert old_bits is not None
        pinned[name] = tuple(scale * 2.0 ** (old_bits - bits) for scale in pinned[name])
    return qparams.remade(config, qparams.quantizers, pinned, qparams.tables)
