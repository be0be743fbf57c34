"""The layout of a call's workspace, and the fields of arguments that contain its addresses."""

from __future__ import annotations

import ctypes
from typing import Any

from quant_gru.kernel_runtime import _native

_ALIGNMENT = 256


class Memory:
    """The layout of one block of memory, and the fields of arguments that point into it.

    Attributes:
        size: Bytes taken so far.
        fields: The fields, in native code.
    """

    def __init__(self) -> None:
        self.size = 0
        self.fields = _native.Fields()
        self._add = self.fields.add
        self.move = self.fields.move
        """move(base): set all fields for a new address of the memory; if it is 0, to null."""

    def take(self, size: int) -> int:
        """Reserve `size` bytes, aligned to 256. Return their offset."""
        start = self.size
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return start

    def point(self, record: Any, name: str, offset: int = 0, index: int = 0) -> None:
        """Register a field, or an element of it, that contains an address of this memory.

        Args:
            record: A structure that must stay alive as long as this object.
            name: Name of the field.
            offset: Offset from the start of this memory, in bytes.
            index: Element of the field.
        """
        at = ctypes.addressof(record) + getattr(type(record), name).offset + 8 * index
        self._add(at, offset)
