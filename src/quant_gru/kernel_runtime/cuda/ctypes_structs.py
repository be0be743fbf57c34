"""C structures for arguments of kernels and of the driver."""

from __future__ import annotations

import ctypes
from typing import Any


def structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    """Return a C structure type with these fields, in order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})
