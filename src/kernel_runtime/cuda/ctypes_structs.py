"""Arguments of kernels and of the driver as structures of C."""

from __future__ import annotations

import ctypes
from typing import Any


def structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    """A structure of C with these fields, in order."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})
