"""Codes and scales of float weights, computed on the weights' device without a host sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quant_gru.integer.quantizer import MAX_SCALE, MIN_SCALE, code_limits, container_dtype

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
    """Return the codes of `w` (3H, ..) with one scale per row: clamp(rint(w / s)).

    The dtype is the container of the codes.
    """
    lo, hi = code_limits(bits, signed=True)
    s = scales.reshape(-1, *([1] * (w.dim() - 1)))
    codes = torch.empty(w.shape, dtype=container_dtype(lo, hi), device=w.device)
    rows = max(block_size(w.device) // max(w[:1].numel(), 1), 1)
    for i in range(0, w.shape[0], rows):
        block = torch.round(w[i : i + rows] / s[i : i + rows])
        codes[i : i + rows] = block.to(torch.float64).clamp(lo, hi).to(torch.int64)
    return codes


def _finish(scales: Tensor, rows: int) -> Tensor:
    scales = torch.where(scales > 0, scales.clamp(MIN_SCALE, MAX_SCALE), 1.0)
    return scales.to(torch.float32).repeat_interleave(rows // scales.shape[0], output_size=rows)


def _group_scales(w: Tensor, bits: int, granularity: str, scale_kind: str) -> tuple[Tensor, Tensor]:
    """Return the scale of each group, float64 (G,), and whether all its weights are zero."""
    groups = _Groups(w.reshape(groups_of(granularity, w.shape[0]), -1), bits)
    if scale_kind == "free":
        scales = _free_scales(groups)
    else:
        scales = power_of_two(-_best_exponents(groups))
    return scales, groups.largest == 0


class _Groups:
    """The weights of groups with one scale each, read in float64 in blocks of limited size.

    Args:
        values: Finite float32 (G, K).
        bits: Width of a code.

    Attributes:
        bits: As given.
        count: K.
        lo: The lowest code.
        hi: The highest code.
        largest: float64 (G,), the largest magnitude of each group.
    """

    def __init__(self, values: Tensor, bits: int) -> None:
        self._values, self.bits, self.count = values, bits, values.shape[1]
        self.lo, self.hi = code_limits(bits, signed=True)
        magnitudes = [block.abs().amax(dim=1) for block in self.blocks()]
        none = torch.zeros(values.shape[0], dtype=torch.float64, device=values.device)
        self.largest = torch.stack([none, *magnitudes]).amax(dim=0)

    def blocks(self) -> Iterator[Tensor]:
        """Yield all weights, float64 (G, columns)."""
        size = block_size(self._values.device) // max(self._values.shape[0], 1)
        for block in self._values.split(max(size, 1), dim=1) if self.count else ():
            yield block.to(torch.float64)


def block_size(device: torch.device) -> int:
    """Return how many weights are quantized at once: few use the cache, many a GPU's threads."""
    return 1 << (18 if device.type == "cpu" else 23)


def _free_scales(groups: _Groups) -> Tensor:
    """Return the free scale of each group with the least squared error.

    The candidates are shares of the covering scale, and the candidates of 'pot'.

    Returns:
        float64 (G,), float32 numbers; ties prefer the larger share, and shares over `pot` scales.
    """
    lo, hi, count, bits = groups.lo, groups.hi, groups.count, groups.bits
    covering = divided(groups.largest, max(hi, 1)).to(torch.float32).to(torch.float64)
    if count < 2 or bits > _SEARCHED_BITS:
        return covering
    least, most = _SEARCHED_SCALES
    searched = (covering >= least) & (covering <= most)
    # the scale of a group that is not searched may be zero
    unit = torch.where(searched, covering, 1.0)
    exponent = _covering_exponents(groups)
    candidates = [(unit * (each / 16)).to(torch.float32).to(torch.float64) for each in _SIXTEENTHS]
    candidates += [
        torch.where(searched, power_of_two((-exponent - finer).clamp(-126, 127)), 1.0)
        for finer in range(_FINER + 1)
    ]
    # errors are at most those of the code 0, and float64 sums are exact in any order
    quantum = 2.0 ** (52 - (count - 1).bit_length() - 2 * bits)
    totals = [torch.zeros_like(unit) for _ in candidates]
    for values in groups.blocks():
        for scale, total in zip(candidates, totals, strict=True):
            y = values / scale[:, None]
            error = (y - torch.round(y).clamp(lo, hi)) * (scale / unit)[:, None]
            total += torch.round(error * error * quantum).sum(dim=1)
    best, fewest = unit, torch.full_like(unit, torch.inf)
    for scale, total in zip(candidates, totals, strict=True):
        better = total < fewest
        best, fewest = torch.where(better, scale, best), torch.where(better, total, fewest)
    return torch.where(searched, best, covering)


def _covering_exponents(groups: _Groups) -> Tensor:
    """Return the largest exp2_inv of each group that clamps no code, int32 (G,)."""
    # |largest| * 2^guess is in [2^(bits-2), 2^(bits-1)). guess + 1 may cover a negative extreme.
    # guess - 1 always covers, except for bits = 1, which has no positive code.
    guess = (groups.bits - 1) - torch.frexp(groups.largest)[1]
    covering = guess - 1
    candidates = (guess, guess + 1)
    covers = [torch.ones_like(guess, dtype=torch.bool) for _ in candidates]
    for values in groups.blocks():
        for exponent, covered in zip(candidates, covers, strict=True):
            rounded = torch.round(values * power_of_two(exponent)[:, None])
            covered &= ((rounded >= groups.lo) & (rounded <= groups.hi)).all(dim=1)
    for exponent, covered in zip(candidates, covers, strict=True):
        covering = torch.where(covered, exponent, covering)
    return covering


def _best_exponents(groups: _Groups) -> Tensor:
    """Return the exp2_inv of each group with the least squared error: covering, or up to 2 finer.

    Returns:
        int32 (G,); ties prefer the finer exponent.
    """
    covering = _covering_exponents(groups)

    def errors() -> Iterator[Tensor]:
        """Yield the squared errors of a block, (candidates, G, columns)."""
        for values in groups.blocks():
            found = []
            for finer in range(_FINER + 1):
                y = values * power_of_two(covering + finer)[:, None]
                rounded = torch.round(y).clamp(groups.lo, groups.hi)
                # in units of the covering scale, to avoid overflow and underflow
                found.append(((y - rounded) * 0.5**finer) ** 2)
            yield torch.stack(found)

    sums = _order_free_sums(errors, groups.largest.expand(_FINER + 1, -1), groups.count)
    best, least = covering + _FINER, sums[_FINER]
    for finer in range(_FINER - 1, -1, -1):
        better = sums[finer] < least
        best = torch.where(better, covering + finer, best)
        least = torch.where(better, sums[finer], least)
    return best.clamp(-127, 126)


def _order_free_sums(errors: Callable[[], Iterator[Tensor]], like: Tensor, count: int) -> Tensor:
    """Sum blocks of errors with a result that does not depend on the order of summation.

    Every term is rounded to a multiple of a quantum that makes all partial sums exact in float64.
    A CPU and a GPU therefore choose the same scales.

    Args:
        errors: errors() -> blocks of non-negative errors, float64 (candidates, G, columns).
        like: float64 (candidates, G), for the shape of the result.
        count: The columns of all blocks.

    Returns:
        float64 (candidates, G), in units of each group's quantum.
    """
    largest = torch.zeros_like(like[0])
    for block in errors():
        largest = torch.maximum(largest, block.amax(dim=(0, 2)))
    shift = 52 - (max(count, 1) - 1).bit_length() - torch.frexp(largest)[1]
    sums = torch.zeros_like(like)
    for block in errors():
        sums += torch.round(block * power_of_two(shift)[None, :, None]).sum(dim=-1)
    return sums
