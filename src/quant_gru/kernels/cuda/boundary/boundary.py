"""Conversions between real values and codes on a GPU, one launch each (host/boundary.hpp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant_gru.integer.plan import Seam
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.random import chance
from quant_gru.integer.rounding import NUMBERS
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernels import _native
from quant_gru.kernels.cpu.plan_packing import pack_quantizer, pack_requantizer
from quant_gru.kernels.cuda import machine as machines
from quant_gru.kernels.cuda.planned_launches import start


def quantize(
    quantizer: Quantizer, x: Tensor, machine: Device | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize `x` as `Quantizer.quantize` does, and find rows with NaN.

    Args:
        quantizer: A quantizer with at most 16 bits.
        x: float32 (.., features) on a GPU.
        machine: The machine that runs the kernel; None for x's GPU.

    Returns:
        Codes (.., features) in their container, and bool (..): whether a row contains NaN.
    """
    x = x.detach().contiguous().resolve_neg()
    codes = torch.empty(x.shape, dtype=quantizer.container, device=x.device)
    nan = torch.empty(x.shape[:-1], dtype=torch.bool, device=x.device)
    if not x.numel():
        return codes, nan.zero_()
    addresses = x.data_ptr(), codes.data_ptr(), nan.data_ptr()
    how = pack_quantizer(quantizer), NUMBERS[quantizer.rounding]
    launch = _native.quantize_launch(*how, nan.numel(), x.shape[-1], *addresses)
    start(machine or machines.machine_of(x.device), launch)
    return codes, nan


def dequantize(
    quantizer: Quantizer,
    codes: Tensor,
    nan: Tensor | None = None,
    machine: Device | None = None,
) -> Tensor:
    """Dequantize `codes` to float32 as `Quantizer.dequantize` does; rows in `nan` become NaN.

    Args:
        quantizer: A quantizer with at most 16 bits.
        codes: (.., features) in their container, on a GPU.
        nan: bool (..), rows that become NaN, or None.
        machine: The machine that runs the kernel; None for the codes' GPU.
    """
    codes = codes.to(quantizer.container).contiguous()
    nan = None if nan is None else nan.contiguous()
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if codes.numel():
        features = codes.shape[-1]
        rows = codes.numel() // features, features
        addresses = codes.data_ptr(), 0 if nan is None else nan.data_ptr(), values.data_ptr()
        launch = _native.dequantize_launch(pack_quantizer(quantizer), *rows, *addresses)
        start(machine or machines.machine_of(codes.device), launch)
    return values


def mask(quantizer: Quantizer, x: Tensor, grad: Tensor, machine: Device | None = None) -> None:
    """Set a gradient to 0, in place, where `Quantizer.inside` is False; NaN stays NaN.

    Args:
        quantizer: A quantizer with at most 16 bits.
        x: float32 (T, N, features) on a GPU, with any strides of steps and rows.
        grad: Gradient of `x`, float32, contiguous.
        machine: The machine that runs the kernel; None for x's GPU.
    """
    if not grad.numel():
        return
    if x.is_neg() or x.stride(2) != 1:
        x = x.detach().resolve_neg().contiguous()
    step, following, _ = x.stride()
    T, N, features = x.shape
    where = (step, following), (T, N, features)
    rule = NUMBERS[quantizer.rounding]
    launch = _native.mask_launch(
        pack_quantizer(quantizer), rule, *where, x.data_ptr(), grad.data_ptr()
    )
    start(machine or machines.machine_of(x.device), launch)


def requantize(
    seam: Seam, codes: Sequence[Tensor], grad: Tensor | None = None, machine: Device | None = None
) -> Tensor:
    """Requantize X = weighted_sum(h - z_h) for each direction of the layer below.

    Args:
        seam: What converts codes of the lower layer, with quantizers of at most 16 bits.
        codes: Codes of each direction (T, N, H).
        grad: Gradient of the dequantized result (T, N, directions * H), float32, contiguous, that
            becomes 0, in place, where codes are clamped; NaN stays NaN. None for codes.
        machine: The machine that runs the kernel; None for the codes' GPU.

    Returns:
        Codes (T, N, directions * H) in their container, or the gradient.
    """
    sums, below, above = seam
    T, N, H = codes[0].shape
    shape = (T, N, H * len(below))
    to = torch.empty(shape, dtype=above.container, device=codes[0].device) if grad is None else grad
    if to.numel():
        keep = [each.to(q.container).contiguous() for q, each in zip(below, codes, strict=True)]
        how = [pack_requantizer(s, q, above) for s, q in zip(sums, below, strict=True)]
        results = (to.data_ptr(), 0) if grad is None else (0, to.data_ptr())
        addresses = [each.data_ptr() for each in keep]
        launch = _native.requantize_launch(how, addresses, T * N, H, *results)
        start(machine or machines.machine_of(to.device), launch)
    return to


def events(
    seed: Tensor,
    p: float,
    shape: tuple[int, int, int],
    stream: int,
    machine: Device | None = None,
) -> Tensor:
    """Draw the events of `quant_gru.integer.random.events` on a GPU.

    Args:
        seed: int64 scalar on a GPU.
        p: Probability.
        shape: (A, B, C).
        stream: Number of the random stream, which identifies the use of the events.
        machine: The machine that runs the kernel; None for the seed's GPU.
    """
    found = torch.empty(shape, dtype=torch.bool, device=seed.device)
    if found.numel():
        given = seed.data_ptr(), found.data_ptr(), shape, chance(p), stream
        start(machine or machines.machine_of(seed.device), _native.events_launch(*given))
    return found
