"""Encode and decode tensors, and measure the ranges of their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from actnn.codec import executors, ops, reference
from actnn.codec.arguments import check, check_bounds, check_group
from actnn.codec.codes import MOST_BITS, UNBOUNDED, Bounds, Codes, Key, data_bytes
from actnn.codec.memory_order import dense, flat, in_rows, rows_of

_LEAST_MAGNITUDE = 2.0**-90  # of a group, so that the least step of a code is small beside it

Decode: TypeAlias = Callable[[Any], Tensor]


class Coder(NamedTuple):
    """How tensors of one size and layout are encoded.

    Attributes:
        encode: (tensor, state of the noise, id of the tensor) -> its codes with their parameters:
            one block, or data and parameters.
        decode: What `encode` returned -> the tensor.
        shape: Its shape.
        strides: Its strides.
        frames: The functions of Python that these may run.
    """

    encode: Callable[[Tensor, Tensor, int], Any]
    decode: Decode
    shape: torch.Size
    strides: tuple[int, ...]
    frames: tuple[Callable[..., Any], ...]


def encode(
    x: Tensor,
    bits: int | Tensor,
    key: Key,
    *,
    group: int = 256,
    stochastic: bool = True,
    capacity: int | None = None,
    bounds: Bounds = UNBOUNDED,
) -> Codes:
    """Encode a tensor.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. Elements are encoded in the order of
            memory; a tensor with gaps or overlap is copied first.
        bits: Bits of a code, 1 to 8; or an integer tensor (samples,) on the device of x with the
            bits of each sample (first dimension). Its values are clamped to 1..8.
        key: What makes the noise independent.
        group: Elements of a group, a multiple of 32.
        stochastic: Whether codes are rounded stochastically, else to the nearest code.
        capacity: With bits per sample, the sum of bits that fits into data; None for 8 per sample.
            Samples that do not fit decode to NaN.
        bounds: The least and the largest element that x can have, with equal bits. Elements at or
            beyond a bound decode to it exactly, all others to numbers between them.

    Raises:
        ActNNError: An argument is not supported.
    """
    check(x, bits, key, group, capacity)
    check_bounds(bounds, bits)
    ends = None
    if isinstance(bits, Tensor):
        x = in_rows(x)
        samples = x.shape[0]
        capacity = MOST_BITS * samples if capacity is None else capacity
        noise = (key.state, key.tensor, group, stochastic, capacity)
        if _traced(x):
            bits, ends = reference.sums_of(bits)
            data, params = reference.encode_samples(rows_of(x), bits, *noise)
        else:
            bits, ends = executors.sums_of(bits)
            data, params = executors.encode_samples(rows_of(x), bits, ends, *noise)
    else:
        x = dense(x)
        if _watched(x):
            given = (key.state, key.tensor, stochastic, bounds)
            data, params = ops.encode(x.detach(), bits, group, *given)
        else:
            noise_and_group = (key.state, key.tensor, group, stochastic)
            data, params = executors.encode_flat(x, bits, *noise_and_group, bounds)
    return Codes(data, params, bits, group, x.shape, x.stride(), x.dtype, ends, bounds)


def decode(codes: Codes) -> Tensor:
    """Decode a tensor.

    Returns:
        A tensor with the shape and dtype of the encoded one, and with its strides if it was dense.
    """
    data, params, bits, group = codes.data, codes.params, codes.bits, codes.group
    n, dtype = codes.shape.numel(), codes.dtype
    if isinstance(bits, Tensor):
        m = n // max(codes.shape[0], 1)
        v: Tensor
        if _traced(data):
            v = reference.decode_samples(data, params, bits, group, m, dtype)
        else:
            v = executors.decode_samples(data, params, bits, codes.ends, group, m, dtype)
    elif _watched(data):
        v = ops.decode(data, params, bits, group, n, dtype, codes.bounds)
    else:
        v = executors.decode_flat(data, params, bits, group, n, dtype, codes.bounds)
    return v.as_strided(codes.shape, codes.strides)


def decoder_of(codes: Codes) -> Decode:
    """Return a function that decodes a pair of data and parameters like those of codes."""
    bits, group, shape, strides = codes.bits, codes.group, codes.shape, codes.strides
    dtype, ends, bounds = codes.dtype, codes.ends, codes.bounds

    def run(found: tuple[Tensor, Tensor]) -> Tensor:
        return decode(Codes(*found, bits, group, shape, strides, dtype, ends, bounds))

    return run


def coder_of(
    x: Tensor, bits: int, group: int, stochastic: bool, bounds: Bounds = UNBOUNDED
) -> Coder:
    """Return how tensors of one size and layout are encoded with equal bits.

    Args:
        x: A tensor of these. Others that are not dense must be copied first; on a GPU, they begin
            at a multiple of 16 bytes if it does.
        bits: Bits of a code.
        group: Elements of a group.
        stochastic: Whether codes are rounded stochastically.
        bounds: See `encode`.
    """
    x = dense(x)
    shape, strides, dtype = x.shape, x.stride(), x.dtype
    codes = data_bytes(x.numel(), bits)

    def encode_any(x: Tensor, state: Tensor, tensor: int) -> tuple[Tensor, Tensor]:
        key = Key(state, tensor)
        codes = encode(x, bits, key, group=group, stochastic=stochastic, bounds=bounds)
        return codes.data, codes.params

    def decode_any(found: tuple[Tensor, Tensor] | Tensor) -> Tensor:
        if isinstance(found, Tensor):
            found = found[:codes], found[codes:].view(torch.bfloat16).view(-1, 2)
        return decode(Codes(*found, bits, group, shape, strides, dtype, None, bounds))

    slow = (encode_any, decode_any)
    native = executors.coder_of(x, bits, group, stochastic, bounds, *slow)
    if native is None:
        return Coder(*slow, shape, strides, slow)
    return Coder(native.encode, native.decode, shape, strides, slow)


def fits(x: Tensor, group: int = 256, *, small: bool = True) -> bool:
    """Whether codes can express a tensor: the elements of float64 are converted to float32.

    Waits for the device if the dtype is float64. While a CUDA graph is captured, float64 never
    fits.

    Args:
        x: Any floating dtype and shape.
        group: Elements of a group.
        small: Whether groups of float64 numbers that are all too small for codes count.
    """
    if x.dtype != torch.float64 or not x.numel() or _traced(x):
        return x.dtype != torch.float64 or not x.numel()
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    magnitudes = flat(dense(x.detach())).abs()
    magnitudes = torch.where(torch.isinf(magnitudes), 0.0, magnitudes)
    missing = -len(magnitudes) % group
    largest = torch.nn.functional.pad(magnitudes, (0, missing)).view(-1, group).amax(1)
    beyond = largest > torch.finfo(torch.float32).max
    if small:
        beyond |= (largest > 0) & (largest < _LEAST_MAGNITUDE)
    return not beyond.any().item()


def group_ranges(x: Tensor, group: int = 256) -> Tensor:
    """Return the sum of squared ranges of the groups of each sample.

    Args:
        x: Any floating dtype, (samples, ...). Groups never contain elements of two samples.
        group: Elements of a group, a multiple of 32.

    Returns:
        float32 (samples,), on the device of x.
    """
    check_group(group)
    rows = rows_of(in_rows(x))
    whole = rows.shape[1] // group * group
    parts = [rows[:, :whole].unflatten(1, (-1, group))] if whole or not rows.numel() else []
    if whole != rows.shape[1]:
        parts.append(rows[:, whole:].unsqueeze(1))
    sums: list[Tensor] = []
    for part in parts:
        low, high = part.aminmax(dim=-1)
        sums.append((high.float() - low.float()).square().sum(-1))
    return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def _traced(x: Tensor) -> bool:
    """Whether a compiler or a transform must see operators instead of their results."""
    return (
        type(x) not in (Tensor, torch.nn.Parameter)
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _watched(x: Tensor) -> bool:
    """Whether that is so, or a mode must see the tensors that are made."""
    return _traced(x) or torch._C._len_torch_dispatch_stack() > 0
