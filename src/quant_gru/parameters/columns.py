"""Integers in as few bits as they need, one column after the other.

A column begins with its number of bits (1 byte) and its least value (8 bytes). Then follow the
values less the least one, least significant bit first, without gaps, up to a whole byte.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant_gru.errors import ParameterError

Integers = NDArray[np.int64]
_HEAD = struct.Struct("<Bq")
_AT_ONCE = 1 << 16  # a multiple of 8, so that parts end with whole bytes


def pack_bits(values: Integers, bits: int) -> bytes:
    """Return the lowest `bits` bits of each value, 1 to 64, without gaps."""
    parts = []
    for first in range(0, len(values), _AT_ONCE):
        some = np.ascontiguousarray(values[first : first + _AT_ONCE], dtype="<i8")
        each = np.unpackbits(some.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
        parts.append(np.packbits(each[:, :bits].ravel(), bitorder="little").tobytes())
    return b"".join(parts)


def unpack_bits(raw: bytes, count: int, bits: int, dtype: type[Any] = np.int64) -> NDArray[Any]:
    """Return `count` values of `pack_bits`, not negative below 64 bits."""
    values = np.empty(count, dtype=dtype)
    for first in range(0, count, _AT_ONCE):
        some = values[first : first + _AT_ONCE]
        part = np.frombuffer(raw, np.uint8, packed_size(len(some), bits), first * bits // 8)
        each = np.unpackbits(part, count=len(some) * bits, bitorder="little")
        found = np.packbits(each.reshape(-1, bits), axis=1, bitorder="little")
        full = np.zeros((len(some), 8), dtype=np.uint8)
        full[:, : found.shape[1]] = found
        some[:] = full.view("<i8").ravel()
    return values


def packed_size(count: int, bits: int) -> int:
    """Return the bytes of `count` values of `bits` bits."""
    return -(-count * bits // 8)


def column(values: Sequence[int] | Integers) -> bytes:
    """Return the bytes of a column."""
    found = np.asarray(values, dtype=np.int64)
    least = int(found.min()) if len(found) else 0
    bits = max(1, (int(found.max()) - least).bit_length()) if len(found) else 1
    with np.errstate(over="ignore"):
        return _HEAD.pack(bits, least) + pack_bits(found - least, bits)


class Reader:
    """Reads columns one after the other.

    Args:
        raw: Their bytes.
        where: Their source, for messages.
    """

    def __init__(self, raw: bytes, where: str) -> None:
        self._raw, self._where, self._at = raw, where, 0

    def column(self, count: int) -> Integers:
        """Return the next column of `count` values.

        Raises:
            ParameterError: There are fewer bytes than it takes.
        """
        head = self._take(_HEAD.size)
        bits, least = _HEAD.unpack(head)
        if not 1 <= bits <= 64:
            raise ParameterError(
                f"Expected columns of 1 to 64 bits, got {bits} at byte {self._at} ({self._where})"
            )
        values = unpack_bits(self._take(packed_size(count, bits)), count, bits)
        with np.errstate(over="ignore"):
            return np.asarray(values + np.int64(least))

    def finish(self) -> None:
        """Raise ParameterError if bytes are left."""
        if self._at != len(self._raw):
            raise ParameterError(
                f"Expected {self._at} bytes of columns, got {len(self._raw)} ({self._where})"
            )

    def _take(self, size: int) -> bytes:
        if size > len(self._raw) - self._at:
            raise ParameterError(
                f"Expected at least {self._at + size} bytes of columns, got {len(self._raw)} "
                f"({self._where})"
            )
        found = self._raw[self._at : self._at + size]
        self._at += size
        return found
