"""Weights and biases of a plan as real values, for profiles that compute in floating point."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import CellPlan, update_first
from quant_gru.interchange.onnx.builder import Builder, Value
from quant_gru.interchange.row_scales import ROWS, row_scales


def codes(plan: CellPlan, name: str) -> Tensor:
    """Return the codes of 'weight.W' or 'weight.R', (3H, K).

    Raises:
        QuantGRUError: They have more than 16 bits.
    """
    w = plan.weights
    bits = w.bits_W if name == "weight.W" else w.bits_R
    if bits > 16:
        raise QuantGRUError(
            f"Expected at most 16 bits for DequantizeLinear, got {bits} (operator {name!r}); "
            "use profile 'integer'"
        )
    return (w.W if name == "weight.W" else w.R).cpu()


def dequantized(b: Builder, plan: CellPlan, name: str, *, unsigned: bool = False) -> Value:
    """Return 'weight.W' or 'weight.R' (3H, K) by DequantizeLinear with a scale for each row.

    Args:
        b: The graph.
        plan: The plan of this layer and direction.
        name: The operator.
        unsigned: Whether int8 codes become uint8 with zero point 128, as activations are.
            Without VNNI, x86 adds products of uint8 and int8 in 16 bits, which saturate.
    """
    numbers, zero = codes(plan, name).numpy(), 0
    if unsigned and numbers.dtype == np.int8:
        numbers, zero = (numbers.astype(np.int16) + 128).astype(np.uint8), 128
    return b.op(
        "DequantizeLinear",
        b.constant(numbers, numbers.dtype),
        b.float32(row_scales(plan, name).numpy()),
        # ONNX Runtime 1.23 needs one for each scale
        b.constant(np.full(len(numbers), zero), numbers.dtype),
        axis=0,
        domain=b.domain_of(numbers.dtype.name),
    )


def bias(plan: CellPlan, name: str) -> Tensor:
    """Return the bias of 'weight.W' or 'weight.R' as the plan has it, float32 (3H,)."""
    w = plan.weights
    B, shift = (w.Bw, plan.shift_Bw) if name == "weight.W" else (w.Br, plan.shift_Br)
    x = plan.frozen.quantizers[ROWS[name][0]]
    unit = row_scales(plan, name).double() * x.scale
    return (B.cpu().double() * 2.0**shift * unit).to(torch.float32)


def bias_fits_int32(plan: CellPlan, name: str) -> bool:
    """Return whether the bias of 'weight.W' or 'weight.R' fits int32 in accumulator units."""
    w = plan.weights
    B, shift = (w.Bw, plan.shift_Bw) if name == "weight.W" else (w.Br, plan.shift_Br)
    return int(B.abs().max()) << shift < 1 << 31


def real(plan: CellPlan, name: str) -> Tensor:
    """Return 'weight.W' or 'weight.R' as real values, float32 (3H, K)."""
    return codes(plan, name).to(torch.float32) * row_scales(plan, name)[:, None]


def in_onnx_order(w: Tensor) -> Tensor:
    """Reorder rows from reset, update, candidate (PyTorch) to update, reset, candidate (ONNX)."""
    return update_first(w.detach().cpu().to(torch.float32))
