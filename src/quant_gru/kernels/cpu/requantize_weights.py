"""Rewrites a weight part and its native layers in place, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.integer.plan import FrozenPart, WeightPart
from quant_gru.integer.qparams import QParams
from quant_gru.kernels import _native
from quant_gru.kernels.cpu.executor import chosen, repack
from quant_gru.kernels.cpu.plan_packing import pack_update

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
        numbers = pack_update(qparams, frozen, part)
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
