"""An ONNX model of one GRU: a sequence at a time, or a step at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quant_gru.errors import QuantGRUError
from quant_gru.interchange.onnx.builder import (
    CONTAINERS,
    OPSET,
    Builder,
    Value,
    graph_input,
    infer_shapes,
    model_of,
    onnx_ir,
    static_size,
)
from quant_gru.interchange.onnx.notes import write_notes
from quant_gru.interchange.onnx.profiles import (
    CELLS,
    add_gru,
    cell_step,
    node_step,
    plan_of,
    zero_states,
)
from quant_gru.interchange.onnx.source import Source


@dataclass(frozen=True)
class Form:
    """What a file is like beside its profile.

    Attributes:
        opset: Version of ONNX's operators.
        batch: Rows; None for any number.
        time: Steps; None for any number.
        optional_states: Whether the states of a step have their start as default.
    """

    opset: int = OPSET
    batch: int | None = None
    time: int | None = None
    optional_states: bool = False

    @property
    def is_fixed(self) -> bool:
        """Whether a size is fixed."""
        return self.batch is not None or self.time is not None


def sequence_model(
    source: Source, profile: str, states: bool, lengths: bool, form: Form = Form()
) -> Any:
    """Return the onnx_ir model of a GRU that reads whole sequences.

    Inputs are 'input' (T, N, C), or (N, T, C) if the GRU is `batch_first`, and, if asked for, 'hx'
    (layers * directions, N, H) and 'lengths' int64 (N,). Outputs are 'output' and 'h_n'.

    Args:
        source: The GRU.
        profile: See `PROFILES`.
        states: Whether there is an input 'hx'.
        lengths: Whether there is an input 'lengths'.
        form: Opset and fixed sizes.
    """
    b = Builder(opset=form.opset)
    D, H, C = source.directions, source.hidden_size, source.input_size
    N, T = form.batch or "batch", form.time or "time"
    sizes = (N, T) if source.batch_first else (T, N)
    x = graph_input("input", "FLOAT", *sizes, C)
    hx = graph_input("hx", "FLOAT", source.num_layers * D, N, H)
    rows = graph_input("lengths", "INT64", N)
    inputs = [x, *([hx] if states else []), *([rows] if lengths else [])]
    data = b.op("Transpose", x, perm=[1, 0, 2]) if source.batch_first else x
    data.dtype, data.shape = x.dtype, onnx_ir().Shape([T, N, C])
    h0 = hx if states else zero_states(b, source, data)
    y, h_n = add_gru(b, source, profile, data, h0, rows if lengths else None)
    y = b.op("Transpose", y, perm=[1, 0, 2]) if source.batch_first else y
    outputs: dict[str, tuple[Value, str, tuple[int | str, ...]]] = {
        "output": (y, "FLOAT", (*sizes, D * H)),
        "h_n": (h_n, "FLOAT", (source.num_layers * D, N, H)),
    }
    return _finished(b, inputs, outputs, source, profile, form)


def cell_model(source: Source, profile: str, states: bool, form: Form = Form()) -> Any:
    """Return the onnx_ir model of a cell: 'input' (N, C), 'hx' (N, H) if asked for -> 'output'.

    Args:
        source: The cell.
        profile: See `PROFILES`.
        states: Whether there is an input 'hx'.
        form: Opset, and a fixed batch.
    """
    b, N = Builder(opset=form.opset), form.batch or "batch"
    x = graph_input("input", "FLOAT", N, source.input_size)
    hx = graph_input("hx", "FLOAT", N, source.hidden_size)
    data = b.op("Unsqueeze", x, b.int64([0]))
    data.shape = onnx_ir().Shape([1, N, source.input_size])
    h0 = b.op("Unsqueeze", hx, b.int64([0])) if states else zero_states(b, source, data)
    y, _ = add_gru(b, source, profile, data, h0, None)
    after = b.op("Squeeze", y, b.int64([0]))
    outputs = {"output": (after, "FLOAT", (N, source.hidden_size))}
    return _finished(b, [x, hx] if states else [x], outputs, source, profile, form)


def step_model(source: Source, profile: str, form: Form = Form()) -> Any:
    """Return the onnx_ir model of one step of a GRU.

    Inputs are 'input' float32 (N, C) and 'state_l0', .. (N, H), codes of output.h of each layer.
    Outputs are 'output' float32 (N, H) and 'state_l0_out', .., in the same types.

    Args:
        source: A GRU of one direction.
        profile: See `PROFILES`.
        form: Opset, a fixed batch, and whether states have defaults.

    Raises:
        QuantGRUError: The GRU is bidirectional.
    """
    if source.directions != 1:
        raise QuantGRUError(
            "Expected a GRU of one direction to stream, got a bidirectional one: its reverse "
            "direction starts at the end of the sequence"
        )
    b = Builder(opset=form.opset)
    plan, N = plan_of(source, profile), form.batch or "batch"
    x = graph_input("input", "FLOAT", N, source.input_size)
    quantizers = [layer[0].h for layer in plan.cells]
    sizes = (N, source.hidden_size)
    # a default has one row, and ONNX Runtime takes sizes of one name for equal
    rows = "batch_or_1" if form.optional_states and form.batch is None else N
    states = [
        graph_input(f"state_l{layer}", CONTAINERS[str(h.container)], rows, source.hidden_size)
        for layer, h in enumerate(quantizers)
    ]
    add = cell_step if profile in CELLS else node_step
    given = [_for_all_rows(b, x, state) for state in states] if form.optional_states else states
    y, after = add(b, source, profile, x, given)
    outputs = {"output": (y, "FLOAT", sizes)}
    for layer, (h, codes) in enumerate(zip(quantizers, after, strict=True)):
        outputs[f"state_l{layer}_out"] = (codes, CONTAINERS[str(h.container)], sizes)
    model = _finished(b, [x, *states], outputs, source, profile, form)
    if form.optional_states:
        for state, h in zip(states, quantizers, strict=True):
            kind = str(h.container).removeprefix("torch.")
            start = np.full((form.batch or 1, source.hidden_size), h.zero_point, kind)
            state.const_value = onnx_ir().tensor(start, name=state.name)
            model.graph.initializers[state.name] = state
    return model


def _for_all_rows(b: Builder, x: Value, state: Value) -> Value:
    """Return states (N, H) of the rows of x (N, C); one row is the start of all of them."""
    if static_size(x, 0) is not None:
        return state
    rows = b.sizes(b.size(x, 0), 1)
    # ONNX Runtime has no Expand of 16-bit integers
    dtype = state.dtype.name
    wide = state if dtype.endswith("64") else b.cast(state, "INT32")
    return b.cast(b.op("Expand", wide, rows), dtype)


def _finished(
    b: Builder, inputs: Any, outputs: Any, source: Source, profile: str, form: Form
) -> Any:
    model = model_of(b, inputs, outputs)
    if form.is_fixed:
        infer_shapes(model)
    write_notes(model, profile, {"": source})
    return model
