"""An ONNX model of one GRU: a sequence at a time, or a step at a time."""

from __future__ import annotations

from typing import Any

from quant_gru._errors import QuantGRUError
from quant_gru.export.onnx.builder import Builder, Value, model_of, onnx_ir
from quant_gru.export.onnx.integer import CONTAINERS
from quant_gru.export.onnx.profiles import (
    CELLS,
    add_gru,
    cell_step,
    node_step,
    plan_of,
    zero_states,
)
from quant_gru.export.onnx.source import Source


def graph_input(name: str, dtype: str, *shape: int | str) -> Value:
    """Return an input of a graph; sizes that are names are dynamic."""
    ir = onnx_ir()
    found: Value = ir.Value(
        name=name, type=ir.TensorType(ir.DataType[dtype]), shape=ir.Shape(shape)
    )
    return found


def sequence_model(source: Source, profile: str, states: bool, lengths: bool) -> Any:
    """Return the onnx_ir model of a GRU that reads whole sequences.

    Inputs are 'input' (T, N, C), or (N, T, C) if the GRU is `batch_first`, and, if asked for, 'hx'
    (layers * directions, N, H) and 'lengths' int64 (N,). Outputs are 'output' and 'h_n'.

    Args:
        source: The GRU.
        profile: See `PROFILES`.
        states: Whether there is an input 'hx'.
        lengths: Whether there is an input 'lengths'.
    """
    b = Builder()
    D, H, C = source.directions, source.hidden_size, source.input_size
    sizes = ("batch", "time") if source.batch_first else ("time", "batch")
    x = graph_input("input", "FLOAT", *sizes, C)
    hx = graph_input("hx", "FLOAT", source.num_layers * D, "batch", H)
    rows = graph_input("lengths", "INT64", "batch")
    inputs = [x, *([hx] if states else []), *([rows] if lengths else [])]
    data = b.op("Transpose", x, perm=[1, 0, 2]) if source.batch_first else x
    h0 = hx if states else zero_states(b, source, data)
    y, h_n = add_gru(b, source, profile, data, h0, rows if lengths else None)
    y = b.op("Transpose", y, perm=[1, 0, 2]) if source.batch_first else y
    outputs: dict[str, tuple[Value, str, tuple[int | str, ...]]] = {
        "output": (y, "FLOAT", (*sizes, D * H)),
        "h_n": (h_n, "FLOAT", (source.num_layers * D, "batch", H)),
    }
    return model_of(b, inputs, outputs)


def step_model(source: Source, profile: str) -> Any:
    """Return the onnx_ir model of one step of a GRU.

    Inputs are 'input' float32 (N, C) and 'state_l0', .. (N, H), codes of output.h of each layer.
    Outputs are 'output' float32 (N, H) and 'state_l0_out', .., in the same types.

    Args:
        source: A GRU of one direction.
        profile: See `PROFILES`.

    Raises:
        QuantGRUError: The GRU is bidirectional.
    """
    if source.directions != 1:
        raise QuantGRUError(
            "Expected a GRU of one direction to stream, got a bidirectional one: its reverse "
            "direction starts at the end of the sequence"
        )
    b = Builder()
    plan = plan_of(source, profile)
    x = graph_input("input", "FLOAT", "batch", source.input_size)
    quantizers = [layer[0].h for layer in plan.cells]
    sizes = ("batch", source.hidden_size)
    states = [
        graph_input(f"state_l{layer}", CONTAINERS[str(h.container)], *sizes)
        for layer, h in enumerate(quantizers)
    ]
    add = cell_step if profile in CELLS else node_step
    y, after = add(b, source, profile, x, states)
    outputs = {"output": (y, "FLOAT", sizes)}
    for layer, (h, codes) in enumerate(zip(quantizers, after, strict=True)):
        outputs[f"state_l{layer}_out"] = (codes, CONTAINERS[str(h.container)], sizes)
    return model_of(b, [x, *states], outputs)
