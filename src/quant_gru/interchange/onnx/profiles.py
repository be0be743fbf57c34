"""The five profiles, by name: each adds all layers of a GRU to a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.interchange.onnx.boundary import code_real, real_code
from quant_gru.interchange.onnx.builder import CONTAINERS, Builder, Value
from quant_gru.interchange.onnx.integer import IntegerCell
from quant_gru.interchange.onnx.layers import Cell, sequence, split_states
from quant_gru.interchange.onnx.node import float_layers, node_layers
from quant_gru.interchange.onnx.operator import operator_layers
from quant_gru.interchange.onnx.qdq import QdqCell
from quant_gru.interchange.onnx.source import Source

PROFILES = ("integer", "qdq", "float", "node", "operator")
EXACT = ("integer", "operator")  # these give the codes of the plan
CELLS: dict[str, Callable[[CellPlan], Cell]] = {"integer": IntegerCell, "qdq": QdqCell}


def check_profile(profile: str) -> None:
    """Raise for a name that is no profile.

    Raises:
        QuantGRUError: `profile` is not one of `PROFILES`.
    """
    if profile not in PROFILES:
        raise QuantGRUError(f"Expected profile to be one of {PROFILES}, got {profile!r}")


def plan_of(source: Source, profile: str) -> GRUPlan:
    """Return the plan of a GRU.

    Raises:
        QuantGRUError: It has none, or a weight that is not finite.
    """
    if source.plan is None:
        raise QuantGRUError(
            f"Expected a calibrated GRU for profile {profile!r}, got one without scales; call "
            "calibrate(data) and finalize_calibration() first"
        )
    if source.plan.is_far and profile not in EXACT:
        raise QuantGRUError(
            f"Expected a zero point of input.x that is a code for profile {profile!r}, got "
            f"{source.plan.cells[0][0].border.zero_point} (input_excludes_zero); use profile "
            "'integer' (operator 'input.x')"
        )
    if not source.plan.rounds_to_even and profile not in EXACT:
        cell = source.plan.cells[0][0]
        rules = f"{cell.frozen.rounding!r}, {cell.border.rounding!r}"
        raise QuantGRUError(
            f"Expected rounding and rounding_input to be 'half_even' for profile {profile!r}, as "
            f"QuantizeLinear is, got {rules}; use profile 'integer'"
        )
    for layer in source.plan.cells:
        for cell in layer:
            if not bool(cell.weights.finite):
                raise QuantGRUError("Expected finite weights to export, got NaN or infinity in one")
    return source.plan


def cells_of(source: Source, profile: str) -> list[list[Cell]]:
    """Return the cells of all layers and directions in profile 'integer' or 'qdq'."""
    kind = CELLS[profile]
    return [[kind(cell) for cell in layer] for layer in plan_of(source, profile).cells]


def add_gru(
    b: Builder, source: Source, profile: str, x: Value, h0: Value, lengths: Value | None
) -> tuple[Value, Value]:
    """Add all layers and directions.

    Args:
        b: The builder.
        source: The GRU.
        profile: One of `PROFILES`.
        x: float32 (T, N, C).
        h0: float32 (layers * directions, N, H).
        lengths: int64 (N,), or None if all rows have T steps.

    Returns:
        Output (T, N, D*H), 0 beyond the end of a row, and last states
        (layers * directions, N, H), float32.
    """
    check_profile(profile)
    if profile == "float":
        return float_layers(b, source, x, h0, lengths)
    plan = plan_of(source, profile)
    if profile == "node":
        return node_layers(b, source, plan, x, h0, lengths)
    if profile == "operator":
        return operator_layers(b, source, x, h0, lengths)
    return sequence(b, plan, cells_of(source, profile), x, h0, lengths)


def zero_states(b: Builder, source: Source, x: Value) -> Value:
    """Return float32 zeros (layers * directions, N, H) for x (T, N, C)."""
    states = source.num_layers * source.directions
    return b.op("Expand", b.float32(0), b.sizes(states, b.size(x, 1), source.hidden_size))


def cell_step(
    b: Builder, source: Source, profile: str, x: Value, states: Sequence[Value]
) -> tuple[Value, list[Value]]:
    """Add one step of all layers in profile 'integer' or 'qdq'.

    Args:
        b: The builder.
        source: A GRU of one direction.
        profile: 'integer' or 'qdq'.
        x: float32 (N, C).
        states: Codes of output.h of each layer (N, H), in their containers.

    Returns:
        Output float32 (N, H), and the codes of all states after the step.
    """
    plan = plan_of(source, profile)
    cells = [layer[0] for layer in cells_of(source, profile)]
    v, after = cells[0].read(b, x), []
    for layer, (cell, codes) in enumerate(zip(cells, states, strict=True)):
        if layer:
            v = cell.join(b, plan.between[layer - 1][0], [cells[layer - 1].plan.h], [v])
        _, h = cell.after(b, v, cell.from_codes(b, codes))
        v, y = cell.shown(b, h)
        after.append(cell.to_codes(b, h))
    return y, after


def node_step(
    b: Builder, source: Source, profile: str, x: Value, states: Sequence[Value]
) -> tuple[Value, list[Value]]:
    """Add one step in a profile of GRU nodes, which read one step; as `cell_step`."""
    plan = plan_of(source, profile)
    quantizers = [layer[0].h for layer in plan.cells]
    real = [
        b.op("Unsqueeze", code_real(b, codes, h), b.int64([0]))
        for codes, h in zip(states, quantizers, strict=True)
    ]
    h0 = real[0] if len(real) == 1 else b.op("Concat", *real, axis=0)
    y, h_n = add_gru(b, source, profile, b.op("Unsqueeze", x, b.int64([0])), h0, None)
    after = [
        real_code(b, h, quantizer, CONTAINERS[str(quantizer.container)])
        for h, quantizer in zip(split_states(b, h_n, len(states)), quantizers, strict=True)
    ]
    return b.op("Squeeze", y, b.int64([0])), after
