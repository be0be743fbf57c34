"""Kernels of a first call begin to compile while its plan is made: weights do not choose them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.backward import Tape, Wanted
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels.cpu import _native
from quant_gru.kernels.cuda.backward.call import PRECISIONS, Call
from quant_gru.kernels.cuda.backward.schedule import Schedule as Backward
from quant_gru.kernels.cuda.driver import Device, machine_of
from quant_gru.kernels.cuda.executor import numbers_of
from quant_gru.kernels.cuda.launch import Grid, Kernel, Multiplication
from quant_gru.kernels.cuda.products import Product
from quant_gru.kernels.cuda.stack import Stack
from quant_gru.kernels.cuda.weights import MEASURE


class Outline:
    """A machine on which nothing is launched: what is prepared begins to compile on a device.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.arch = device.arch
        self.native = _native.Launches(device.native)

    def clusters(self) -> Mapping[int, int]:
        """Those of the device."""
        return self._device.clusters()

    def expect(self, kernel: Kernel) -> None:
        """Begin to compile a kernel."""
        self._device.expect(kernel)

    def launch(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> None:
        """Begin to compile a kernel."""
        self._device.expect(kernel)

    def prepare(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> Outline:
        """Begin to compile a kernel."""
        self._device.expect(kernel)
        return self

    def multiply(self, product: Product) -> Multiplication | None:
        """None: nothing is compiled for products of matrices."""
        return None

    def join(self, launches: Sequence[Any]) -> Outline:
        """Nothing is waited for."""
        return self

    def raise_for(self, status: int) -> None:
        """Nothing is launched."""

    def stream(self) -> int:
        """Nothing is launched."""
        return 0

    def start(self, stream: int) -> None:
        """Nothing is launched."""


def expect_call(
    plan: GRUPlan,
    x: Tensor,
    with_h0: bool,
    with_lengths: bool,
    keeps: bool,
    precision: str | None,
    device: Device | None = None,
) -> None:
    """Begin to compile what a call of whole layers launches.

    Args:
        plan: On a GPU; the numbers of its weights may be any.
        x: float32 (T, N, C), the input, on that GPU.
        with_h0: Whether states before the first step are given.
        with_lengths: Whether lengths are given.
        keeps: Whether the call keeps what a backward needs.
        precision: That of a backward, which follows; None: none is sure to.
        device: That GPU; None for x's.
    """
    machine = Outline(device or machine_of(x.device))
    T, N, _ = x.shape
    if not T * N:
        return
    if keeps:
        # it is the first that is waited for: weights are quantized by it
        machine.expect(MEASURE)
    if not all(numbers_of(cell).form.narrow for cells in plan.cells for cell in cells):
        return
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        Stack(plan, machine).schedule(T, N, with_h0, with_lengths, keeps)
        if precision is not None:
            _expect_backward(plan, x, precision, machine)


def _expect_backward(plan: GRUPlan, x: Tensor, precision: str, machine: Outline) -> None:
    T, N, _ = x.shape
    for index, cells in enumerate(plan.cells):
        inputs = x.detach()
        if index:
            width = len(cells) * cells[0].hidden_size
            inputs = x.new_empty((T, N, width), dtype=cells[0].x.container)
        calls = []
        for d, cell in enumerate(cells):
            out = x.new_empty((T, N, cell.hidden_size), dtype=cell.h.container)
            calls.append(Call(Tape(cell, inputs, None, out, reverse=d == 1), None, None))
        if len({call.key for call in calls}) == 1:
            wanted = Wanted(x=index > 0 or x.requires_grad)
            Backward(calls, wanted, PRECISIONS[precision], machine)
