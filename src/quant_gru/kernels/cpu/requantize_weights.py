"""Rewrites a weight part and its native layers in place, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.plan import FrozenPart, WeightPart, bias_limit, bias_shift
from quant_gru.integer.qparams import QParams
from quant_gru.integer.weighted_sum import significant_bits
from quant_gru.kernels import _native
from quant_gru.kernels.cpu.executor import chosen, repack

_EXACT = (torch.float32, torch.float16, torch.bfloat16)  # float32 represents their values exactly


class Writer:
    """Writes the tensors of a weight part.

    Args:
        qparams: Parameters with scales per channel that follow the weights, and weight matrices
            of up to 16 bits.
        frozen: The frozen part of the same plan.
        part: The weight part to rewrite.
        variant: One of the executor's choices except 'reference'; None for the one in use.

    Attributes:
        native: The writer in native code.
    """

    def __init__(
        self, qparams: QParams, frozen: FrozenPart, part: WeightPart, variant: str | None = None
    ) -> None:
        self._part = part
        numbers = {
            "H": part.W.shape[0] // 3,
            "free": qparams.config.scale_kind == "free",
            "finite": part.finite.data_ptr(),
            "W": _operand(0, qparams, frozen, part),
            "R": _operand(1, qparams, frozen, part),
        }
        self.native = _native.Weights(numbers, variant or chosen())

    def takes(self, *values: Tensor | None) -> bool:
        """Whether these weights are on the CPU and float32 represents them exactly."""
        for v in values:
            if v is not None and not (v.dtype in _EXACT and v.is_cpu):
                return False
        return True

    def write(
        self,
        matrices: tuple[Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        dropped: Tensor | None,
        p: float,
    ) -> bool:
        """Rewrite everything, unless all bytes of the weights equal those of the last call.

        Args:
            matrices: W (3H, C) and R (3H, H).
            biases: bw and br (3H,), or None for zeros.
            dropped: bool (3H, H) or None, as for `build_weights`. With it, everything is
                rewritten.
            p: The probability of dropping.

        Returns:
            Whether anything was written.
        """
        values = [_plain(v) for v in (*matrices, *biases)]
        if dropped is not None:
            dropped = dropped.to("cpu", torch.bool).contiguous()
        W, R, bw, br, zeroed = [0 if v is None else v.data_ptr() for v in (*values, dropped)]
        written = self.native.write(W, R, bw, br, zeroed, 1.0 - p, torch.get_num_threads())
        if written:
            repack(self._part)
        return written

    def forget(self) -> None:
        """Note that other code has written the part, so that the next `write` rewrites it."""
        self.native.forget()


def _plain(v: Tensor | None) -> Tensor | None:
    """Return `v` in the form that native code reads, or `v` itself if it already has that form."""
    if v is None or (v.dtype is torch.float32 and v.is_contiguous() and not v.is_neg()):
        return v
    return v.detach().to(torch.float32).contiguous().resolve_neg()


def _operand(which: int, qparams: QParams, frozen: FrozenPart, part: WeightPart) -> dict[str, Any]:
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
