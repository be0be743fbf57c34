"""Packs plans for native code: dictionaries of numbers and tensor addresses."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan, FrozenPart, WeightPart, bias_limit, bias_shift
from quant_gru.integer.qparams import QParams
from quant_gru.integer.quantizer import Quantizer, code_limits, container_dtype
from quant_gru.integer.rounding import NUMBERS
from quant_gru.integer.tables import Table
from quant_gru.integer.weighted_sum import WeightedSum, significant_bits

QuantizerTuple = tuple[int, bool, float, int]
"""Bits, whether codes are signed, scale and zero point."""


def pack(plan: CellPlan) -> dict[str, Any]:
    """Return the argument of `_native.Layer`: numbers, addresses, and the tensors to keep alive."""
    w = plan.weights
    gates = pack_gates(plan.frozen)
    tensors = gates["keep"]
    return {
        **gates,
        "H": plan.hidden_size,
        "C": plan.input_size,
        "W": _matrix(w.W, w.bits_W, w.Bw, w.Wx, tensors),
        "R": _matrix(w.R, w.bits_R, w.Br, w.Rh, tensors),
    }


def pack_gates(frozen: FrozenPart) -> dict[str, Any]:
    """Return the numbers of `pack` that do not depend on weights."""
    tensors: list[Tensor] = []
    zoneout = {} if frozen.zoneout is None else {"zoneout": frozen.zoneout}
    return {
        "one": frozen.one,
        "rounding": NUMBERS[frozen.rounding],
        "rounding_input": NUMBERS[frozen.border.rounding],
        "quantizers": {name: pack_quantizer(q) for name, q in frozen.quantizers.items()},
        "sums": {name: _sum(each) for name, each in {**frozen.sums, **zoneout}.items()},
        "tables": {name: _table(table, tensors) for name, table in frozen.tables.items()},
        "keep": tensors,
    }


def pack_weights(plan: CellPlan, keep: list[Tensor]) -> dict[str, Any]:
    """Return what a backward reads of a plan, besides its layer: weights and scales.

    Args:
        plan: The plan. Its tensors must keep their addresses.
        keep: Receives the tensors that the caller must keep alive.
    """
    w, q = plan.weights, plan.frozen.quantizers
    W_scales, R_scales = w.scales["weight.W"], w.scales["weight.R"]
    return {
        **_pointers(keep, w.W.dtype, w.R.dtype, W=w.W, R=w.R),
        **_pointers(keep, *[torch.float32] * 2, W_scales=W_scales, R_scales=R_scales),
        "W_bytes": w.W.element_size(),
        "R_bytes": w.R.element_size(),
        "s_x": plan.x.scale,
        "s_h": plan.h.scale,
        "s_Rh": q["matmul.Rh"].scale,
        "s_z": q["gate.z_out"].scale,
        "s_r": q["gate.r_out"].scale,
        "s_g": q["gate.g_out"].scale,
    }


def pack_update(qparams: QParams, frozen: FrozenPart, part: WeightPart) -> dict[str, Any]:
    """Return what an update of a weight part writes, and the numbers it needs."""
    return {
        "H": part.W.shape[0] // 3,
        "free": qparams.config.scale_kind == "free",
        "finite": part.finite.data_ptr(),
        "W": _target(0, qparams, frozen, part),
        "R": _target(1, qparams, frozen, part),
    }


def _target(which: int, qparams: QParams, frozen: FrozenPart, part: WeightPart) -> dict[str, Any]:
    """Return the part of W (0) or R (1) and of its bias."""
    weight, bias = (("weight.W", "weight.bw"), ("weight.R", "weight.br"))[which]
    codes, b_codes = ((part.W, part.bw), (part.R, part.br))[which]
    B, sums = ((part.Bw, part.Wx), (part.Br, part.Rh))[which]
    (M,), k = sums.multipliers, sums.shift
    assert isinstance(M, Tensor)
    assert isinstance(k, Tensor)
    mean = None if which else qparams.input_mean
    q, bits = frozen.quantizers, part.bits_R if which else part.bits_W
    operand = q["output.h" if which else "input.x"]
    errors, factors = (None, None) if mean is None else mean.on(codes.device, bits)
    return {
        "n": codes.shape[1],
        "bits": bits,
        "b_bits": qparams.config.operators[bias].bitwidth or 1,
        "codes": codes.data_ptr(),
        "b_codes": b_codes.data_ptr(),
        "b_bytes": b_codes.element_size(),
        "scales": part.scales[weight].data_ptr(),
        "b_scales": part.scales[bias].data_ptr(),
        "B": B.data_ptr(),
        "M": M.data_ptr(),
        "k": k.data_ptr(),
        "operand_scale": operand.scale,
        "result_scale": q["matmul.Rh" if which else "matmul.Wx"].scale,
        "b_unit": float(1 << bias_shift(bits, operand.bits)),
        "limit": float(bias_limit(bits, operand.bits)),
        "significant": significant_bits(bits + operand.bits),
        # the mean, which the parameters keep, keeps the factors
        "factors": 0 if factors is None else factors.data_ptr(),
        "term_limit": 0.0 if errors is None else errors.limit,
        "unit_exponent": 0 if errors is None else errors.exponent,
    }


pack_quantizer: Callable[[Quantizer], QuantizerTuple] = attrgetter(
    "bits", "signed", "scale", "zero_point"
)
"""Returns a quantizer as native code reads it."""


def pack_requantizer(
    weighted_sum: WeightedSum, below: Quantizer, above: Quantizer
) -> tuple[int, int, QuantizerTuple, QuantizerTuple, int]:
    """Return the conversion of codes of `below` to codes of `above` as native code reads it."""
    k, (M,) = _sum(weighted_sum)
    rule = NUMBERS[weighted_sum.rounding]
    return k, M, pack_quantizer(below), pack_quantizer(above), rule


def _pointers(keep: list[Tensor], *dtypes: torch.dtype, **tensors: Tensor) -> dict[str, int]:
    found = {}
    for (name, tensor), dtype in zip(tensors.items(), dtypes, strict=True):
        # The tensors are on the CPU already. `.to` guarantees that no device address reaches native
        # code.
        converted = tensor.to("cpu", dtype).contiguous()
        keep.append(converted)
        found[name] = converted.data_ptr()
    return found


def _sum(each: WeightedSum) -> tuple[int, list[int]]:
    return int(each.shift), list(map(int, each.multipliers))


def _table(table: Table, keep: list[Tensor]) -> dict[str, Any]:
    return {
        "segments": len(table.bounds),
        "degree": table.coefficients.shape[1] - 1,
        "shift": table.shift,
        "segment_shift": -1 if table.segment_shift is None else table.segment_shift,
        "last": table.last,
        "zero": table.zero_point,
        "lo": table.lo,
        "hi": table.hi,
        **_pointers(keep, *[torch.int64] * 2, bounds=table.bounds, coefficients=table.coefficients),
    }


def _matrix(
    codes: Tensor, bits: int, bias: Tensor, weighted_sum: WeightedSum, keep: list[Tensor]
) -> dict[str, Any]:
    (M,), k = weighted_sum.multipliers, weighted_sum.shift
    assert isinstance(M, Tensor)
    assert isinstance(k, Tensor)
    # This is the dtype of the plan. No copy is made, so the layer sees codes that change in place.
    dtype = container_dtype(*code_limits(bits, signed=True))
    return {
        "bits": bits,
        "kind": str(dtype).removeprefix("torch."),
        **_pointers(keep, dtype, *[torch.int64] * 3, codes=codes, bias=bias, M=M, k=k),
    }
