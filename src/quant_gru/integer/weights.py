"""Codes and scales of float weights, computed on the weights' device without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.integer.quantizer import MAX_SCALE, MIN_SCALE, code_limits

# The smallest scale of a channel, relative to the largest of the tensor. It keeps the multipliers
# of all channels within eight powers of two of each other.
_SMALLEST_SHARE = 2.0**-8
_FINER = 2
# Free scales: candidates in sixteenths of the scale that covers the largest magnitude.
_SIXTEENTHS = (16, 15, 14, 12, 10, 8, 6)
_SEARCHED_BITS = 8
_SEARCHED_SCALES = (2.0**-100, 2.0**100)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, exact on every device, by writing the exponent bits directly.

    Args:
        exponent: Integers in -1022..1023.
    """
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def divided(values: Tensor, divisor: float) -> Tensor:
    """Divide with a single rounding: a GPU would multiply by the reciprocal of a scalar divisor."""
    return values / torch.full_like(values, divisor)


def groups_of(granularity: str, rows: int) -> int:
    """Return the number of scales of a tensor with `rows` = 3H rows: 1, 3 or 3H."""
    return {"tensor": 1, "gate": 3, "channel": rows}[granularity]


def matrix_scales(w: Tensor, bits: int, granularity: str, scale_kind: str) -> Tensor:
    """Return the scales of a weight matrix.

    Args:
        w: (3H, K), finite float32.
        bits: Width of a code.
        granularity: 'tensor', 'gate' or 'channel'.
        scale_kind: 'pot' or 'free'.

    Returns:
        float32 (3H,), at least 2^-8 of the largest scale; 1 if all weights are zero.
    """
    scales, empty = _group_scales(w, bits, granularity, scale_kind)
    scales = torch.where(empty, 0.0, scales)
    scales = torch.maximum(scales, scales.max() * _SMALLEST_SHARE)
    return _finish(scales, w.shape[0])


def bias_scales(b: Tensor, bits: int, granularity: str, scale_kind: str) -> Tensor:
    """Return the scales of a bias, float32 (3H,).

    Zero entries, and entries too small for a scale, use the largest scale. If all entries are zero,
    the scale is 1.

    Args:
        b: (3H,), finite float32.
        bits: Width of a code.
        granularity: 'tensor', 'gate' or 'channel'.
        scale_kind: 'pot' or 'free'.
    """
    scales, empty = _group_scales(b[:, None], bits, granularity, scale_kind)
    scales = torch.where(empty, 0.0, scales)
    return _finish(torch.where(scales == 0, scales.max(), scales), b.shape[0])


def quantize_rows(w: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the codes of `w` (3H, ..) with one scale per row: clamp(rint(w / s)), int64."""
    lo, hi = code_limits(bits, signed=True)
    s = scales.reshape(-1, *([1] * (w.dim() - 1)))
    return torch.round(w / s).to(torch.float64).clamp(lo, hi).to(torch.int64)


def _finish(scales: Tensor, rows: int) -> Tensor:
    scales = torch.where(scales > 0, scales.clamp(MIN_SCALE, MAX_SCALE), 1.0)
    return scales.to(torch.float32).repeat_interleave(rows // scales.shape[0], output_size=rows)


def _group_scales(w: Tensor, bits: int, granularity: str, scale_kind: str) -> tuple[Tensor, Tensor]:
    """Return the scale of each group, float64 (G,), and whether all its weights are zero."""
    values = w.to(torch.float64).reshape(groups_of(granularity, w.shape[0]), -1)
    largest = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
    if scale_kind == "free":
        scales = _free_scales(values, largest, bits)
    else:
        scales = power_of_two(-_best_exponents(values, largest, bits))
    return scales, largest == 0


def _free_scales(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return the free scale of each group with the least squared error.

    The candidates are shares of the covering scale, and the candidates of 'pot'.

    Args:
        values: float64 (G, K).
        largest: float64 (G,), the largest magnitude of each group.
        bits: Width of a code.

    Returns:
        float64 (G,), float32 numbers; ties prefer the larger share, and shares over `pot` scales.
    """
    lo, hi = code_limits(bits, signed=True)
    covering = divided(largest, max(hi, 1)).to(torch.float32).to(torch.float64)
    count = values.shape[1]
    if count < 2 or bits > _SEARCHED_BITS:
        return covering
    least, most = _SEARCHED_SCALES
    searched = (covering >= least) & (covering <= most)
    # the scale of a group that is not searched may be zero
    unit = torch.where(searched, covering, 1.0)
    exponent = _covering_exponents(values, largest, bits)
    candidates = [(unit * (each / 16)).to(torch.float32).to(torch.float64) for each in _SIXTEENTHS]
    candidates += [
        torch.where(searched, power_of_two((-exponent - finer).clamp(-126, 127)), 1.0)
        for finer in range(_FINER + 1)
    ]
    # errors are at most those of the code 0, and float64 sums are exact in any order
    quantum = 2.0 ** (52 - (count - 1).bit_length() - 2 * bits)
    best, fewest = unit, torch.full_like(unit, torch.inf)
    for scale in candidates:
        y = values / scale[:, None]
        error = (y - torch.round(y).clamp(lo, hi)) * (scale / unit)[:, None]
        total = torch.round(error * error * quantum).sum(dim=1)
        better = total < fewest
        best, fewest = torch.where(better, scale, best), torch.where(better, total, fewest)
    return torch.where(searched, best, covering)


def _covering_exponents(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return the largest exp2_inv of each group that clamps no code; arguments as below."""
    lo, hi = code_limits(bits, signed=True)
    # |largest| * 2^guess is in [2^(bits-2), 2^(bits-1)). guess + 1 may cover a negative extreme.
    # guess - 1 always covers, except for bits = 1, which has no positive code.
    guess = (bits - 1) - torch.frexp(largest)[1]
    covering = guess - 1
    for exponent in (guess, guess + 1):
        rounded = torch.round(values * power_of_two(exponent)[:, None])
        covers = ((rounded >= lo) & (rounded <= hi)).all(dim=1)
        covering = torch.where(covers, exponent, covering)
    return covering


def _best_exponents(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return the exp2_inv of each group with the least squared error: covering, or up to 2 finer.

    Args:
        values: float64 (G, K).
        largest: float64 (G,), the largest magnitude of each group.
        bits: Width of a code.

    Returns:
        int32 (G,); ties prefer the finer exponent.
    """
    lo, hi = code_limits(bits, signed=True)
    covering = _covering_exponents(values, largest, bits)
    errors = []
    for finer in range(_FINER + 1):
        y = values * power_of_two(covering + finer)[:, None]
        rounded = torch.round(y)
        # in units of the covering scale, to avoid overflow and underflow
        errors.append(((y - rounded.clamp(lo, hi)) * 0.5**finer) ** 2)
    sums = _order_free_sums(torch.stack(errors))
    best, least = covering + _FINER, sums[_FINER]
    for finer in range(_FINER - 1, -1, -1):
        better = sums[finer] < least
        best = torch.where(better, covering + finer, best)
        least = torch.where(better, sums[finer], least)
    return best.clamp(-127, 126)


def _order_free_sums(errors: Tensor) -> Tensor:
    """Sum over the last dimension with a result that does not depend on the order of summation.

    Every term is rounded to a multiple of a quantum that makes all partial sums exact in float64.
    A CPU and a GPU therefore choose the same scales.

    Args:
        errors: float64 (candidates, G, K), non-negative.

    Returns:
        float64 (candidates, G), in units of each group's quantum.
    """
    count = max(errors.shape[-1], 1)
    exponent = torch.frexp(errors.amax(dim=(0, 2)) if errors.shape[-1] else errors.sum((0, 2)))[1]
    shift = 52 - (count - 1).bit_length() - exponent
    return torch.round(errors * power_of_two(shift)[None, :, None]).sum(dim=-1)
