"""The launches of a whole call with a given number of steps and rows, prepared once.

A call quantizes its input and runs each layer. The recurrence reads and writes real values of
states, NaN included. Native code plans the launches (host/launches.hpp). A prepared launch has all
its arguments except addresses of the call's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quant_gru.integer.backward import Kept
from quant_gru.integer.call_form import FLOATS, CallForm, Packing
from quant_gru.kernel_runtime.allocators import maker, row_maker
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernel_runtime.cuda.graph_capture import capturing, index_of
from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernel_runtime.cuda.streams import native_streams
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.plan.cell import Cell, filled
from quant_gru.kernels.cuda.plan.structure import KINDS
from quant_gru.kernels.cuda.plan.tensors import Arrays
from quant_gru.kernels.cuda.planned_launches import BLOCKS, Steps, Work, load_gemm, product_in
from quant_gru.kernels.cuda.projection.select import POLICY, chip_of
from quant_gru.kernels.cuda.recurrence import planner

_CONTAINERS = list(KINDS)


Planned: TypeAlias = "tuple[_native.PlannedCall, Sequence[Arrays], list[Any]]"
"""What native code plans for a call, the arrays of each cell, and the owners of memory that
arguments point to."""


def planned(
    machine: Device,
    layers: Sequence[Sequence[Cell]],
    T: int,
    N: int,
    form: CallForm,
    keeps: bool,
) -> Planned | None:
    """Return the launches of calls, or None if weights do not fit registers; see `Schedule`."""
    keep: list[Any] = []
    cells = [cell for layer in layers for cell in layer]
    states = -1 if form.states is None else FLOATS[form.states]
    dtypes = FLOATS[form.values], states, FLOATS[form.results], FLOATS[form.last]
    with filled(cells, machine), planner.our_errors():
        made = _native.launches_of(
            [cell.native(keep) for cell in cells],
            len(layers[0]),
            chip_of(machine),
            T,
            N,
            (*dtypes, form.is_packed),
            keeps,
            POLICY,
            lambda *kernel: machine.expect(Kernel.of(*kernel)),
        )
        arrays = [cell.arrays for cell in cells]
    return None if made is None else (made, arrays, keep)


class Schedule:
    """The launches of a call.

    Args:
        machine: The GPU that runs the kernels.
        layers: Directions of each layer.
        T: Steps.
        N: Rows.
        form: The form of calls.
        keeps: Whether calls keep data for a backward.
        plan: The launches.

    Attributes:
        call: The native call, for tensors that kernels can read directly.
        records: The arguments of the launches.
    """

    def __init__(
        self,
        machine: Device,
        layers: Sequence[Sequence[Cell]],
        T: int,
        N: int,
        form: CallForm,
        keeps: bool,
        plan: Planned,
    ) -> None:
        (launches, space, codes, kept), arrays, keep = plan
        sizes = len(arrays), space, codes
        numbers, self._kept = layers[0][0].numbers, [(at, _CONTAINERS[kind]) for at, kind in kept]
        self._sizes, device = (T, N, numbers.H), numbers.device
        inputs: list[tuple[int, int, int]] = []
        # batches of packed rows have their own x and orders of rows
        changing = (0, 8, 9) if form.is_packed else ()
        steps, multiplies = Steps(machine, BLOCKS, changing), False
        for launch in launches:
            *_, reads, product = launch
            if product is not None:
                steps.add(_product(arrays[product[0]], product))
                multiplies = True
                continue
            base = steps.launch(launch)
            if reads is not None:
                step, following, fours = reads
                inputs.append((base + step, base + following, fours and base + fours))
        self.records = steps.records
        if multiplies and not capturing(device):
            # load cuBLAS while kernels compile; the next statement waits for them
            load_gemm(device)
        self.call = _native.Call(
            steps.native(keep),
            inputs,
            numbers.C,
            space,
            self._makers(form, len(layers[0]) * numbers.H, sizes, keeps, device),
            Tensor,
            index_of(device),
            native_streams(machine.stream, device),
        )

    def _makers(
        self,
        form: CallForm,
        width: int,
        sizes: tuple[int, int, int],
        keeps: bool,
        device: torch.device,
    ) -> list[Callable[..., Tensor]]:
        """Return the allocators of a call's tensors, in the order of native code.

        `sizes` are the number of states, and bytes of the workspace and of codes.
        """
        (T, N, H), (states, space, all_codes) = self._sizes, sizes
        made: list[Callable[..., Tensor]] = [
            maker((T, N, width), device, form.results),
            row_maker(width, device, form.results)
            if form.is_packed
            else maker((N, T, width), device, form.results, (width, N * width, 1)),
            maker((states, N, H), device, form.last),
            maker((space,), device, torch.int8),
        ]
        if keeps:
            # codes of a single cell are a tensor of their own
            single = maker((T, N, H), device, self._kept[0][1])
            codes = single if states == 1 else maker((all_codes,), device, torch.int8)
            made += [maker((states, N), device), codes]
        return made

    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
        kept: Kept | None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Start all launches. Arguments and results are those of `Stack.run`."""
        if lengths is not None:
            lengths = lengths.to(x.device, torch.int64).contiguous()
        result: Any = self.call.run(x, h0, lengths, packing)
        if result is NotImplemented:
            if x.stride(-1) != 1 or x.is_neg():
                x = x.detach().resolve_neg().contiguous()
            if h0 is not None:
                h0 = h0.detach().contiguous().resolve_neg()
            result = self.call.run(x, h0, lengths, packing)
        if kept is not None:
            _, _, kept.nan, codes = result
            kept.out += self.codes_of(codes)
        return result[0], result[1]

    def codes_of(self, codes: Tensor) -> list[Tensor]:
        """Return the codes of states of each cell, which are parts of the tensor `codes`."""
        if len(self._kept) == 1:
            return [codes]
        (T, N, H), found = self._sizes, []
        for start, container in self._kept:
            part = codes if container is torch.int8 else codes.view(container)
            at = start // container.itemsize
            found.append(part.as_strided((T, N, H), (N * H, H, 1), at))
        return found


def _product(arrays: Arrays, product: _native.PlannedProduct) -> Work:
    weights = arrays.weights(product[1], *product[3:5])
    return lambda space, _: product_in(space, None, weights, product)
