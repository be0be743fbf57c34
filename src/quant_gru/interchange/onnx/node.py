"""The profiles float and node: the GRU operator of ONNX, without and with QDQ at its border."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.interchange.onnx import real_weights
from quant_gru.interchange.onnx.builder import Builder, Value
from quant_gru.interchange.onnx.qdq import dequantize, quantize
from quant_gru.interchange.onnx.source import Source
from quant_gru.interchange.row_scales import ROWS


def float_layers(
    b: Builder, source: Source, x: Value, h0: Value, lengths: Value | None
) -> tuple[Value, Value]:
    """Add one GRU node a layer, with float weights; as `profiles.add_gru`.

    A frozen GRU has the real values of its codes as weights.
    """
    parts = [
        [
            tuple(b.float32(each.numpy()[None]) for each in _real(source, layer, d))
            for d in range(source.directions)
        ]
        for layer in range(source.num_layers)
    ]
    return _layers(b, source, None, parts, x, h0, lengths)


def node_layers(
    b: Builder, source: Source, plan: GRUPlan, x: Value, h0: Value, lengths: Value | None
) -> tuple[Value, Value]:
    """Add one GRU node a layer, with QDQ of inputs, states, weights and outputs."""
    parts = [[_quantized(b, cell) for cell in layer] for layer in plan.cells]
    return _layers(b, source, plan, parts, x, h0, lengths)


def _real(source: Source, layer: int, direction: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return W (3H, C), R (3H, H) and both biases (6H,) in ONNX's order of rows."""
    if source.weights is None:
        assert source.plan is not None
        cell = source.plan.cells[layer][direction]
        W, R = (real_weights.real(cell, name) for name in ROWS)
        bw, br = (real_weights.bias(cell, name) for name in ROWS)
    else:
        given = source.weights[layer][direction]
        zeros = torch.zeros(3 * source.hidden_size)
        W, R, bw, br = (
            real_weights.in_onnx_order(zeros if each is None else each) for each in given
        )
    return W, R, torch.cat((bw, br))


def _quantized(b: Builder, cell: CellPlan) -> tuple[Value, ...]:
    """Return W (1, 3H, C), R (1, 3H, H) and both biases (1, 6H), from their codes."""
    W, R = (
        b.op("Unsqueeze", real_weights.dequantized(b, cell, name), b.int64([0])) for name in ROWS
    )
    biases = torch.cat([real_weights.bias(cell, name) for name in ROWS])
    return W, R, b.float32(biases.numpy()[None])


def _layers(
    b: Builder,
    source: Source,
    plan: GRUPlan | None,
    parts: Sequence[Sequence[Sequence[Value]]],
    x: Value,
    h0: Value,
    lengths: Value | None,
) -> tuple[Value, Value]:
    if source.zoneout:
        raise QuantGRUError(
            f"Expected a GRU without zoneout for ONNX's GRU operator, got {source.zoneout}; use "
            "profile 'integer' or 'qdq'"
        )
    D, H, count = source.directions, source.hidden_size, source.num_layers
    rows = None if lengths is None else _clamped(b, x, lengths)
    states = [h0] if count == 1 else b.ops("Split", count, h0, axis=0, num_outputs=count)
    last = []
    for layer, cells in enumerate(parts):
        state = states[layer]
        if plan is not None:
            x = _at(b, "input.x", x, [plan.cells[layer][0].x])
            state = _at(b, "output.h", state, [cell.h for cell in plan.cells[layer]])
        W, R, biases = (_joined(b, each, 0) for each in zip(*cells, strict=True))
        direction = "bidirectional" if D == 2 else "forward"
        attributes: dict[str, Any] = {
            "hidden_size": H,
            "linear_before_reset": 1,
            "direction": direction,
        }
        y, h = b.ops("GRU", 2, x, W, R, biases, rows, state, **attributes)
        if plan is not None:
            # (T, D, N, H) and (D, N, H)
            quantizers = [cell.h for cell in plan.cells[layer]]
            y = _at(b, "output.h", y, quantizers, axis=1)
            h = _at(b, "output.h", h, quantizers)
        last.append(h)
        x = b.op("Reshape", b.op("Transpose", y, perm=[0, 2, 1, 3]), b.int64([0, 0, D * H]))
    return x, _joined(b, last, 0)


def _clamped(b: Builder, x: Value, lengths: Value) -> Value:
    """Return lengths in 0..T, which runtimes demand, as int32; see `layers.steps_that_run`."""
    # ONNX Runtime 1.23 has Clip of int64 wrong on AVX-512
    T = b.cast(b.op("Squeeze", b.size(x, 0), b.int64([0])), "DOUBLE")
    return b.cast(b.op("Clip", b.cast(lengths, "DOUBLE"), b.float64(0), T), "INT32")


def _at(b: Builder, name: str, v: Value, quantizers: Sequence[Quantizer], axis: int = 0) -> Value:
    """Return `v` rounded to codes, with one quantizer for each index of an axis, or for all."""
    if all(each == quantizers[0] for each in quantizers):
        return dequantize(b, name, quantize(b, name, v, quantizers[0]), quantizers[0])
    count = len(quantizers)
    parts = b.ops("Split", count, v, axis=axis, num_outputs=count)
    rounded = [
        dequantize(b, name, quantize(b, name, part, each), each)
        for part, each in zip(parts, quantizers, strict=True)
    ]
    return _joined(b, rounded, axis)


def _joined(b: Builder, parts: Sequence[Value], axis: int) -> Value:
    return parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=axis)
