"""Launches whose arguments are tensors and numbers that differ between calls, without Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel, Machine
from quant_gru.kernel_runtime.cuda.streams import native_streams


def tensor_launch(
    machine: Machine,
    device: torch.device,
    kernel: Kernel,
    grid: Grid,
    arguments: ctypes.Structure,
    varying: Sequence[str],
) -> _native.TensorLaunch:
    """Prepare a launch of a kernel.

    Args:
        machine: The machine that runs it.
        device: The device of the tensors.
        kernel: The kernel. It is compiled now, if it has not been before.
        grid: Its launch dimensions.
        arguments: Its arguments.
        varying: Fields of the arguments, of 8 bytes each, that differ between calls.

    Returns:
        A function of their values in this order: a tensor stands for its address, None for a null
        pointer, an integer for itself. It starts the kernel on the current stream of the device.
        Threads may share it.
    """
    kind, base = type(arguments), ctypes.addressof(arguments)
    prepared = machine.prepare(kernel, grid, arguments)
    return _native.TensorLaunch(
        prepared.native,
        [base + getattr(kind, name).offset for name in varying],
        torch.Tensor,
        -1 if device.type == "cpu" else device.index,
        native_streams(machine, device)[0],
        machine.raise_for,
        (prepared, arguments),
    )
