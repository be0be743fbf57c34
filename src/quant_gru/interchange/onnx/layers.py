"""Layers, directions and lengths around the cells of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.interchange.onnx.builder import Builder, Value, static_size


class Cell(Protocol):
    """One layer and direction in a profile, as `interchange.onnx.integer.IntegerCell` is."""

    plan: CellPlan
    state_type: str
    code_type: str
    collected_type: str

    def read(self, b: Builder, x: Value) -> Value: ...  # noqa: D102
    def join(  # noqa: D102
        self,
        b: Builder,
        sums: Sequence[WeightedSum],
        below: Sequence[Quantizer],
        halves: Sequence[Value],
    ) -> Value: ...
    def project(self, b: Builder, x: Value) -> list[tuple[Value, str, int]]: ...  # noqa: D102
    def start(self, b: Builder, h0: Value) -> Value: ...  # noqa: D102
    def once(  # noqa: D102
        self, b: Builder, x: Value, v: Value | None, h0: Value
    ) -> tuple[Value, Value]: ...
    def after(self, b: Builder, v: Value, h: Value) -> tuple[Value, Value]: ...  # noqa: D102
    def step(self, b: Builder, inputs: Sequence[Value], h: Value) -> Value: ...  # noqa: D102
    def collect(self, b: Builder, h: Value) -> Value: ...  # noqa: D102
    def real(self, b: Builder, collected: Value) -> Value: ...  # noqa: D102
    def shown(self, b: Builder, h: Value) -> tuple[Value, Value]: ...  # noqa: D102
    def keep(self, b: Builder, runs: Value, new: Value, old: Value) -> Value: ...  # noqa: D102
    def from_codes(self, b: Builder, codes: Value) -> Value: ...  # noqa: D102
    def to_codes(self, b: Builder, h: Value) -> Value: ...  # noqa: D102


def sequence(
    b: Builder,
    plan: GRUPlan,
    cells: Sequence[Sequence[Cell]],
    x: Value,
    h0: Value,
    lengths: Value | None,
) -> tuple[Value, Value]:
    """Add all layers and directions, each a Scan over time, or a step if there is one alone.

    Args:
        b: The builder.
        plan: The plan, for the sums between layers.
        cells: The cells of each layer.
        x: float32 (T, N, C).
        h0: float32 (layers * directions, N, H).
        lengths: int64 (N,), or None if all rows have T steps.

    Returns:
        Output (T, N, D*H), and last states (layers * directions, N, H), float32.
    """
    runs = None if lengths is None else steps_that_run(b, x, lengths)
    single, count = static_size(x, 0) == 1, sum(map(len, cells))
    states = [h0] if count == 1 else b.ops("Split", count, h0, axis=0, num_outputs=count)
    last: list[Value] = []
    halves: list[Value] = []
    for layer, directions in enumerate(cells):
        below, halves = halves, []
        for d, cell in enumerate(directions):
            v, state = None, states[len(last)]
            if layer:
                quantizers = [each.plan.h for each in cells[layer - 1]]
                v = cell.join(b, plan.between[layer - 1][d], quantizers, below)
            if single:
                h, collected = step_of(b, cell, x, v, state, runs)
            else:
                v = cell.read(b, x) if v is None else v
                h, collected = scan_of(b, cell, v, state, runs, d == 1, static_size(x, 1))
            last.append(h)
            halves.append(collected)
    if single:
        outputs = last[-len(halves) :]
    else:
        outputs = [cell.real(b, half) for cell, half in zip(cells[-1], halves, strict=True)]
    y = outputs[0] if len(outputs) == 1 else b.op("Concat", *outputs, axis=-1)
    if runs is not None:
        y = b.op("Where", runs, y, b.float32(0))
    h_n = last[0] if len(last) == 1 else b.op("Concat", *last, axis=0)
    return y, b.op("Identity", h_n) if h_n is y else h_n


def split_states(b: Builder, h0: Value, count: int) -> list[Value]:
    """Return (N, H) of each layer and direction from (layers * directions, N, H)."""
    parts = [h0] if count == 1 else b.ops("Split", count, h0, axis=0, num_outputs=count)
    return [b.op("Squeeze", part, b.int64([0])) for part in parts]


def steps_that_run(b: Builder, x: Value, lengths: Value) -> Value:
    """Return bool (T, N, 1), True for the steps of x (T, N, C) before the end of their row.

    Lengths below 0 count as 0, and those beyond T as T.
    """
    T = b.op("Squeeze", b.size(x, 0), b.int64([0]))
    steps = b.op("Unsqueeze", b.op("Range", b.int64(0), T, b.int64(1)), b.int64([1]))
    return b.op("Unsqueeze", b.op("Less", steps, lengths), b.int64([2]))


def step_of(
    b: Builder, cell: Cell, x: Value, v: Value | None, h0: Value, runs: Value | None
) -> tuple[Value, Value]:
    """Add the one step of a layer and direction.

    Args:
        b: The builder.
        cell: The cell.
        x: The input of the first layer, float32 (1, N, C).
        v: The input of another layer, of `join` of the cell.
        h0: float32 (1, N, H).
        runs: Of `steps_that_run`, or None if all rows have the step.

    Returns:
        The state after it, float32 (1, N, H), and what `join` takes of it.
    """
    before, after = cell.once(b, x, v, h0)
    if runs is not None:
        after = cell.keep(b, runs, after, before)
    shown, real = cell.shown(b, after)
    return real, shown


def scan_of(
    b: Builder,
    cell: Cell,
    v: Value,
    h0: Value,
    runs: Value | None,
    reverse: bool,
    rows: int | None,
) -> tuple[Value, Value]:
    """Add the Scan of one layer and direction.

    Args:
        b: The builder.
        cell: The cell.
        v: Of `read` or `join` of the cell.
        h0: float32 (1, N, H).
        runs: Of `steps_that_run`, or None if all rows have all steps.
        reverse: Whether to run from the last step to the first.
        rows: N, if it is known.

    Returns:
        The last state, float32 (1, N, H), and what was collected of all steps.
    """
    axis = b.int64([0])
    state = cell.start(b, b.op("Squeeze", h0, axis))
    last, collected = codes_of_scan(b, cell, v, state, runs, reverse, rows)
    return b.op("Unsqueeze", cell.real(b, cell.collect(b, last)), axis), collected


def codes_of_scan(
    b: Builder,
    cell: Cell,
    v: Value,
    state: Value,
    runs: Value | None,
    reverse: bool,
    rows: int | None = None,
) -> tuple[Value, Value]:
    """Add the Scan of one layer and direction; return its last state and what it collected."""
    H = cell.plan.hidden_size
    inputs = cell.project(b, v)
    if runs is not None:
        inputs = [*inputs, (runs, "BOOL", 1)]

    def body(
        inner: Builder, states: Sequence[Value], given: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        h = states[0]
        after = cell.step(inner, given if runs is None else given[:-1], h)
        if runs is not None:
            after = cell.keep(inner, given[-1], after, h)
        return [after], [cell.collect(inner, after)]

    (last,), (collected,) = b.scan(
        body, [(state, cell.state_type, H)], inputs, [(cell.collected_type, H)], reverse, rows
    )
    return last, collected
