"""Memory that a call takes, and the addresses in arguments that follow it from call to call."""

from __future__ import annotations

import ctypes
from typing import Any

from kernel_runtime import _native

_ALIGNMENT = 256


class Memory:
    """One piece of memory: how much, and which fields of arguments point into it.

    Attributes:
        fields: Those fields, in native code.
    """

    def __init__(self) -> None:
        self.size = 0
        self.fields = _native.Fields()
        self._add = self.fields.add
        self.move = self.fields.move
        """move(base): set all fields to the memory at a new address; where that is 0, to null."""

    def take(self, size: int) -> int:
        """Room for some bytes; returns where it starts."""
        start = self.size
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return start

    def point(self, record: Any, name: str, offset: int = 0, index: int = 0) -> None:
        """Let a field, or an element of it, hold an address of this memory.

        Args:
            record: A structure that lives as long as this.
            name: Its field.
            offset: Bytes from the start of this memory.
            index: Element of the field.
        """
        at = ctypes.addressof(record) + getattr(type(record), name).offset + 8 * index
        self._add(at, offset)
