"""Quantize, requantize and clamp masks at the boundary of a layer in training, in native code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quant_gru.integer.plan import Seam
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.rounding import DEFAULT
from quant_gru.kernels import _native
from quant_gru.kernels.cpu.plan_packing import pack_quantizer, pack_requantizer

NARROW_BITS = 16


def takes(quantizer: Quantizer, x: Tensor) -> bool:
    """Whether `quantize` and `mask` support `x`: float32 on the CPU, codes of up to 16 bits.

    Ties must go to even.
    """
    return (
        quantizer.bits <= NARROW_BITS
        and quantizer.rounding == DEFAULT
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.dim() in (2, 3)
    )


def quantize(quantizer: Quantizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize like `Quantizer.quantize`, and find the rows that contain NaN.

    Args:
        quantizer: A quantizer that `takes` accepts.
        x: float32 (T, N, features) or (N, features).

    Returns:
        Codes of x's shape in their container, and bool (T, N) or (N,): true for rows with NaN.
    """
    x = _readable(x)
    codes = torch.empty(x.shape, dtype=quantizer.container, device="cpu")
    nan = torch.empty(x.shape[:-1], dtype=torch.bool, device="cpu")
    _native.quantize(_real(x), pack_quantizer(quantizer), codes.data_ptr(), nan.data_ptr())
    return codes, nan


def mask(quantizer: Quantizer, x: Tensor, grad: Tensor) -> None:
    """Multiply a gradient in place by 0 where the codes of `x` were clamped.

    Args:
        quantizer: As for `quantize`.
        x: As for `quantize`.
        grad: float32, contiguous, with the shape of x.
    """
    x = _readable(x)  # this reference keeps a copy alive while native code reads its address
    _native.mask(_real(x), pack_quantizer(quantizer), grad.data_ptr())


def requantizes(seam: Seam, codes: Tensor) -> bool:
    """Whether `requantize` supports the codes of a layer below: on the CPU, up to 16 bits."""
    widths = [q.bits for q in (*seam.below, seam.above)]
    return codes.device.type == "cpu" and max(widths) <= NARROW_BITS


def requantize(seam: Seam, codes: Sequence[Tensor]) -> Tensor:
    """Compute X = weighted_sum(h - z_h) for each direction of the layer below.

    Args:
        seam: What converts codes of the layer below.
        codes: The codes of each direction (T, N, H).

    Returns:
        Codes (T, N, directions * H) in their container.
    """
    T, N, H = codes[0].shape
    found = torch.empty((T, N, H * len(codes)), dtype=seam.above.container, device="cpu")
    _each_direction(_native.requantize, seam, codes, found)
    return found


def mask_requantized(seam: Seam, codes: Sequence[Tensor], grad: Tensor) -> None:
    """Multiply a gradient in place by 0 where `requantize` clamped.

    Args:
        seam: As for `requantize`.
        codes: As for `requantize`.
        grad: float32 (T, N, directions * H), contiguous.
    """
    _each_direction(_native.mask_requantized, seam, codes, grad)


def _each_direction(
    run: Callable[..., None], seam: Seam, codes: Sequence[Tensor], to: Tensor
) -> None:
    T, N, H = codes[0].shape
    for d, (total, q, half) in enumerate(zip(seam.sums, seam.below, codes, strict=True)):
        half = half.to(q.container).contiguous()
        numbers = pack_requantizer(total, q, seam.above)
        place = to.data_ptr() + d * H * to.element_size()
        run(numbers, half.data_ptr(), T * N, H, place, H * len(codes))


def _readable(x: Tensor) -> Tensor:
    x = x.detach().resolve_neg()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _real(x: Tensor) -> tuple[int, int, int, int, int, int]:
    x = x if x.dim() == 3 else x[None]
    T, N, features = x.shape
    return (x.data_ptr(), x.stride(0), x.stride(1), T, N, features)
