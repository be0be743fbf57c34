"""Scales that are too coarse, or too fine, for the values that matter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quant_gru.calibration.covering import covering_scale, reachable_range
from quant_gru.calibration.float_run import float_layers
from quant_gru.config import FIXED_RANGE
from quant_gru.integer.qparams import QParams
from quant_gru.integer.quantizer import Quantizer
from quant_gru.modules.gru import QuantGRU

# Beyond these arguments sigmoid and tanh are flat: codes spent there change no state.
_FLAT_SIGMOID, _FLAT_TANH = 8.0, 4.0

# Scales of least effect on the states are at most twice those that cover the values. Finer ones
# clip few values, or are less than this much finer. With many codes left, coarse ones do no harm.
_COARSER, _FINER = 4.0, 8.0
_CODES_LEFT = 64
_CLIPPED = 0.2
# Fewer steps say too little of the range of values.
_FEWEST = 32


@dataclass(frozen=True)
class Remark:
    """A scale that does not fit the values.

    Attributes:
        text: A sentence about it.
        factor: How far the scale is from one that covers the values, above 1.
    """

    text: str
    factor: float


@dataclass
class _Seen:
    """Values of one operator that matter.

    Attributes:
        low: The smallest.
        high: The largest.
        count: Their number.
        clipped: How many of them are more than a step beyond the codes.
    """

    low: float = math.inf
    high: float = -math.inf
    count: int = 0
    clipped: int = 0

    def add(self, values: Tensor, quantizer: Quantizer) -> None:
        values = values[values.isfinite()]
        if not values.numel():
            return
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        self.count += values.numel()
        least = quantizer.scale * (quantizer.lo - quantizer.zero_point - 1)
        most = quantizer.scale * (quantizer.hi - quantizer.zero_point + 1)
        self.clipped += int(((values < least) | (values > most)).sum())


@dataclass
class _Cell:
    """Values of all operators of a layer and direction."""

    steps: int = 0
    seen: dict[str, _Seen] = field(default_factory=dict)


class ScaleUse:
    """Collects the values of a float GRU, and remarks on the scales of the quantized one.

    Args:
        gru: A calibrated QuantGRU.
    """

    def __init__(self, gru: QuantGRU) -> None:
        assert gru._state.scales is not None
        self._scales = gru._state.scales
        self._cells: dict[tuple[int, int], _Cell] = {}

    def observe(self, layer: int, direction: int, values: Mapping[str, Tensor]) -> None:
        """Add the values of all operators of a cell, as `float_layers` gives them."""
        cell = self._cells.setdefault((layer, direction), _Cell())
        cell.steps += len(values["input.x"])
        quantizers = self._scales[layer][direction].quantizers
        bent = where_bent(values)
        for name, each in values.items():
            if name in quantizers:
                matter = each[bent[name]] if name in bent else each
                cell.seen.setdefault(name, _Seen()).add(matter, quantizers[name])

    def remarks(self) -> dict[str, Remark]:
        """Return remarks by operator with the suffix of nn.GRU ('gate.z_pre_l0'), worst first."""
        found = {
            f"{name}_l{layer}{'_reverse' if direction else ''}": remark
            for (layer, direction), cell in self._cells.items()
            if cell.steps >= _FEWEST
            for name, seen in cell.seen.items()
            if (remark := _remark(name, self._scales[layer][direction], seen)) is not None
        }
        return worst_first(found)


def worst_first(remarks: Mapping[str, Remark]) -> dict[str, Remark]:
    """Return remarks in the order of their factors, the largest first."""
    return dict(sorted(remarks.items(), key=lambda item: -item[1].factor))


def texts(remarks: Mapping[str, Remark]) -> dict[str, str]:
    """Return the sentences of remarks, in their order."""
    return {name: remark.text for name, remark in remarks.items()}


def lines_of(remarks: Mapping[str, str]) -> Iterable[str]:
    """Yield one line for each remark."""
    return (f"{name}: {text}" for name, text in remarks.items())


@contextmanager
def watched(grus: Mapping[str, QuantGRU]) -> Iterator[dict[str, ScaleUse]]:
    """Collect what modules would compute in float mode from the inputs of their calls.

    Args:
        grus: Name -> a calibrated QuantGRU.
    """
    uses = {name: ScaleUse(gru) for name, gru in grus.items()}
    hooks = [
        gru.register_forward_pre_hook(_hook(uses[name]), with_kwargs=True)
        for name, gru in grus.items()
    ]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()


def _hook(use: ScaleUse) -> Any:
    def observe(gru: QuantGRU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        sequence = gru._normalize(given["input"], given.get("hx"))
        weights = gru._float_weights()
        x = sequence.x.detach().to(weights[0][0].W.dtype)
        float_layers(x, sequence.h0, sequence.lengths, weights, use.observe)

    return observe


def where_bent(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return where values enter sigmoid or tanh where it is not flat, for operators before it."""
    r = values["gate.r_pre"].abs() < _FLAT_SIGMOID
    z = values["gate.z_pre"].abs() < _FLAT_SIGMOID
    g = values["gate.g_pre"].abs() < _FLAT_TANH
    products = torch.cat((r, z, g), dim=1)
    return {
        "gate.r_pre": r,
        "gate.z_pre": z,
        "gate.g_pre": g,
        "op.rRh": g,
        "matmul.Wx": products,
        "matmul.Rh": products,
    }


_BEFORE_GATES = ("gate.r_pre", "gate.z_pre", "gate.g_pre", "op.rRh", "matmul.Wx", "matmul.Rh")


def _remark(name: str, qparams: QParams, seen: _Seen) -> Remark | None:
    """Return what is wrong with the scale of an operator; None if it is good."""
    quantizer, config = qparams.quantizers[name], qparams.config
    symmetric = config[name].is_symmetric
    low, high = seen.low, seen.high
    if name in FIXED_RANGE:  # they have codes for all values of the function
        low, high = -1.0 if name == "gate.g_out" else 0.0, 1.0
    elif not seen.count:
        return None
    bits, signed = quantizer.bits, quantizer.signed
    if not quantizer.is_outside:
        low, high = reachable_range(low, high, bits=bits, signed=signed, symmetric=symmetric)
    if low == high:
        return None
    covering = covering_scale(
        low, high, bits=bits, signed=signed, symmetric=symmetric, scale_kind=config.scale_kind
    )
    factor = quantizer.scale / covering
    where = "where the gate is not flat" if name in _BEFORE_GATES else "on the values of this data"
    if name in FIXED_RANGE:
        where = "on the values of the gate"
    scale = float(f"{quantizer.scale:.6g}")
    used = math.ceil((high - low) / quantizer.scale)
    if factor >= _COARSER and used <= _CODES_LEFT:
        codes = quantizer.hi - quantizer.lo + 1
        return Remark(f"scale {scale} spends {used} of {codes} codes {where}", factor)
    share = seen.clipped / seen.count if seen.count else 0.0
    if factor <= 1 / _FINER and share >= _CLIPPED:
        where = where.removeprefix("on ").replace("where", "the values where")
        return Remark(f"scale {scale} clips {share:.0%} of {where}", 1 / factor)
    return None
