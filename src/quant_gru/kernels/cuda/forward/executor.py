"""Run plans on a GPU. One launch runs the recurrence of a sequence, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import CellPlan
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernels import _native
from quant_gru.kernels.cuda import machine as machines
from quant_gru.kernels.cuda import planned_launches
from quant_gru.kernels.cuda.plan.cell import Cell, filled
from quant_gru.kernels.cuda.projection.select import POLICY, chip_of
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.shapes import check_run


@dataclass(frozen=True)
class Direction:
    """One layer and direction to run.

    Attributes:
        plan: Its plan.
        h0: Codes of output.h before the first step (N, H).
        reverse: Whether steps run from the last to the first.
        held: bool (T, N, H): units that keep their state in a step; or None.
    """

    plan: CellPlan
    h0: Tensor
    reverse: bool
    held: Tensor | None = None


def run(
    plan: CellPlan,
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None = None,
    reverse: bool = False,
    machine: Device | None = None,
    held: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one layer and direction, with the results of `quant_gru.integer.cell.run`.

    Args:
        plan: The plan, on x's device.
        x: Codes of input.x (T, N, C), any integer dtype.
        h0: Codes of output.h (N, H), any integer dtype.
        lengths: int64 (N,) or None.
        reverse: Whether steps run from the last to the first.
        machine: The GPU that runs the kernels; None for x's GPU.
        held: bool (T, N, H): units that keep their state in a step (zoneout); or None.
    """
    return run_directions([Direction(plan, h0, reverse, held)], x, lengths, machine)[0]


def run_directions(
    directions: Sequence[Direction],
    x: Tensor,
    lengths: Tensor | None = None,
    machine: Device | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Run the directions of a layer over the same codes, in one launch if possible.

    Args:
        directions: One or two directions.
        x: Codes of input.x (T, N, C), any integer dtype, by the first direction's quantizer. A
            direction with another quantizer of input.x needs a call of its own.
        lengths: int64 (N,) or None.
        machine: The GPU that runs the kernels; None for x's GPU.

    Returns:
        For each direction, codes of output.h after each step (T, N, H) and after the last step
        (N, H).
    """
    T, N, _ = x.shape
    lengths = None if lengths is None else lengths.to(x.device, torch.int64).contiguous()
    calls = [_Call(each, x, lengths) for each in directions]
    if not (T and N):
        for call in calls:
            call.last.copy_(call.h0)
        return [(call.out, call.last) for call in calls]
    _run(calls, machine or machines.machine_of(x.device))
    return [(call.out, call.last) for call in calls]


class _Call:
    """Tensors and numbers for running one direction."""

    def __init__(self, direction: Direction, x: Tensor, lengths: Tensor | None) -> None:
        plan = direction.plan
        (T, N, _), H = x.shape, plan.hidden_size
        check_run(plan, x, direction.h0, lengths, direction.held)
        device = plan.weights.W.device
        if x.device != device or direction.h0.device != device:
            raise QuantGRUError(
                f"Expected codes to be on the plan's device {device}, got {x.device} and "
                f"{direction.h0.device}"
            )
        self.cell = Cell(plan)
        self.x = x.to(plan.x.container).contiguous()
        self.h0 = direction.h0.to(plan.h.container).contiguous()
        self.lengths = lengths
        self.reverse = direction.reverse
        held = direction.held
        self.held = None if held is None else held.to(x.device, torch.bool).contiguous()
        self.out = torch.empty((T, N, H), dtype=plan.h.container, device=x.device)
        self.last = torch.empty((N, H), dtype=plan.h.container, device=x.device)

    @property
    def native(self) -> _native.CodeSequence:
        """The sequence as an argument of `_native.code_launches_of`."""
        held = 0 if self.held is None else self.held.data_ptr()
        h0, out, last = (each.data_ptr() for each in (self.h0, self.out, self.last))
        return self.x.data_ptr(), h0, out, last, self.reverse, held


def _run(calls: Sequence[_Call], machine: Device) -> None:
    """Run the directions of a layer, whose codes have at least one step and row."""
    x, lengths = calls[0].x, calls[0].lengths
    T, N, _ = x.shape
    keep: list[Any] = []
    with filled([call.cell for call in calls], machine), planner.our_errors():
        launches, space = _native.code_launches_of(
            [call.cell.native(keep) for call in calls],
            chip_of(machine),
            T,
            N,
            [call.native for call in calls],
            POLICY,
        )
    workspace = torch.empty(space, dtype=torch.int8, device=x.device)
    bases = [0] * planned_launches.BLOCKS
    bases[planned_launches.LENGTHS] = 0 if lengths is None else lengths.data_ptr()
    bases[planned_launches.SPACE] = workspace.data_ptr()
    known: Any = None
    kernel: Any = None
    for launch in launches:
        source, function, macros, grid, *_, product = launch
        if product is not None:
            call = calls[product[0]]
            weights = call.cell.arrays.weights(product[1], *product[3:5])
            planned_launches.product_in(workspace, call.x.flatten(0, 1), weights, product)
            continue
        if macros is not known:
            # launches of one kernel have the same dictionary
            known, kernel = macros, Kernel.of(source, function, macros)
        arguments = planned_launches.arguments_of(launch)
        planned_launches.point(launch, arguments, bases)
        machine.launch(kernel, planner.grid_of(grid), arguments)
