"""Run plans on a GPU. One launch runs the recurrence of a sequence, in both directions."""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.cuda.graph_capture import capturing
from kernel_runtime.cuda.launch import Grid, Kernel, Machine
from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import CellPlan, WeightPart
from quant_gru.kernels._native import Form, Method
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.projection import int_mm
from quant_gru.kernels.cuda.projection.from_codes import projection
from quant_gru.kernels.cuda.projection.select import select
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.cuda.structs import (
    KINDS,
    RECURRENT_C,
    STEP_C,
    GenericC,
    ProjectC,
    SequenceC,
)

_THREADS = 256

# Numbers are kept as long as the weight part that they were derived from.
_packed: weakref.WeakKeyDictionary[Any, tuple[Any, Numbers]] = weakref.WeakKeyDictionary()


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
    machine: Machine | None = None,
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
    machine: Machine | None = None,
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
    if machine is None:
        from quant_gru.kernels.cuda.machine import machine_of

        machine = machine_of(x.device)
    clusters = machine.clusters()
    # the kernel is compiled with or without held units, so these directions cannot share a launch
    alike = [calls] if len({call.held is None for call in calls}) == 1 else [[c] for c in calls]
    for group, form in itertools.chain(*(planner.launches_of(each, N, clusters) for each in alike)):
        shape = planner.choose(form, group[0].numbers.H, N, len(group), clusters)
        if shape is None:
            for call in group:
                (_run_steps if form.narrow else _run_generic)(call, machine)
        else:
            _run_persistent(group, form, shape, machine)
    return [(call.out, call.last) for call in calls]


class _Call:
    """Tensors and numbers for running one direction."""

    def __init__(self, direction: Direction, x: Tensor, lengths: Tensor | None) -> None:
        plan = direction.plan
        T, N, C = x.shape
        H = plan.hidden_size
        rows = N if lengths is None else lengths.numel()
        if plan.input_size != C or direction.h0.shape != (N, H) or rows != N:
            raise QuantGRUError(
                f"Expected x of {plan.input_size} features, h0 of shape ({N}, {H}) and {N} "
                f"lengths, got x of {C}, h0 of shape {tuple(direction.h0.shape)} and {rows} lengths"
            )
        device = plan.weights.W.device
        if x.device != device or direction.h0.device != device:
            raise QuantGRUError(
                f"Expected codes to be on the plan's device {device}, got {x.device} and "
                f"{direction.h0.device}"
            )
        self.numbers = numbers_of(plan)
        self.x = x.to(plan.x.container).contiguous()
        self.h0 = direction.h0.to(plan.h.container).contiguous()
        self.lengths = lengths
        self.reverse = direction.reverse
        held = direction.held
        if held is not None and held.shape != (T, N, H):
            raise QuantGRUError(f"Expected held to be {(T, N, H)}, got {tuple(held.shape)}")
        self.held = None if held is None else held.to(x.device, torch.bool).contiguous()
        self.out = torch.empty((T, N, H), dtype=plan.h.container, device=x.device)
        self.last = torch.empty((N, H), dtype=plan.h.container, device=x.device)

    def sequence(self, workspace: Tensor | None = None) -> ctypes.Structure:
        """Return the addresses and sizes as a kernel argument."""
        T, N, C = self.x.shape
        return SequenceC(
            self.x.data_ptr(),
            self.h0.data_ptr(),
            self.out.data_ptr(),
            self.last.data_ptr(),
            None if self.lengths is None else self.lengths.data_ptr(),
            None if workspace is None else workspace.data_ptr(),
            KINDS[self.x.dtype],
            KINDS[self.h0.dtype],
            T,
            N,
            C,
            self.numbers.H,
            self.reverse,
            None if self.held is None else self.held.data_ptr(),
        )


def numbers_of(plan: CellPlan) -> Numbers:
    """Return the numbers of a plan, which are created at their first use."""
    kept = _packed.get(plan.weights)
    if kept is not None and kept[0]() is plan.frozen:
        return kept[1]
    numbers = Numbers(plan)
    if not capturing(plan.weights.W.device):
        # a captured graph computes nothing before its replay
        _packed[plan.weights] = (weakref.ref(plan.frozen), numbers)
    return numbers


def kept_numbers(part: WeightPart) -> Numbers | None:
    """Return the cached numbers of a weight part, or None."""
    kept = _packed.get(part)
    return None if kept is None else kept[1]


def _run_generic(call: _Call, machine: Machine) -> None:
    """Run a call for widths up to 32 bits, in 128-bit integers, with one block per row."""
    numbers = call.numbers
    _, N, _ = call.x.shape
    space = torch.empty((N, 2, numbers.H), dtype=torch.int64, device=call.x.device)
    W, R = numbers.transposed
    macros = {"QG_WORDS": 1, "QG_RULE": numbers.rule, **numbers.form.products}
    kernel = Kernel.of("recurrence/wide_integers", "generic", macros)
    one = GenericC(call.sequence(space), W, R, numbers.frozen.cells["double"])
    machine.launch(kernel, Grid((N, 1), _THREADS), (GenericC * 2)(one, one))


def _run_steps(call: _Call, machine: Machine) -> None:
    """Run a call with a GEMM and a kernel per step, for weights that do not fit registers."""
    numbers, form = call.numbers, call.numbers.form
    T, N, _ = call.x.shape
    shape = planner.make_shape(numbers.H, 1, 1, 1, 1)
    Wx = _project(call, shape, machine)
    (weights, folded), m = numbers.gemm[1], numbers.multipliers[1]
    padded, columns = weights.shape
    rows = form.state_bytes * N
    new = functools.partial(torch.empty, device=call.x.device)
    states = new((max(rows, int_mm.FEWEST_ROWS), padded), dtype=torch.int8)
    if padded > numbers.H:
        states.zero_()
    p: Any = ProjectC(call.sequence())
    p.s.x, p.s.x_kind, p.s.C, p.s.T = p.s.h0, p.s.h_kind, numbers.H, 1
    p.bytes, p.padded_C, p.planes_x = states.data_ptr(), padded, form.state_bytes
    p.x_offset = numbers.h_offset
    machine.launch(*int_mm.split(N, padded), p)
    product = new((states.shape[0], columns), dtype=torch.int32)
    kernel = Kernel.of(
        "recurrence/per_step",
        "step",
        {"REAL": form.real, "QG_WORDS": int(form.words), **form.products},
    )
    one: Any = STEP_C[form.real](
        call.sequence(),
        m.data_ptr(),
        folded.data_ptr(),
        product.data_ptr(),
        states.data_ptr(),
        Wx.data_ptr(),
        form.state_bytes,
        form.weight_bytes,
        columns,
        padded,
        shape.units // 16,
        form.wide_input,
    )
    one.cell = numbers.frozen.cells[form.real]
    one.before = -1
    grid = Grid((N, -(-numbers.H // _THREADS)), _THREADS)
    for t in reversed(range(T)) if call.reverse else range(T):
        int_mm.multiply_bytes(states, weights, product)
        one.t = t
        machine.launch(kernel, grid, one)
        one.before = t


def _run_persistent(
    calls: Sequence[_Call], form: Form, shape: planner.Shape, machine: Machine
) -> None:
    H, N = calls[0].numbers.H, calls[0].x.shape[1]
    record = RECURRENT_C[form.recurrence.real]
    arguments, keep = [], []
    for call in calls:
        numbers = call.numbers
        Wx = _project(call, shape, machine)
        fragments, bias, m = numbers.fragments(shape.features, shape.units)
        exact = numbers.exact_float[1]
        keep += [Wx, fragments, bias, m, exact]
        one = record(
            call.sequence(),
            fragments.data_ptr(),
            Wx.data_ptr(),
            bias.data_ptr(),
            m.data_ptr(),
            exact.data_ptr(),
        )
        numbers.frozen.fill(one, form)
        arguments.append(one)
    held = calls[0].held is not None
    kernel, grid = planner.layout(shape, form, H, N, len(calls), held)
    machine.launch(kernel, grid, (record * len(calls))(*arguments))


def _project(call: _Call, shape: planner.Shape, machine: Machine) -> Tensor:
    """Return codes of W x less the smallest code, in the order that the recurrence reads."""
    numbers, x = call.numbers, call.x
    T, N, C = x.shape
    Wx = torch.empty(shape.projected_words(numbers.form, T, N), dtype=torch.int32, device=x.device)
    p: Any = ProjectC(call.sequence())
    int_mm.fill(p, numbers, shape, N)
    p.Wx = Wx.data_ptr()
    selection = select(machine, numbers, shape, T, N)
    if selection.method == Method.CODES_FEW_ROWS:
        machine.launch(*int_mm.few_rows(T * N, numbers.H), p)
        return Wx
    weights, _ = int_mm.fill_gemm(p, numbers)
    rows = x.view(T * N, C)
    if x.dtype != torch.int8 or p.padded_C != C or x.data_ptr() % 16:
        rows = torch.empty((p.planes_x * T * N, p.padded_C), dtype=torch.int8, device=x.device)
        p.bytes = rows.data_ptr()
        machine.launch(*int_mm.split(T * N, p.padded_C), p)
    if selection.codes:
        processors = machine.clusters()[1]
        kernel, grid, record, _ = projection(numbers, shape, T, N, selection.codes, processors)
        record.bytes, record.Wx = rows.data_ptr(), Wx.data_ptr()
        machine.launch(kernel, grid, record)
        return Wx
    product = torch.empty((rows.shape[0], p.columns), dtype=torch.int32, device=x.device)
    int_mm.multiply_bytes(rows, weights, product)
    p.product = product.data_ptr()
    machine.launch(*int_mm.requantize(shape, T, N), p)
    return Wx
