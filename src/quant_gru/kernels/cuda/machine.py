"""The GPUs that run the kernels of this package."""

from __future__ import annotations

from pathlib import Path

import torch

from kernel_runtime.cuda import driver, graph_capture
from kernel_runtime.cuda.disk_cache import DiskCache
from kernel_runtime.cuda.sources import Sources
from quant_gru._errors import QuantGRUError

_CUDA = Path(__file__).parent
_KERNELS = _CUDA.parent
SOURCES = Sources(
    _CUDA,
    (
        *((path.relative_to(_CUDA).as_posix(), path) for path in sorted(_CUDA.rglob("*.cuh"))),
        *((f"c99/{path.name}", path) for path in sorted((_KERNELS / "c99").glob("*.h"))),
    ),
    QuantGRUError,
    DiskCache("QUANT_GRU_CACHE", "quant-gru"),
)
"""The CUDA sources of this package."""

# kernels without gate arithmetic compile its header, too
PLAIN = {"QG_WORDS": 0, "QG_RRH": 1, "QG_OLD": 1, "QG_NEW": 1, "QG_ZONEOUT": 0}

COLD = "a plan that has not run yet"


def available(device: torch.device) -> bool:
    """Whether the kernels can be compiled for and run on a device."""
    return driver.available(device)


def missing(device: torch.device) -> str | None:
    """Why the kernels do not run on a CUDA device of torch; None where they do."""
    return driver.missing(device)


def machine_of(device: torch.device) -> driver.Device:
    """The GPU that a tensor's device names.

    Raises:
        QuantGRUError: Its kernels cannot be compiled or loaded.
    """
    return driver.machine_of(device, SOURCES)


def refuse_in_capture(device: torch.device, what: str) -> None:
    """Raise where a CUDA graph is being captured.

    Args:
        device: Where work is done.
        what: What cannot be made then, in words.

    Raises:
        QuantGRUError: A graph is being captured.
    """
    graph_capture.refuse_in_capture(device, what, QuantGRUError)
