"""GPUs that run the kernels of this package, and the sources of these kernels."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from quant_gru.errors import QuantGRUError
from quant_gru.kernel_runtime.cuda import driver, graph_capture
from quant_gru.kernel_runtime.cuda.sources import Sources
from quant_gru.kernels.cuda.kernel_cache import CACHE

_CUDA = Path(__file__).parent
_KERNELS = _CUDA.parent
SOURCES = Sources(
    _CUDA,
    (
        *((path.relative_to(_CUDA).as_posix(), path) for path in sorted(_CUDA.rglob("*.cuh"))),
        *((f"c99/{path.name}", path) for path in sorted((_KERNELS / "c99").glob("*.h"))),
    ),
    QuantGRUError,
    CACHE,
    os.environ.get("QUANT_GRU_CUDA_GRAPHS") != "0",
)
"""The CUDA sources of this package."""

COLD = "a plan that has not run yet"


def machine_of(device: torch.device) -> driver.Device:
    """Return the GPU of a tensor's device.

    Raises:
        QuantGRUError: Its kernels cannot be compiled or loaded.
    """
    return driver.machine_of(device, SOURCES)


def refuse_in_capture(device: torch.device, what: str) -> None:
    """Raise an error while a CUDA graph is being captured.

    Args:
        device: The device of the work.
        what: Name of the object that cannot be created during capture, for the error message.

    Raises:
        QuantGRUError: A graph is being captured.
    """
    graph_capture.refuse_in_capture(device, what, QuantGRUError)
