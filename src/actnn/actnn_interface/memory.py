"""How much memory tensors and processes take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actnn import codec
from actnn.errors import ActNNError
from actnn.planning.sizes import format_bytes


def compute_tensor_bytes(tensors: Any) -> int:
    """Bytes of tensors and codes, also in lists, tuples and mappings; each storage once.

    Raises:
        ActNNError: If there is something else in it.

    Example:
        >>> compute_tensor_bytes([torch.zeros(10), torch.zeros(3, dtype=torch.int8)])
        43
    """
    return sum(_storages(tensors, {}).values())


def _storages(item: Any, found: dict[int, int]) -> dict[int, int]:
    if isinstance(item, Tensor):
        storage = item.untyped_storage()
        # A view may use a part of its storage only; several views never more than all of it.
        used = min(storage.nbytes(), found.get(storage._cdata, 0) + item.nbytes)
        found[storage._cdata] = used
    elif isinstance(item, codec.Codes):
        _storages((item.data, item.params), found)
    elif isinstance(item, Mapping):
        _storages(list(item.values()), found)
    elif isinstance(item, (list, tuple)):
        for each in item:
            _storages(each, found)
    elif item is not None and not isinstance(item, (bool, int, float)):
        raise ActNNError(f"Expected tensors in lists, tuples or mappings, got {type(item)}")
    return found


def get_memory_usage(print_info: bool = False, device: torch.device | str | None = None) -> int:
    """Bytes in use: all tensors on a GPU; the resident memory of the process without one.

    Args:
        print_info: Whether to print it.
        device: A CUDA device; None for the current one.

    Example:
        >>> used = get_memory_usage()
    """
    if torch.cuda.is_available():
        used = torch.cuda.memory_allocated(device)
    else:
        pages = Path("/proc/self/statm")
        if not pages.exists():
            raise ActNNError("Expected a CUDA device or Linux to measure memory, got neither")
        used = int(pages.read_text().split()[1]) * 4096
    if print_info:
        print(f"in use: {format_bytes(used)}")
    return used
