"""Launches whose arguments are tensors and numbers that differ between calls, without Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernel_runtime.cuda.graph_capture import index_of
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.streams import native_streams


def tensor_launch(
    machine: Device,
    device: torch.device,
    launches: Sequence[tuple[Kernel, Grid]],
    arguments: ctypes.Structure,
    varying: Sequence[str],
) -> _native.TensorLaunch:
    """Prepare launches of kernels that take the same arguments.

    Args:
        machine: The machine that runs them.
        device: The device of the tensors.
        launches: The kernels, in order, and their launch dimensions. They are compiled now, if they
            have not been before.
        arguments: Their arguments.
        varying: Fields of the arguments, of 8 bytes each, that differ between calls.

    Returns:
        A function of their values in this order: a tensor stands for its address, None for a null
        pointer, an integer for itself. It starts the kernels on the current stream of the device.
        Threads may share it.
    """
    kind, base = type(arguments), ctypes.addressof(arguments)
    prepared = machine.join([machine.prepare(*each, arguments) for each in launches])
    return _native.TensorLaunch(
        prepared.native,
        [base + getattr(kind, name).offset for name in varying],
        torch.Tensor,
        index_of(device),
        native_streams(machine.stream, device)[0],
        machine.raise_for,
        (prepared, arguments),
    )
