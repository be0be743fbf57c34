"""The numbers of a cell in the form of gru_arithmetic.h, each with the integers that are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table
from quant_gru.integer.weighted_sum import WeightedSum

DIRECT = 256  # codes up to which every table has one entry per code
BYTES = ("1", "2", "4", "8")  # loops of weights of up to 8 bits
_WORD, _LONG = 1 << 31, 1 << 62


@dataclass(frozen=True)
class Sum:
    """A weighted sum of one or two terms, as `qg_sum`."""

    M1: int
    M2: int
    z1: int
    z2: int
    k: int
    bits: int
    small: int
    zero: int
    lo: int
    hi: int


def sum_of(
    s: WeightedSum,
    bounds: Sequence[int],
    zeros: Sequence[int],
    factors: tuple[int, int] | None = None,
) -> Sum:
    """Return a sum with the narrowest integers that hold it.

    Args:
        s: The weighted sum.
        bounds: The largest magnitude of each term, without its zero point.
        zeros: The zero point to take off each term; 0 for products.
        factors: The largest magnitude of each factor, if the sum is one product.
    """
    assert isinstance(s.shift, int)
    Ms, k = [int(M) for M in s.multipliers], s.shift
    if k < 0 and sum(max(M, 1) * V for M, V in zip(Ms, bounds, strict=True)) << -k < _LONG >> 1:
        Ms, k = [M << -k for M in Ms], 0
    while k > 0 and not any(M & 1 for M in Ms):
        Ms, k = [M >> 1 for M in Ms], k - 1
    total = sum(max(M, 1) * V for M, V in zip(Ms, bounds, strict=True))
    half = 1 << (k - 1) if k > 0 else 0
    small = (total >> max(k, 0)) + 1 + abs(s.zero_point) < _WORD
    room = half + (abs(s.zero_point) << max(k, 0))
    bits = 128
    if s.rounding == "double":
        pass  # two steps: the sum goes the way of wide ones
    elif 0 <= k <= 30 and total + room < _WORD and small:
        bits = 32
    elif 0 <= k <= 60 and total + room < _LONG >> 1:
        bits = 64
    if bits == 64 and factors is not None and (high := _high(Ms[0], k, factors, s.zero_point)):
        M, times, k = high
        return Sum(M, times, 0, 0, k, 33, 1, s.zero_point, s.lo, s.hi)
    Ms.append(0)
    zeros = [*zeros, 0]
    return Sum(
        Ms[0], Ms[1], zeros[0], zeros[1], k, bits, int(small), s.zero_point, s.lo, s.hi
    )  # fmt: skip


def _high(M: int, k: int, factors: tuple[int, int], zero: int) -> tuple[int, int, int] | None:
    """Return multipliers of both factors and a shift beyond 32; None if they do not fit 32 bits."""
    need = max(0, 33 - k)
    k += need
    high = (M * factors[0] * factors[1] << need) >> 32
    if k > 60 or high + 1 + (1 << (k - 33)) + (abs(zero) << (k - 32)) >= _WORD:
        return None
    for Ms in ((M, 1), (1, M)):
        room = [(_WORD - 1) // (m * V) for m, V in zip(Ms, factors, strict=True) if m * V]
        if len(room) < 2 or min(room) < 1:
            continue
        second = min(need, room[1].bit_length() - 1)
        if need - second < room[0].bit_length():
            return Ms[0] << (need - second), Ms[1] << second, k
    return None


@dataclass(frozen=True)
class Rows:
    """A matrix product with its requantization, as `qg_rows` and one of the loops.

    Attributes:
        loop: '1', '2', '4', '8', '16', '32' or 'wide': the function in gru_products.h.
        weights: Codes (3H, K).
        bias: Start of each accumulator, modulo 2^32 or 2^64.
        offset: Taken off the operand's codes.
        bits: Which requantization.
        k: Shift of all rows.
        Ms: Multiplier of each row.
        ks: Shift of each row.
        bias_shift: Unit of the bias in the wide loop.
        zero: Zero point of the result.
        lo: Smallest code.
        hi: Largest code.
        largest: The largest sum of |weight * operand| of any row.
        bytes: Bytes of an element of the operand beside weights of up to 8 bits, 1 or 2.
        pairs: Bits of sums of two rows of 8-bit weights, as `qg_rows`.
    """

    loop: str
    weights: Tensor
    bias: list[int]
    offset: int
    bits: int
    k: int
    Ms: list[int]
    ks: list[int]
    bias_shift: int
    zero: int
    lo: int
    hi: int
    largest: int
    bytes: int
    pairs: int


def rows_of(
    W: Tensor, B: Tensor, bias_shift: int, s: WeightedSum, operand: Quantizer, weight_bits: int
) -> Rows:
    """Return a matrix product with the narrowest loop that is exact.

    Args:
        W: Weight codes (3H, K).
        B: Biases in 2^bias_shift accumulator units (3H,).
        bias_shift: The unit of the biases.
        s: The weighted sum with one multiplier and shift for each row.
        operand: Quantizer of the vector.
        weight_bits: Width of the weights.
    """
    (M,), shift = s.multipliers, s.shift
    assert isinstance(M, Tensor)
    assert isinstance(shift, Tensor)
    Ms, ks = [int(m) for m in M.tolist()], [int(k) for k in shift.tolist()]
    codes = W.to(torch.int64).cpu()
    sums, sizes = codes.sum(1).tolist(), codes.abs().sum(1).tolist()
    biases = [int(b) for b in B.tolist()]
    bounds = [
        size * operand.max_abs + (abs(b) << bias_shift)
        for size, b in zip(sizes, biases, strict=True)
    ]
    bits, k, scaled = _requantization(bounds, Ms, ks, s.zero_point, s.rounding == "double")
    # unsigned codes of a full word become signed
    full = not operand.signed and operand.bits in (8, 16, 32)
    offset = 1 << (operand.bits - 1) if full else 0
    stored = max(abs(operand.lo - offset), abs(operand.hi - offset))
    largest = max(sizes) * stored
    if bits == 128 or bias_shift:
        loop, bits, offset = "wide", 128, operand.zero_point
    elif weight_bits <= 8 and operand.bits <= 16 and max(*bounds, largest) < _WORD:
        # the loop for 4 bits has sums of 16 times a row
        small = weight_bits <= 4 and max(*bounds, largest) < _WORD >> 4
        loop = str({1: 1, 2: 2}.get(weight_bits, 4)) if small else "8"
    elif weight_bits <= 16 and operand.bits <= 16:
        loop = "16"
    else:
        loop = "32"
    if loop != "wide":
        modulus = 32 if loop in BYTES else 64
        biases = [
            wrapped(b - (operand.zero_point - offset) * total, modulus)
            for b, total in zip(biases, sums, strict=True)
        ]
    return Rows(
        loop,
        codes,
        biases,
        offset,
        bits,
        k,
        Ms if bits > 64 else scaled,
        ks,
        bias_shift,
        s.zero_point,
        s.lo,
        s.hi,
        largest,
        1 if operand.bits <= 8 else 2,
        _pairs(loop, largest, stored * W.shape[1]),
    )


def _pairs(loop: str, largest: int, operands: int) -> int:
    """Return `pairs` of qg_rows.

    Args:
        loop: As `Rows` has it.
        largest: The largest sum of |weight * operand| of any row.
        operands: The largest sum of |operand|.
    """
    if loop == "8":
        return 32 if largest < 1 << 23 else 48 if 255 * operands < _WORD else 64
    if 255 * operands >= _WORD:
        return 64
    return 32 if largest < 1 << 19 else 48


def paired(weights: Tensor) -> list[int]:
    """Return 8-bit weights (3H, K) as words in tiles of 4 rows and 4 columns.

    A half word is 256 * A + (B + 128), for rows A and B of a tile and one column.
    """
    rows, columns = (-(-size // 4) * 4 for size in weights.shape)
    full = torch.zeros(rows, columns, dtype=torch.int64, device="cpu")
    full[: weights.shape[0], : weights.shape[1]] = weights
    # tile, pair, row of the pair, block, word, half
    tiles = full.reshape(rows // 4, 2, 2, columns // 4, 2, 2)
    halves = (256 * tiles[:, :, 0] + tiles[:, :, 1] + 128) & 0xFFFF
    words = halves[..., 0] | halves[..., 1] << 16
    return [int(word) for word in words.permute(0, 2, 1, 3).flatten().tolist()]


def _requantization(
    bounds: Sequence[int], Ms: Sequence[int], ks: Sequence[int], zero: int, in_steps: bool
) -> tuple[int, int, list[int]]:
    """Return `bits` of qg_rows, and the shift and multipliers where all rows share a shift."""
    k, scaled = max(ks), [M << (max(ks) - k) for M, k in zip(Ms, ks, strict=True)]
    while k > 0 and not any(M & 1 for M in scaled):
        scaled, k = [M >> 1 for M in scaled], k - 1
    if k < 0:
        scaled, k = [M << -k for M in scaled], 0
    largest = max(bound * M for bound, M in zip(bounds, scaled, strict=True))
    half = 1 << (k - 1) if k else 0
    small = (largest >> k) + 1 + abs(zero) < _WORD
    if not in_steps and max(bounds) < _WORD and max(scaled) < _WORD and small:
        if k <= 30 and largest + half + (abs(zero) << k) < _WORD:
            return 32, k, scaled
        up = max(0, 33 - k)
        high = ((largest << up) >> 32) + 1 + (1 << (k + up - 33)) + (abs(zero) << (k + up - 32))
        if k + up <= 60 and max(scaled) << up < _WORD and high < _WORD:
            return 33, k + up, [M << up for M in scaled]
    if (
        not in_steps
        and max(scaled) < _WORD
        and k <= 60
        and largest + half + (abs(zero) << k) < _LONG
    ):
        return 64, k, scaled
    if max(bound * M for bound, M in zip(bounds, Ms, strict=True)) < _LONG:
        return 65, 0, list(Ms)
    return 128, 0, list(Ms)


def _split(weights: Tensor) -> int:
    """Return how many columns of 8-bit weights (3H, K) are in tiles of 16."""
    return (weights.shape[1] + 7) // 16 * 16


def tiled(weights: Tensor) -> list[int]:
    """Return 8-bit weights (3H, K) in tiles of 4 rows and 16 columns, padded with zeros.

    Each 4 rows end with a tile of 8 columns if 1 to 8 columns are left.
    """
    split = _split(weights)
    last = 8 if weights.shape[1] > split else 0
    height = -(-weights.shape[0] // 4) * 4
    full = torch.zeros(height, split + last, dtype=torch.int64, device="cpu")
    full[: weights.shape[0], : weights.shape[1]] = weights
    tiles = full[:, :split].reshape(height // 4, 4, split // 16, 16).transpose(1, 2)
    ends = full[:, split:].reshape(height // 4, 4 * last)
    return [int(code) for code in torch.cat((tiles.flatten(1), ends), 1).flatten().tolist()]


def words_of(rows: int, columns: int, bits: int) -> int:
    """Return how many words `in_words` makes: tiles of 4 rows, a word for 8 / bits columns."""
    return -(-rows // 4) * -(-columns // (8 // bits))


def in_words(weights: Tensor, bits: int) -> list[int]:
    """Return weights (3H, K) of 4, 2 or 1 bits as words, see qg_product_words."""
    pairs, half = 4 // bits, 1 << (bits - 1)
    rows, columns = weights.shape
    height, width = -(-rows // 4) * 4, -(-columns // (2 * pairs)) * 2 * pairs
    full = torch.zeros(height, width, dtype=torch.int64, device="cpu")
    full[:rows, :columns] = weights
    full += half
    if bits == 4:
        full[3::4] ^= half
    # tile, row, word, pair, half word
    tiles = full.reshape(height // 4, 4, width // (2 * pairs), pairs, 2)
    r, k, h = torch.arange(4)[:, None, None, None], torch.arange(pairs)[:, None], torch.arange(2)
    words = (tiles << (16 * h + (4 * k + r) * bits)).sum((1, 3, 4))
    return [int(word) for word in words.flatten().tolist()]


def tiled_nibbles(weights: Tensor) -> list[int]:
    """Return weights (3H, K) of 4 bits in the tiles of `tiled`, two rows in a byte."""
    height = -(-weights.shape[0] // 4) * 4
    full = torch.zeros(height, weights.shape[1], dtype=torch.int64, device="cpu")
    full[: weights.shape[0]] = weights
    bytes_ = 16 * full[1::2] + full[::2] + 8
    # the tiles have 4 rows each: those of two groups of 4 rows of weights are one after the other
    split = _split(weights)
    last = 8 if weights.shape[1] > split else 0
    padded = torch.zeros(height // 2, split + last, dtype=torch.int64, device="cpu")
    padded += 8  # codes 0
    padded[:, : weights.shape[1]] = bytes_
    tiles = padded[:, :split].reshape(height // 4, 2, split // 16, 16).transpose(1, 2)
    ends = padded[:, split:].reshape(height // 4, 2 * last)
    return [int(code) for code in torch.cat((tiles.flatten(1), ends), 1).flatten().tolist()]


def tiled_digits(weights: Tensor, bits: int) -> list[int]:
    """Return weights (3H, K) of 2 or 1 bits in tiles of 4 rows, see qg_product_digits."""
    rows, columns = weights.shape
    split, half = _split(weights), 1 << (bits - 1)
    last = 8 if columns > split else 0
    height = -(-rows // 4) * 4
    full = torch.zeros(height, split + last, dtype=torch.int64, device="cpu")
    full[:rows, :columns] = weights
    digits = (full + half).reshape(height // 4, 4, split + last)
    if bits == 2:
        digits[:, 3] ^= half
    codes = (digits << (bits * torch.arange(4))[:, None]).sum(1)
    tiles, ends = codes[:, :split].reshape(height // 4, split // 16, 16), codes[:, split:]
    if bits == 1:
        if tiles.shape[1] % 2:
            tiles = torch.cat((tiles, torch.zeros_like(tiles[:, :1])), 1)
        tiles = tiles[:, ::2] | tiles[:, 1::2] << 4
    found = torch.cat((tiles.flatten(1), ends), 1).flatten()
    return [wrapped(int(code), 8) for code in found.tolist()]


def nibble_biases(rows: Rows) -> list[int]:
    """Return `tiled_biases` where every second one is 16 times itself and the one before it."""
    biases = tiled_biases(rows)
    return [
        wrapped(16 * bias + biases[i - 1], 32) if i % 2 else bias for i, bias in enumerate(biases)
    ]


def tiled_biases(rows: Rows) -> list[int]:
    """Return the biases beside `tiled`, where low bytes of operands are less 128 in tiles of 16."""
    more = 128 * rows.weights[:, : _split(rows.weights)].sum(1) * (rows.bytes - 1)
    biases = [wrapped(b + m, 32) for b, m in zip(rows.bias, more.tolist(), strict=True)]
    return biases + [0] * (-len(biases) % 4)


def wrapped(value: int, bits: int) -> int:
    """Return a value modulo 2^bits, signed."""
    half = 1 << (bits - 1)
    return (value + half) % (1 << bits) - half


def entries_of(table: Table, pre: Quantizer) -> tuple[int, list[int]] | None:
    """Return the first code and an output without zero point for each code; None if too many."""
    if pre.hi - pre.lo < DIRECT:
        first, last = pre.lo, pre.hi
    elif table.coefficients.shape[1] == 1 and table.segment_shift == 0:
        first, last = int(table.bounds[0]), table.last
    else:
        return None
    codes = table(torch.arange(first, last + 1, device=table.bounds.device))
    return first, (codes - table.zero_point).tolist()


def sums_of(cell: CellPlan) -> dict[str, Sum]:
    """Return the weighted sums of the gates, by operator; zoneout is 'zoneout'."""
    frozen, q = cell.frozen, cell.frozen.quantizers
    Wx, Rh, h = q["matmul.Wx"], q["matmul.Rh"], q["output.h"]
    z, r, g = q["gate.z_out"], q["gate.r_out"], q["gate.g_out"]
    found: dict[str, Sum] = {}

    def product(name: str, a: int, b: int) -> tuple[int, int]:
        """Return bound and zero point of what a product passes on."""
        if name not in frozen.sums:
            return a * b, 0
        found[name] = sum_of(frozen.sums[name], [a * b], [0], (a, b))
        return q[name].max_abs, q[name].zero_point

    def add(name: str, *terms: tuple[int, int]) -> None:
        bounds, zeros = zip(*terms, strict=True)
        found[name] = sum_of(frozen.sums[name], bounds, zeros)

    of_W, of_R = (Wx.max_abs, Wx.zero_point), (Rh.max_abs, Rh.zero_point)
    add("gate.z_pre", of_W, of_R)
    add("gate.r_pre", of_W, of_R)
    add("gate.g_pre", of_W, product("op.rRh", r.max_abs, Rh.max_abs))
    old = product("op.old_contrib", z.max_abs, h.max_abs)
    new = product("op.new_contrib", frozen.one_minus_z, g.max_abs)
    add("output.h", old, new)
    if frozen.zoneout is not None:
        term = (h.max_abs, h.zero_point)
        found["zoneout"] = sum_of(frozen.zoneout, *zip(term, term, strict=True))
    return found
