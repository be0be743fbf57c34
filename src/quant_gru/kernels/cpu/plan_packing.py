"""Packs plans for the native layers: a dictionary of scalars and tensor addresses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table
from quant_gru.integer.weighted_sum import WeightedSum

NARROW_BITS = 16
_PRE_ACTIVATION = {
    "gate.z_out": "gate.z_pre",
    "gate.r_out": "gate.r_pre",
    "gate.g_out": "gate.g_pre",
}


def exactness(plan: CellPlan) -> dict[str, Any]:
    """Return which arithmetic is exact for a plan.

    Returns:
        'narrow': the fused or the general kernel can run the plan. 'float32': float32 is exact
        for the frozen numbers. 'product': the largest magnitude of a product of two codes.
    """
    w, q = plan.weights, plan.frozen.quantizers
    bits_W, bits_R = w.bits_W, w.bits_R
    several = [each for each in _sums(plan).values() if len(each.multipliers) > 1]
    product = plan.frozen.largest_product
    # One-term sums of any tier are exact in float64: it rounds v * M once if |v| < 2^53.
    narrow = (
        max(quantizer.bits for quantizer in q.values()) <= NARROW_BITS
        and max(bits_W, bits_R) <= NARROW_BITS
        and all(each.tier != "e" for each in several)
        and max(w.bound_Wx, w.bound_Rh) < 1 << 52
        and product < 1 << 53
    )
    # float32 is exact for two-term sums of tier a, products below 2^24 and 24-bit multipliers.
    float32 = (
        narrow
        and all(each.tier == "a" for each in several)
        and product < 1 << 24
        and bits_W + plan.x.bits <= 16
        and bits_R + plan.h.bits <= 16
    )
    return {"narrow": narrow, "float32": float32, "product": float(product)}


def pack(plan: CellPlan) -> dict[str, Any]:
    """Return the argument of `_native.Layer`: numbers, addresses, and the tensors to keep alive."""
    w, q = plan.weights, plan.frozen.quantizers
    tensors: list[Tensor] = []
    exact = exactness(plan)
    narrow = bool(exact["narrow"])
    return {
        **exact,
        "H": plan.hidden_size,
        "C": plan.input_size,
        "x": _boundary(plan.x),
        "h": _boundary(plan.h),
        "one": plan.frozen.one,
        "sums": {name: _sum(each) for name, each in _sums(plan).items()},
        "tables": {
            name: _table(plan.frozen.tables[name], q[pre], tensors)
            for name, pre in _PRE_ACTIVATION.items()
        },
        "W": {
            **_codes(w.W, w.bits_W, narrow, tensors),
            **_projection(w.Bw, plan.shift_Bw, w.Wx, w.bits_W, plan.x, q["matmul.Wx"], tensors),
        },
        "R": {
            **_codes(w.R, w.bits_R, narrow, tensors),
            **_projection(w.Br, plan.shift_Br, w.Rh, w.bits_R, plan.h, q["matmul.Rh"], tensors),
        },
        "keep": tensors,
    }


def _boundary(q: Quantizer) -> dict[str, Any]:
    return {
        "scale": q.scale,
        "zero": q.zero_point,
        "lo": q.lo,
        "hi": q.hi,
        "container": _name(q.container),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pointer(tensor: Tensor, dtype: torch.dtype, keep: list[Tensor]) -> int:
    # The tensors are on the CPU already. `.to` guarantees that no device address reaches native
    # code.
    converted = tensor.to("cpu", dtype).contiguous()
    keep.append(converted)
    return converted.data_ptr()


def _sums(plan: CellPlan) -> dict[str, WeightedSum]:
    """Return all weighted sums of activations by operator name, and zoneout's as 'zoneout'."""
    zoneout = plan.frozen.zoneout
    return {**plan.frozen.sums, **({} if zoneout is None else {"zoneout": zoneout})}


def _sum(each: WeightedSum) -> dict[str, Any]:
    return {
        "M": [int(M) for M in each.multipliers],
        "k": int(each.shift),
        "tier": each.tier,
        "lo": each.lo - each.zero_point,
        "hi": each.hi - each.zero_point,
    }


def _table(table: Table, pre: Quantizer, keep: list[Tensor]) -> dict[str, Any]:
    return {
        "segments": len(table.bounds),
        "degree": table.coefficients.shape[1] - 1,
        "shift": table.shift,
        "segment_shift": -1 if table.segment_shift is None else table.segment_shift,
        "last": table.last,
        "pre_zero": pre.zero_point,
        "pre_lo": pre.lo - pre.zero_point,
        "pre_hi": pre.hi - pre.zero_point,
        "lo": table.lo - table.zero_point,
        "hi": table.hi - table.zero_point,
        "bounds": _pointer(table.bounds, torch.int64, keep),
        "coefficients": _pointer(table.coefficients, torch.int64, keep),
    }


def _codes(codes: Tensor, bits: int, narrow: bool, keep: list[Tensor]) -> dict[str, Any]:
    # For the fast kernels, dtypes equal those of the plan. No copy is made, so the layer sees
    # codes that change in place.
    dtype = torch.int32 if not narrow else torch.int8 if bits <= 8 else torch.int16
    return {"codes": _pointer(codes, dtype, keep), "kind": _name(dtype)}


def _projection(
    bias: Tensor,
    bias_shift: int,
    weighted_sum: WeightedSum,
    weight_bits: int,
    operand: Quantizer,
    result: Quantizer,
    keep: list[Tensor],
) -> dict[str, Any]:
    (M,), k = weighted_sum.multipliers, weighted_sum.shift
    assert isinstance(M, Tensor)
    assert isinstance(k, Tensor)
    return {
        "bias": _pointer(bias, torch.int64, keep),
        "bias_shift": bias_shift,
        "M": _pointer(M, torch.int64, keep),
        "k": _pointer(k, torch.int64, keep),
        "lo": weighted_sum.lo - result.zero_point,
        "hi": weighted_sum.hi - result.zero_point,
        "zero": operand.zero_point,
        "reach": operand.max_abs,
        "weight_bits": weight_bits,
        "operand_bits": operand.bits,
        "operand_signed": operand.signed,
    }
