"""The launches of a layer's backward, prepared once per size; a call only gives addresses.

Native code plans them (host/layer_backward.hpp).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.backward import Gradients, Wanted
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward.inputs import Call, Precision, weights_of
from quant_gru.kernels.cuda.backward.steps import add_steps, matrix_in
from quant_gru.kernels.cuda.planned_launches import BLOCKS, SPACE, Steps
from quant_gru.kernels.cuda.recurrence import planner

POLICY = _native.BackwardPolicy()
"""What experiments change, such as the most bytes of integer sums."""
VARIABLES = ("QUANT_GRU_CUDA_BACK_SHAPE", "QUANT_GRU_CUDA_BACK_GRID")
"""Environment variables that override shapes of recurrences, see host/plans/backward_shapes.hpp."""

_FIRST, _SLOTS = BLOCKS + 1, 27  # of directions, in the numbers of native code


class Schedule:
    """The launches for calls of one size, for the directions of a layer.

    Args:
        calls: The first calls of that size, one per direction.
        wanted: Which gradients to compute.
        precision: How gradients are multiplied.
        machine: The machine that runs the kernels.

    Attributes:
        size: Bytes of a call's memory.
    """

    def __init__(
        self, calls: Sequence[Call], wanted: Wanted, precision: Precision, machine: Device
    ) -> None:
        first = calls[0]
        self._sizes = (first.T, first.N, first.C, first.H)
        self._wanted, self._machine = wanted, machine
        # weights that calls had, and their addresses
        self._parts: list[tuple[weakref.ref[Any], list[int]] | None] = [None for _ in calls]
        with planner.our_errors():
            planned, self._states, size = _native.layer_backward_of(
                [call.native for call in calls],
                first.T,
                first.N,
                (wanted.x, wanted.W, wanted.R, wanted.bw, wanted.br),
                astuple(precision),
                machine.clusters(),
                POLICY,
            )
        made = _FIRST + _SLOTS * len(calls)
        steps = Steps(machine, made + 3 * len(calls))
        self.size = add_steps(steps, planned, size, SPACE, made)
        self._steps = steps.native(None)

    def run(self, calls: Sequence[Call]) -> list[Gradients]:
        """Compute all gradients of a call."""
        device, (T, N, C, H), wanted = calls[0].device, self._sizes, self._wanted
        dirs = len(calls)
        memory = torch.empty(self.size, dtype=torch.int8, device=device)
        dh0 = torch.empty((dirs * N, H), dtype=torch.float32, device=device)
        db = torch.empty((2 * dirs, 3 * H), dtype=torch.float32, device=device)
        given = ((wanted.x, (T, N, C)), (wanted.W, (3 * H, C)), (wanted.R, (3 * H, H)))
        made = [
            torch.empty(shape, dtype=torch.float32, device=device) if asked else None
            for _ in calls
            for asked, shape in given
        ]
        bases = [0] * _FIRST
        bases[SPACE] = memory.data_ptr()
        # tensors that must live until all kernels are launched
        keep: list[Any] = []
        for d, call in enumerate(calls):
            bases += map(_address, call.tensors.values())
            bases += (
                dh0.data_ptr() + 4 * d * N * H,
                *(each.data_ptr() for each in db[2 * d :][:2]),
            )
            bases += self._weights(d, call, keep)
            bases += (*call.strides, *call.grad_out.stride())
        bases += map(_address, made)
        self._steps.start(self._machine.stream(), bases, memory, made)
        del keep
        biases, states = db.unbind(), [dh0] if dirs == 1 else dh0.chunk(dirs)
        return [
            Gradients(
                made[3 * d],
                states[d],
                made[3 * d + 1],
                made[3 * d + 2],
                biases[2 * d] if wanted.bw else None,
                biases[2 * d + 1] if wanted.br else None,
                matrix_in(memory, self._states[d]).clone().view(T, N, H) if wanted.h else None,
            )
            for d in range(dirs)
        ]

    def _weights(self, d: int, call: Call, keep: list[Any]) -> list[int]:
        """Return the addresses of a direction's weights.

        Args:
            d: The direction.
            call: Its call.
            keep: Receives tensors that must live until all kernels are launched.
        """
        kept = self._parts[d]
        if kept is not None and kept[0]() is call.plan.weights:
            return kept[1]
        found, own = weights_of(call.plan)
        addresses = [each.data_ptr() for each in found.values()]
        self._parts[d] = (weakref.ref(call.plan.weights), addresses) if own else None
        keep.append(found)
        return addresses


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
