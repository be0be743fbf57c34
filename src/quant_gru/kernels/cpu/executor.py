"""Runs a plan on the native kernels: numbers packed once per plan, addresses per call."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch import Tensor

from quant_gru._errors import QuantGRUError
from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernels.cpu import _native

VARIABLE = "QUANT_GRU_CPU"
REFERENCE = "reference"
NARROW_BITS = 16

# Packed weights and packed plans live as long as what they were made of.
_packed: weakref.WeakKeyDictionary[Any, tuple[Any, _native.Plan]] = weakref.WeakKeyDictionary()


def choices() -> list[str]:
    """What `QUANT_GRU_CPU` may say on this machine, the fastest first."""
    return [*_native.variants(True), REFERENCE]


def chosen() -> str:
    """The instruction set in use, or 'reference'.

    Raises:
        QuantGRUError: `QUANT_GRU_CPU` names something that does not run here.
    """
    available = choices()
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return available[0]
    if wanted not in available:
        raise QuantGRUError(
            f"Expected {VARIABLE} to be one of {', '.join(available)}, got {wanted!r}"
        )
    return wanted


def run(
    plan: CellPlan,
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    reverse: bool,
    variant: str,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one layer and direction; as `quant_gru.integer.reference.run`.

    Args:
        plan: The plan, on the CPU.
        x: Codes of input.x (T, N, C), any integer dtype.
        h0: Codes of output.h (N, H), any integer dtype.
        lengths: int64 (N,) or None.
        reverse: From the last step to the first.
        variant: One of `choices()` but 'reference'.
        threads: At most this many; None for torch.get_num_threads().
    """
    T, N, C = x.shape
    H = plan.hidden_size
    count = N if lengths is None else lengths.numel()
    if plan.input_size != C or h0.shape != (N, H) or count != N:
        raise QuantGRUError(
            f"Expected x of {plan.input_size} features, h0 of shape ({N}, {H}) and {N} lengths, "
            f"got x of {C}, h0 of shape {tuple(h0.shape)} and {count} lengths"
        )
    x = x.to("cpu", plan.x.container).contiguous()
    h0 = h0.to("cpu", plan.h.container).contiguous()
    out = torch.empty((T, N, H), dtype=plan.h.container, device="cpu")
    last = torch.empty((N, H), dtype=plan.h.container, device="cpu")
    if N:
        lengths = None if lengths is None else lengths.to("cpu", torch.int64).contiguous()
        _native.run(
            _plan_of(plan),
            variant,
            x.data_ptr(),
            h0.data_ptr(),
            out.data_ptr(),
            last.data_ptr(),
            T,
            N,
            0 if lengths is None else lengths.data_ptr(),
            reverse,
            torch.get_num_threads() if threads is None else threads,
        )
    return out, last


def is_narrow(plan: CellPlan) -> bool:
    """Whether all widths of a plan are at most 16 bits, so that the fast kernels run it."""
    return _plan_of(plan).narrow


def quantize(quantizer: Quantizer, x: Tensor, variant: str) -> tuple[Tensor, bool]:
    """Codes of `x` in their container, as `Quantizer.quantize`, and whether a value is NaN.

    Args:
        quantizer: Of up to 16 bits.
        x: float32, any shape, on the CPU.
        variant: One of `choices()` but 'reference'.
    """
    x = x.detach().contiguous().resolve_neg()
    codes = torch.empty(x.shape, dtype=quantizer.container, device="cpu")
    nan = _native.quantize(variant, *_border(quantizer), x.numel(), x.data_ptr(), codes.data_ptr())
    return codes, nan


def dequantize(quantizer: Quantizer, codes: Tensor, variant: str) -> Tensor:
    """Real values of `codes`, float32, as `Quantizer.dequantize`.

    Args:
        quantizer: Of up to 16 bits.
        codes: In their container, contiguous, on the CPU.
        variant: One of `choices()` but 'reference'.
    """
    x = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    _native.dequantize(variant, *_border(quantizer), codes.numel(), codes.data_ptr(), x.data_ptr())
    return x


def _border(q: Quantizer) -> tuple[float, int, int, int, str]:
    return q.scale, q.zero_point, q.lo, q.hi, _name(q.container)


def _plan_of(plan: CellPlan) -> _native.Plan:
    """The native plan of a weight part, made at its first use."""
    kept = _packed.get(plan.weights)
    if kept is None or kept[0]() is not plan.frozen:
        kept = (weakref.ref(plan.frozen), _pack(plan))
        _packed[plan.weights] = kept
    return kept[1]


def _pack(plan: CellPlan) -> _native.Plan:
    w, q = plan.weights, plan.frozen.quantizers
    bits_W, bits_R = w.bits_W, w.bits_R
    sums = plan.frozen.sums
    several = [each for each in sums.values() if len(each.multipliers) > 1]
    z, r, g = (q[name] for name in ("gate.z_out", "gate.r_out", "gate.g_out"))
    one_minus_z = max(abs(plan.frozen.one - (end - z.zero_point)) for end in (z.lo, z.hi))
    product = max(
        z.max_abs * plan.h.max_abs, r.max_abs * q["matmul.Rh"].max_abs, one_minus_z * g.max_abs
    )
    # float64 takes one-term sums of any tier: it rounds v * M once where |v| < 2^53
    narrow = (
        max(quantizer.bits for quantizer in q.values()) <= NARROW_BITS
        and max(bits_W, bits_R) <= NARROW_BITS
        and all(each.tier != "e" for each in several)
        and max(w.bound_Wx, w.bound_Rh) < 1 << 52
        and product < 1 << 53
    )
    # float32: two-term sums of tier a, products below 2^24, multipliers of 24 bits
    float32 = (
        narrow
        and all(each.tier == "a" for each in several)
        and product < 1 << 24
        and bits_W + plan.x.bits <= 16
        and bits_R + plan.h.bits <= 16
    )
    tensors: list[Tensor] = []
    document = {
        "H": plan.hidden_size,
        "C": plan.input_size,
        "narrow": narrow,
        "float32": float32,
        "x_container": _name(plan.x.container),
        "h_container": _name(plan.h.container),
        "one": plan.frozen.one,
        "sums": {name: _sum(each, q[name].zero_point) for name, each in plan.frozen.sums.items()},
        "tables": {
            name: _table(table, q[pre], tensors)
            for (name, table), pre in zip(
                ((name, plan.frozen.tables[name]) for name in _PRE), _PRE.values(), strict=True
            )
        },
        "W": _projection(w.W, w.Bw, plan.shift_Bw, w.Wx, bits_W, plan.x, q["matmul.Wx"], tensors),
        "R": _projection(w.R, w.Br, plan.shift_Br, w.Rh, bits_R, plan.h, q["matmul.Rh"], tensors),
    }
    return _native.Plan(document)


_PRE = {"gate.z_out": "gate.z_pre", "gate.r_out": "gate.r_pre", "gate.g_out": "gate.g_pre"}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pointer(tensor: Tensor, dtype: torch.dtype, keep: list[Tensor]) -> int:
    # .to(device) moves nothing here, but an address of another device must never get through
    converted = tensor.to("cpu", dtype).contiguous()
    keep.append(converted)
    return converted.data_ptr()


def _sum(each: WeightedSum, zero_point: int) -> dict[str, Any]:
    return {
        "M": [int(M) for M in each.multipliers],
        "k": int(each.shift),
        "tier": each.tier,
        "lo": each.lo - zero_point,
        "hi": each.hi - zero_point,
    }


def _table(table: Table, pre: Quantizer, keep: list[Tensor]) -> dict[str, Any]:
    return {
        "segments": len(table.bounds),
        "degree": table.coefficients.shape[1] - 1,
        "shift": table.shift,
        "segment_shift": -1 if table.segment_shift is None else table.segment_shift,
        "last": table.last,
        "pre_zero": pre.zero_point,
        "lo": table.lo - table.zero_point,
        "hi": table.hi - table.zero_point,
        "bounds": _pointer(table.bounds, torch.int64, keep),
        "coefficients": _pointer(table.coefficients, torch.int64, keep),
    }


def _projection(
    codes: Tensor,
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
        "codes": _pointer(codes, torch.int32, keep),
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
        # 16 unsigned bits are kept less 2^15, so that they fit int16
        "offset": 1 << 15 if operand.hi > 32767 else 0,
    }
