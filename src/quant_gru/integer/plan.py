"""The plan: all integers of a quantized GRU, the interface between parameters and executors.

A plan has a frozen part (quantizers, scalars of the gate arithmetic, tables) and a weight part. The
weight part is rebuilt on the weights' device, without a host sync, when a weight changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from operator import truediv
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant_gru.integer.qparams import (
    QParams,
    finite_values,
    moved_bias,
    scales_of,
)
from quant_gru.integer.quantizer import MAX_SCALE, Quantizer
from quant_gru.integer.rounding import DEFAULT
from quant_gru.integer.tables import Table
from quant_gru.integer.weighted_sum import (
    WeightedSum,
    check_accumulator,
    one_term,
    one_term_tier,
    several_terms,
    significant_bits,
    tier_of,
)
from quant_gru.integer.weights import divided, quantize_rows

ZONEOUT_SHIFT = 15


@dataclass(frozen=True, eq=False)
class FrozenPart:
    """The part of a plan that calibration fixes.

    Attributes:
        quantizers: Operator name -> quantizer, for every activation that is not fused.
        border: The quantizer of real values of input.x. Its zero point may lie outside of the
            codes; that of input.x in `quantizers` is then the nearest code, and the input bias
            contains the rest.
        one: The real value 1 as a code of gate.z_out: 1 / s_z.
        sums: Operator name -> weighted sum, for gate.z_pre, gate.r_pre, op.rRh, gate.g_pre,
            op.old_contrib, op.new_contrib, output.h; fused products are absent.
        tables: gate.z_out, gate.r_out, gate.g_out -> table.
        zoneout: The weighted sum of the states before and after a step; None without zoneout.
        rounding: The rule of all sums and tables; quantizers of real values have their own.
    """

    quantizers: Mapping[str, Quantizer]
    border: Quantizer
    one: int
    sums: Mapping[str, WeightedSum]
    tables: Mapping[str, Table]
    zoneout: WeightedSum | None = None
    rounding: str = DEFAULT

    @property
    def one_minus_z(self) -> int:
        """The largest magnitude of 1 minus an update gate, in codes."""
        return largest_one_minus(self.one, self.quantizers["gate.z_out"])


@dataclass(frozen=True, eq=False)
class WeightPart:
    """The part of a plan that depends on the weights; rows in the order update, reset, candidate.

    Attributes:
        W: Codes (3H, C), in their container.
        R: Codes (3H, H), in their container.
        bw: Codes of the input bias (3H,).
        br: Codes of the recurrent bias (3H,).
        Bw: Input bias in 2^CellPlan.shift_Bw accumulator units, int64 (3H,).
        Br: Recurrent bias in 2^CellPlan.shift_Br accumulator units, int64 (3H,).
        scales: 'weight.W', 'weight.R', 'weight.bw', 'weight.br' -> float32 (3H,).
        Wx: Weighted sum of matmul.Wx, with M and k of shape (3H,).
        Rh: Weighted sum of matmul.Rh.
        bound_Wx: The largest |accumulator| of W x that the widths allow, without bias.
        bound_Rh: The largest |accumulator| of R h that the widths allow, without bias.
        bits_W: Width of weight.W.
        bits_R: Width of weight.R.
        finite: bool scalar, True if no weight or bias is NaN or infinite.
    """

    W: Tensor
    R: Tensor
    bw: Tensor
    br: Tensor
    Bw: Tensor
    Br: Tensor
    scales: Mapping[str, Tensor]
    Wx: WeightedSum
    Rh: WeightedSum
    bound_Wx: int
    bound_Rh: int
    bits_W: int
    bits_R: int
    finite: Tensor


@dataclass(frozen=True)
class CellPlan:
    """The plan of one layer and direction."""

    frozen: FrozenPart
    weights: WeightPart

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.weights.R.shape[1])

    @property
    def input_size(self) -> int:
        """C."""
        return int(self.weights.W.shape[1])

    @property
    def x(self) -> Quantizer:
        """Quantizer of input.x."""
        return self.frozen.quantizers["input.x"]

    @property
    def border(self) -> Quantizer:
        """Quantizer of real values of input.x, see `FrozenPart`."""
        return self.frozen.border

    @property
    def h(self) -> Quantizer:
        """Quantizer of output.h."""
        return self.frozen.quantizers["output.h"]

    @property
    def shift_Bw(self) -> int:
        """The unit of Bw is 2^shift_Bw accumulator units."""
        return bias_shift(self.weights.bits_W, self.x.bits)

    @property
    def shift_Br(self) -> int:
        """The unit of Br is 2^shift_Br accumulator units."""
        return bias_shift(self.weights.bits_R, self.h.bits)


class Seam(NamedTuple):
    """What converts state codes of a layer to input codes of a direction of the next.

    Attributes:
        sums: The weighted sum of each direction below.
        below: The quantizer of the codes of each direction below.
        above: The quantizer of the result.
    """

    sums: Sequence[WeightedSum]
    below: Sequence[Quantizer]
    above: Quantizer

    def unclamped(self, codes: Sequence[Tensor]) -> Tensor:
        """Return weighted_sum(h - z_h) of codes (T, N, H) of each direction, side by side."""
        halves = zip(self.sums, codes, self.below, strict=True)
        return torch.cat(
            [s.unclamped(half.to(torch.int64) - q.zero_point) for s, half, q in halves], dim=-1
        )


@dataclass(frozen=True)
class GRUPlan:
    """The plan of a whole GRU.

    Attributes:
        cells: One plan per layer and direction.
        between: [layer - 1][direction][direction below] -> the weighted sum that converts state
            codes of the layer below to input codes.
    """

    cells: tuple[tuple[CellPlan, ...], ...]
    between: tuple[tuple[tuple[WeightedSum, ...], ...], ...]

    def seam(self, layer: int, direction: int) -> Seam:
        """Return what makes input codes of a layer above the first of codes of the layer below."""
        below = [cell.h for cell in self.cells[layer - 1]]
        return Seam(self.between[layer - 1][direction], below, self.cells[layer][direction].x)

    @property
    def parts(self) -> tuple[weakref.ref[Any], ...]:
        """The parts of all cells, as references that compare equal only if the parts are the same.

        What is made of a plan is kept by them, as long as they exist.
        """
        cells = [cell for layer in self.cells for cell in layer]
        return tuple(weakref.ref(each) for c in cells for each in (c.frozen, c.weights))

    @property
    def rounds_to_even(self) -> bool:
        """Whether all sums, and all conversions of real values, round ties to even."""
        cells = [cell for layer in self.cells for cell in layer]
        return all(
            {cell.frozen.rounding, cell.border.rounding, cell.h.rounding} == {DEFAULT}
            for cell in cells
        )

    @property
    def is_far(self) -> bool:
        """Whether the input of the GRU has a zero point outside of its codes."""
        for cell in self.cells[0]:
            if cell.border.is_outside:
                return True
        return False


def stack(cells: Sequence[Sequence[CellPlan]]) -> GRUPlan:
    """Join the plans of all layers and directions."""
    between = tuple(
        tuple(
            tuple(_between(below.h, cell.x, cell.frozen.rounding) for below in lower)
            for cell in upper
        )
        for lower, upper in pairwise(cells)
    )
    return GRUPlan(tuple(map(tuple, cells)), between)


def largest_one_minus(one: int, z: Quantizer) -> int:
    """Return the largest magnitude of `one` minus a code of `z`."""
    return max(abs(one - (z.lo - z.zero_point)), abs(one - (z.hi - z.zero_point)))


def build_frozen(qparams: QParams, device: torch.device) -> FrozenPart:
    """Derive the scalars of the gate arithmetic from the quantizers.

    Args:
        qparams: Quantizers and tables.
        device: Device of the tables.
    """
    rule, border_rule = qparams.config.rounding, qparams.config.border_rounding
    border = replace(qparams.quantizers["input.x"], rounding=border_rule)
    state = replace(qparams.quantizers["output.h"], rounding=border_rule)
    q = {**qparams.quantizers, "input.x": border.inner, "output.h": state}
    Wx, Rh, h = q["matmul.Wx"], q["matmul.Rh"], q["output.h"]
    z, r, g = q["gate.z_out"], q["gate.r_out"], q["gate.g_out"]
    one = round(1.0 / z.scale)
    sums: dict[str, WeightedSum] = {}
    pot = qparams.pot

    def add(name: str, *terms: tuple[float, int]) -> None:
        out = q[name]
        scales, bounds = zip(*terms, strict=True)
        sums[name] = several_terms(
            list(map(truediv, scales, repeat(out.scale))),
            bounds,
            bits=out.bits,
            lo=out.lo,
            hi=out.hi,
            zero_point=out.zero_point,
            pot=pot,
            rounding=rule,
        )

    def product(
        name: str, a: Quantizer, b: Quantizer, bound_a: int | None = None
    ) -> tuple[float, int]:
        """Return scale and bound of the product's own code, or of the product itself if fused."""
        scale = a.scale * b.scale
        bound = (a.max_abs if bound_a is None else bound_a) * b.max_abs
        if name not in q:
            return scale, bound
        sums[name] = _one_term_sum(scale / q[name].scale, a.bits + b.bits, bound, q[name], rule)
        return q[name].scale, q[name].max_abs

    from_W, from_R = (Wx.scale, Wx.max_abs), (Rh.scale, Rh.max_abs)
    add("gate.z_pre", from_W, from_R)
    add("gate.r_pre", from_W, from_R)
    add("gate.g_pre", from_W, product("op.rRh", r, Rh))
    old = product("op.old_contrib", z, h)
    new = product("op.new_contrib", z, g, bound_a=largest_one_minus(one, z))
    add("output.h", old, new)
    tables = {name: table.to(device) for name, table in qparams.tables.items()}
    zoneout = zoneout_sum(qparams.zoneout, h, rule)
    return FrozenPart(q, border, one, sums, tables, zoneout, rule)


def zoneout_sum(p: float, h: Quantizer, rounding: str = DEFAULT) -> WeightedSum | None:
    """Return the sum for a state that keeps a share `p` of its old value; None if it keeps none.

    Args:
        p: The share, rounded to a multiple of 2^-15.
        h: Quantizer of output.h.
        rounding: The rule of the sum.
    """
    kept = round(p * (1 << ZONEOUT_SHIFT))
    if not kept:
        return None
    multipliers = (kept, (1 << ZONEOUT_SHIFT) - kept)
    tier = tier_of(multipliers, (h.max_abs, h.max_abs), ZONEOUT_SHIFT)
    return WeightedSum(multipliers, ZONEOUT_SHIFT, h.zero_point, h.lo, h.hi, tier, rounding)


def build_weights(
    qparams: QParams,
    W: Tensor,
    R: Tensor,
    bw: Tensor | None,
    br: Tensor | None,
    dropped: Tensor | None = None,
    p: float = 0.0,
) -> WeightPart:
    """Quantize the weights and derive the numbers that depend on them, on their device.

    Args:
        qparams: Quantizers and the widths and granularities of the weights.
        W: (3H, C), rows reset, update, candidate, as PyTorch stores them.
        R: (3H, H), in the same row order.
        bw: (3H,), or None for zeros.
        br: (3H,), or None for zeros.
        dropped: bool (3H, H), in the row order of R: codes of R that become 0 (recurrent
            dropout), or None.
        p: Drop probability. If `dropped` is given, the scales of R are divided by 1 - p.
    """
    q, rows = qparams.quantizers, W.shape[0]
    raw = {
        "weight.W": W,
        "weight.R": R,
        "weight.bw": W.new_zeros(rows) if bw is None else bw,
        "weight.br": W.new_zeros(rows) if br is None else br,
    }
    finite = torch.stack([torch.isfinite(w).all() for w in raw.values()]).all()
    scales: dict[str, Tensor] = {}
    codes: dict[str, Tensor] = {}
    bits: dict[str, int] = {}
    for name, w in raw.items():
        bits[name] = qparams.config[name].bitwidth or 1
        values = finite_values(w)
        scale = scales_of(qparams, name, values)
        code = quantize_rows(values, scale, bits[name])
        if name == "weight.W":
            raw["weight.bw"] = moved_bias(qparams, raw["weight.bw"], values, code, scale)
        if name == "weight.R" and dropped is not None:
            code = code.masked_fill(dropped, 0)
            scale = divided(scale, 1.0 - p).clamp(max=MAX_SCALE)
        scales[name] = update_first(scale)
        codes[name] = update_first(code)

    def sums(weight: str, bias: str, operand: str, result: str) -> tuple[Tensor, WeightedSum, int]:
        act, out, n = q[operand], q[result], bits[weight]
        unit = scales[weight].to(torch.float64) * act.scale
        limit = bias_limit(n, act.bits)
        B = codes[bias].to(torch.float64) * scales[bias].to(torch.float64)
        B = B / (unit * float(1 << bias_shift(n, act.bits)))
        B = torch.round(B).clamp(-limit, limit).to(torch.int64)
        M, k = one_term(divided(unit, out.scale), significant_bits(n + act.bits))
        K = codes[weight].shape[1]
        return B, *matmul_sum(result, n, K, act, out, M, k, qparams.config.rounding)

    Bw, Wx, bound_Wx = sums("weight.W", "weight.bw", "input.x", "matmul.Wx")
    Br, Rh, bound_Rh = sums("weight.R", "weight.br", "output.h", "matmul.Rh")
    return WeightPart(
        codes["weight.W"],
        codes["weight.R"],
        codes["weight.bw"],
        codes["weight.br"],
        Bw,
        Br,
        scales,
        Wx,
        Rh,
        bound_Wx,
        bound_Rh,
        bits["weight.W"],
        bits["weight.R"],
        finite,
    )


def matmul_sum(
    name: str,
    weight_bits: int,
    K: int,
    operand: Quantizer,
    out: Quantizer,
    M: Tensor,
    k: Tensor,
    rounding: str,
) -> tuple[WeightedSum, int]:
    """Return the weighted sum of a matrix product, and its accumulator's bound without bias.

    Args:
        name: 'matmul.Wx' or 'matmul.Rh'.
        weight_bits: Width of the weights.
        K: Terms of each sum.
        operand: Quantizer of the activation.
        out: Quantizer of the result.
        M: Multipliers, integers (3H,).
        k: Shifts, integers (3H,).
        rounding: The rule of the sum.

    Raises:
        QuantGRUError: Kernels cannot accumulate K products of such operands.
    """
    check_accumulator(name, weight_bits, K, operand.max_abs)
    width = weight_bits + operand.bits
    bound = K * (1 << (weight_bits - 1)) * operand.max_abs
    limit = bias_limit(weight_bits, operand.bits)
    tier = "e" if width > 32 else one_term_tier(bound + limit, significant_bits(width))
    return WeightedSum((M,), k, out.zero_point, out.lo, out.hi, tier, rounding), bound


def bias_shift(weight_bits: int, activation_bits: int) -> int:
    """Return the shift of the bias unit, 2^shift accumulator units: 0 up to 48 bits of operands.

    With more bits a bias in accumulator units does not fit 64 bits. A unit coarser by this shift is
    still far below one code of the result.
    """
    return max(0, weight_bits + activation_bits - 48)


def bias_limit(weight_bits: int, activation_bits: int) -> int:
    """Return the largest |Bw|; 2^46 would clip real biases of operands with more than 32 bits."""
    if max(weight_bits, activation_bits) <= 8:
        return 1 << 30
    return 1 << 46 if weight_bits + activation_bits <= 32 else 1 << 62


def _between(below: Quantizer, x: Quantizer, rounding: str = DEFAULT) -> WeightedSum:
    return _one_term_sum(below.scale / x.scale, below.bits, below.max_abs, x, rounding, p=24)


def _one_term_sum(
    ratio: float, width: int, bound: int, out: Quantizer, rounding: str, p: int | None = None
) -> WeightedSum:
    p = significant_bits(width) if p is None else p
    M, k = one_term(torch.tensor(ratio, dtype=torch.float64, device="cpu"), p)
    tier = "e" if width > 32 else one_term_tier(bound, p)
    return WeightedSum((int(M),), int(k), out.zero_point, out.lo, out.hi, tier, rounding)


def update_first(w: Tensor) -> Tensor:
    """Reorder rows from reset, update, candidate (PyTorch) to update, reset, candidate (plan)."""
    reset, update, candidate = w.chunk(3)
    return torch.cat((update, reset, candidate))
