"""Conversions between real values and codes on a GPU, one launch each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.random import chance
from quant_gru.integer.rounding import NUMBERS
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel, Machine
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.structs import KINDS

_ROWS = 8  # per block
BorderC = structure(
    "BorderC",
    **dict.fromkeys(("real", "values", "codes", "nan"), ctypes.c_void_p),
    **dict.fromkeys(("kind", "rows", "features", "zero"), ctypes.c_int64),
    **dict.fromkeys(("scale", "lo", "hi"), ctypes.c_float),
)
MaskC = structure(
    "MaskC",
    **dict.fromkeys(("grad", "real", "added"), ctypes.c_void_p),
    **dict.fromkeys(("step", "next", "rows", "N", "features"), ctypes.c_int64),
    **dict.fromkeys(("scale", "lo", "hi"), ctypes.c_float),
)
RequantizeCodesC = structure(
    "RequantizeCodesC",
    codes=ctypes.c_void_p * 2,
    **dict.fromkeys(("to", "grad", "added"), ctypes.c_void_p),
    **dict.fromkeys(("kind", "zero", "M", "k"), ctypes.c_int64 * 2),
    **dict.fromkeys(("rows", "H", "directions", "to_kind", "lo", "hi", "to_zero"), ctypes.c_int64),
)
EventsC = structure(
    "EventsC",
    **dict.fromkeys(("seed", "events"), ctypes.c_void_p),
    **dict.fromkeys(("A", "B", "C", "chance", "stream"), ctypes.c_int64),
)
_DEQUANTIZE = Kernel.of("boundary/quantize_dequantize", "dequantize", PLAIN)
_EVENTS = Kernel.of("boundary/random_events", "events", {})
_THREADS, _MOST_BLOCKS = 128, 1 << 16


def _quantize(quantizer: Quantizer) -> Kernel:
    return _ruled("boundary/quantize_dequantize", "quantize", "QG_INPUT_RULE", quantizer.rounding)


def _masks(quantizer: Quantizer) -> Kernel:
    return _ruled("boundary/clamp_mask", "mask_clamped", "QG_INPUT_RULE", quantizer.rounding)


def _requantizes(sums: Sequence[WeightedSum]) -> Kernel:
    name = "requantize_codes"
    return _ruled("boundary/requantize_training", name, "QG_RULE", sums[0].rounding)


def _ruled(source: str, function: str, macro: str, rule: str) -> Kernel:
    """Return a kernel that rounds by a rule; ties to even have no macro."""
    number = NUMBERS[rule]
    return Kernel.of(source, function, {**PLAIN, macro: number} if number else PLAIN)


def quantize(
    quantizer: Quantizer, x: Tensor, machine: Machine | None = None
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
    if x.numel():
        b = _border(quantizer, x.shape[-1])
        b.real, b.codes, b.nan = x.data_ptr(), codes.data_ptr(), nan.data_ptr()
        _launch(_quantize(quantizer), b, x, machine)
    else:
        nan.zero_()
    return codes, nan


def dequantize(
    quantizer: Quantizer,
    codes: Tensor,
    nan: Tensor | None = None,
    machine: Machine | None = None,
) -> Tensor:
    """Dequantize `codes` to float32 as `Quantizer.dequantize` does; rows in `nan` become NaN.

    Args:
        quantizer: A quantizer with at most 16 bits.
        codes: (.., features) in their container, on a GPU.
        nan: bool (..), rows that become NaN, or None.
        machine: The machine that runs the kernel; None for the codes' GPU.
    """
    codes = codes.contiguous()
    nan = None if nan is None else nan.contiguous()
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if codes.numel():
        b = _border(quantizer, codes.shape[-1])
        b.kind = KINDS[codes.dtype]
        b.values, b.codes = values.data_ptr(), codes.data_ptr()
        b.nan = None if nan is None else nan.data_ptr()
        _launch(_DEQUANTIZE, b, codes, machine)
    return values


def mask(quantizer: Quantizer, x: Tensor, grad: Tensor, machine: Machine | None = None) -> None:
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
    m, grid = _mask_of(quantizer, x.stride()[:2], x.shape)
    m.grad, m.real = grad.data_ptr(), x.data_ptr()
    _start(_masks(quantizer), grid, m, x, machine)


def _mask_of(
    quantizer: Quantizer, strides: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Any, Grid]:
    T, N, features = shape
    m: Any = MaskC(None, None, None, *strides, T * N, N, features, quantizer.scale)
    m.lo, m.hi = quantizer.lo - quantizer.zero_point, quantizer.hi - quantizer.zero_point
    return m, Grid((-(-T * N // _ROWS), 1), 32 * _ROWS)


def requantize(
    sums: Sequence[WeightedSum],
    below: Sequence[Quantizer],
    above: Quantizer,
    codes: Sequence[Tensor],
    machine: Machine | None = None,
) -> Tensor:
    """Requantize X = weighted_sum(h - z_h) for each direction of the layer below.

    Args:
        sums: The weighted sum of each direction.
        below: The quantizer of each direction's codes, with at most 16 bits.
        above: The quantizer of the result, with at most 16 bits.
        codes: Codes of each direction (T, N, H).
        machine: The machine that runs the kernel; None for the codes' GPU.

    Returns:
        Codes (T, N, directions * H) in their container.
    """
    T, N, H = codes[0].shape
    found = torch.empty((T, N, H * len(below)), dtype=above.container, device=codes[0].device)
    _requantize(sums, below, above, codes, found, machine)
    return found


def mask_requantized(
    sums: Sequence[WeightedSum],
    below: Sequence[Quantizer],
    above: Quantizer,
    codes: Sequence[Tensor],
    grad: Tensor,
    machine: Machine | None = None,
) -> None:
    """Set a gradient to 0, in place, where `requantize` clamps; NaN stays NaN.

    Args:
        sums: See `requantize`.
        below: See `requantize`.
        above: See `requantize`.
        codes: See `requantize`.
        grad: Gradient of the dequantized result (T, N, directions * H), float32, contiguous.
        machine: The machine that runs the kernel; None for the codes' GPU.
    """
    _requantize(sums, below, above, codes, grad, machine)


def _requantize(
    sums: Sequence[WeightedSum],
    below: Sequence[Quantizer],
    above: Quantizer,
    codes: Sequence[Tensor],
    to: Tensor,
    machine: Machine | None,
) -> None:
    """Write codes if `to` has an integer dtype; mask it as a gradient if it is floating-point."""
    if not to.numel():
        return
    T, N, H = codes[0].shape
    c, grid = _requantization(sums, below, above, (T, N, H))
    keep = [each.to(q.container).contiguous() for q, each in zip(below, codes, strict=True)]
    for d, each in enumerate(keep):
        c.codes[d] = each.data_ptr()
    if to.is_floating_point():
        c.grad = to.data_ptr()
    else:
        c.to, c.to_kind = to.data_ptr(), KINDS[to.dtype]
    _start(_requantizes(sums), grid, c, to, machine)


def _requantization(
    sums: Sequence[WeightedSum],
    below: Sequence[Quantizer],
    above: Quantizer,
    shape: tuple[int, int, int],
) -> tuple[Any, Grid]:
    T, N, H = shape
    c: Any = RequantizeCodesC()
    for d, (q, weighted_sum) in enumerate(zip(below, sums, strict=True)):
        c.kind[d], c.zero[d] = KINDS[q.container], q.zero_point
        c.M[d], c.k[d] = int(weighted_sum.multipliers[0]), int(weighted_sum.shift)
    c.to_kind, c.to_zero = KINDS[above.container], above.zero_point
    c.rows, c.H, c.directions = T * N, H, len(below)
    c.lo, c.hi = above.lo - above.zero_point, above.hi - above.zero_point
    return c, Grid((-(-c.rows // _ROWS), 1), 32 * _ROWS)


def events(
    seed: Tensor,
    p: float,
    shape: tuple[int, int, int],
    stream: int,
    machine: Machine | None = None,
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
        e: Any = EventsC(seed.data_ptr(), found.data_ptr(), *shape, chance(p), stream)
        _start(
            _EVENTS, Grid((min(shape[0] * shape[1], _MOST_BLOCKS), 1), _THREADS), e, seed, machine
        )
    return found


def _border(q: Quantizer, features: int) -> Any:
    b: Any = BorderC()
    b.kind, b.features = KINDS[q.container], features
    b.zero, b.scale = q.zero_point, q.scale
    b.lo, b.hi = q.lo - q.zero_point, q.hi - q.zero_point
    return b


def _launch(kernel: Kernel, b: Any, x: Tensor, machine: Machine | None) -> None:
    b.rows = x.numel() // x.shape[-1]
    _start(kernel, Grid((-(-b.rows // _ROWS), 1), 32 * _ROWS), b, x, machine)


def _start(kernel: Kernel, grid: Grid, arguments: Any, x: Tensor, machine: Machine | None) -> None:
    if machine is None:
        from quant_gru.kernels.cuda.machine import machine_of

        machine = machine_of(x.device)
    machine.launch(kernel, grid, arguments)
