"""The definition of the codec in PyTorch, on any device. docs/actnn_codec.md explains it.

Other executors return the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actnn.codec.codes import LARGEST, MOST_BITS, UNBOUNDED, Bounds, reached
from actnn.codec.noise import RUN, noise_of
from actnn.codec.packing import pack, unpack

LEAST_STEP = 2.0**-100
_HIGH_HALF = -65536
_ONE_HIGHER = 65536


def encode_rows(
    x: Tensor,
    bits: int | Tensor,
    state: Tensor,
    tensor: int,
    group: int,
    stochastic: bool,
    bounds: Bounds = UNBOUNDED,
) -> tuple[Tensor, Tensor]:
    """Encode rows of elements, each with its own groups.

    Args:
        x: (rows, m), any floating dtype.
        bits: Bits of a code, or int64 (rows, 1).
        state: int64 (2,), seed and step of the noise.
        tensor: Id of the tensor.
        group: Elements of a group.
        stochastic: Whether codes are rounded stochastically, else to the nearest code.
        bounds: Of the elements.

    Returns:
        Codes, int64 (rows, m up to a multiple of 32), where codes beyond m are 0; and parameters,
        float32 (rows, groups of a row, 2).
    """
    rows, m = x.shape
    runs = -(-m // RUN)
    bounds = reached(bounds)
    x = _repeat_last(_in_float32(x), runs * RUN)
    whole = _repeat_last(x, -(-m // group) * group)
    base, step, inverse = parameters(whole, bits, group, bounds)
    spread = torch.arange(runs * RUN, device=x.device) // group
    # groups that decode to NaN have the code 0
    marked = torch.signbit(step)[:, spread]
    lowest, highest = (x <= bounds[0]) & marked, (x >= bounds[1]) & marked
    inside = ~(torch.isnan(base)[:, spread] | lowest | highest)
    distance = torch.where(inside, x - base[:, spread], 0)
    # bits of a code's fraction: 16, or 15 for codes of 8 bits
    one = 2 ** (23 - torch.as_tensor(bits, device=x.device)).clamp(max=16)
    noise = one // 2
    if stochastic:
        noise = noise_of(state, tensor, rows * runs).view(rows, -1) & (one - 1)
    codes = _rounded_sum(distance, inverse[:, spread], one, noise) // one + marked
    codes = torch.where(lowest, 0, torch.where(highest, _last_code(bits, x.device), codes))
    codes[:, m:] = 0
    return codes, torch.stack((base, step), -1)


def _last_code(bits: int | Tensor, device: torch.device) -> Tensor:
    """Return 2^bits - 1: int64, () or (rows, 1)."""
    if isinstance(bits, int):  # made by an operation: hooks of compiled graphs hold no constants
        return torch.full((), 2**bits - 1, dtype=torch.int64, device=device)
    return 2**bits - 1


def _in_float32(x: Tensor) -> Tensor:
    """Return elements as float32; NaN for finite ones beyond its range."""
    y = x.to(torch.float32)
    return torch.where(torch.isinf(y) & ~torch.isinf(x), torch.nan, y)


def parameters(
    x: Tensor, bits: int | Tensor, group: int, bounds: Bounds = UNBOUNDED
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the parameters of groups.

    Args:
        x: float32 (rows, groups * group).
        bits: Bits of a code, or int64 (rows, 1).
        group: Elements of a group.
        bounds: Of the elements.

    Returns:
        Base, step, and the reciprocal of the step, float32 (rows, groups). Base and step are
        bfloat16 numbers. A group that cannot be encoded has base NaN, step and reciprocal 0. One
        with elements at the bounds has a negative step, which may be -0.
    """
    grouped = x.unflatten(1, (-1, group))
    bounds = reached(bounds)
    at_bounds = (grouped <= bounds[0]) | (grouped >= bounds[1])
    low = torch.where(at_bounds, torch.inf, grouped).amin(-1)
    high = torch.where(at_bounds, -torch.inf, grouped).amax(-1)
    none = low > high
    low, high = torch.where(none, 0.0, low) + 0.0, torch.where(none, 0.0, high)  # no -0
    marked = at_bounds.any(-1) & ~torch.isnan(low)
    word = low.view(torch.int32)
    down = (low < 0) & (word & ~_HIGH_HALF != 0)
    base = ((word & _HIGH_HALF) + down.to(torch.int32) * _ONE_HIGHER).view(torch.float32)
    # a tensor, because torch multiplies by the reciprocal of a Python number on GPUs
    last = _last_code(bits, x.device)
    largest = torch.where(marked & (last > 1), last - 2, last).to(torch.float32)
    span = high - base
    step = ((span / largest).view(torch.int32) + (_ONE_HIGHER - 1)) & _HIGH_HALF
    step = step.view(torch.float32).clamp(min=LEAST_STEP)
    finite = (span < torch.inf) & (base + largest * step <= LARGEST)
    finite &= ~marked | none | (last > 1)  # else no code is left for those between the bounds
    step = torch.where(finite & (span > 0), step, 0.0)
    base = torch.where(finite, base, torch.nan)
    return base, torch.where(marked & finite, -step, step), _reciprocal(step)


def _reciprocal(step: Tensor) -> Tensor:
    """Return 1 / step, rounded towards 0 in float32; 0 for a step of 0."""
    near = torch.reciprocal(step)
    above = near.double() * step.double() > 1  # exact
    near = (near.view(torch.int32) - above.to(torch.int32)).view(torch.float32)
    return torch.where(step > 0, near, 0.0)


def _rounded_sum(distance: Tensor, inverse: Tensor, one: Tensor, noise: Tensor) -> Tensor:
    """Return distance * inverse * one + noise as a fused multiply-add rounds it: int64.

    The exact sum is rounded to the nearest integer, ties to even.
    """
    exact = distance.double() * inverse.double() * one.double()
    whole = exact.floor()
    rest = exact - whole
    total = whole.long() + noise
    return total + ((rest > 0.5) | ((rest == 0.5) & (total % 2 == 1)))


def decode_rows(
    codes: Tensor,
    params: Tensor,
    bits: int | Tensor,
    group: int,
    dtype: torch.dtype,
    bounds: Bounds = UNBOUNDED,
) -> Tensor:
    """Decode rows of codes.

    Args:
        codes: Integers (rows, m).
        params: (rows, groups of a row, 2).
        bits: Bits of a code, or int64 (rows, 1).
        group: Elements of a group.
        dtype: dtype of the result.
        bounds: Of the elements.

    Returns:
        (rows, m).
    """
    spread = torch.arange(codes.shape[1], device=codes.device) // group
    base, step = params.to(torch.float32)[:, spread].unbind(-1)
    marked = torch.signbit(step)
    v = base + (codes - marked.to(codes.dtype)).to(torch.float32) * step.abs()
    # rounded parameters may lie beyond the largest element, and beyond the bounds
    if dtype == torch.float16:
        v = v.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    v = v.clamp(*bounds)
    v = torch.where(marked & (codes == 0), bounds[0], v)
    v = torch.where(marked & (codes == _last_code(bits, codes.device)), bounds[1], v)
    return v.to(dtype)


def encode_flat(
    x: Tensor,
    bits: int,
    state: Tensor,
    tensor: int,
    group: int,
    stochastic: bool,
    bounds: Bounds = UNBOUNDED,
) -> tuple[Tensor, Tensor]:
    """Encode elements (n,) with equal bits. Return data, and parameters (groups, 2)."""
    codes, params = encode_rows(x.view(1, -1), bits, state, tensor, group, stochastic, bounds)
    return pack(codes, bits).view(-1), in_bfloat16(params)


def decode_flat(
    data: Tensor,
    params: Tensor,
    bits: int,
    group: int,
    n: int,
    dtype: torch.dtype,
    bounds: Bounds = UNBOUNDED,
) -> Tensor:
    """Reverse `encode_flat`. Return elements (n,)."""
    codes = unpack(data, bits)[:n]
    rows = codes.view(1, -1), params.view(1, -1, 2)
    return decode_rows(*rows, bits, group, dtype, bounds).view(-1)


def sums_of(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return bits of samples in 1..8, and their inclusive sums: int64 (samples,)."""
    bits = bits.to(torch.int64).clamp(1, MOST_BITS)
    return bits, bits.cumsum(0)


def encode_samples(
    x: Tensor,
    bits: Tensor,
    state: Tensor,
    tensor: int,
    group: int,
    stochastic: bool,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    """Encode samples with a number of bits each.

    Args:
        x: (samples, m).
        bits: int64 (samples,), in 1..8.
        state: int64 (2,), seed and step of the noise.
        tensor: Id of the tensor.
        group: Elements of a group.
        stochastic: Whether codes are rounded stochastically, else to the nearest code.
        capacity: The sum of bits that data can hold. Samples that end beyond it are not stored.

    Returns:
        data, uint8, capacity * 4 bytes for each run of a sample; and params, bfloat16
        (groups, 2).
    """
    codes, params = encode_rows(x, bits.unsqueeze(1), state, tensor, group, stochastic)
    ends = bits.cumsum(0)
    stored = ends <= capacity
    params = torch.where(
        stored[:, None, None], params, torch.tensor([torch.nan, 0.0], device=x.device)
    )
    unit = codes.shape[1] // 8  # bytes of a sample for each of its bits
    byte = torch.arange(capacity * unit, device=x.device)
    sample = torch.searchsorted(ends * unit, byte, right=True)
    last = max(x.shape[0] - 1, 0)
    valid = (sample <= last) & stored[sample.clamp(max=last)]
    sample = sample.clamp(max=last)
    width = bits[sample]
    byte = byte - (ends[sample] - width) * unit
    long = torch.zeros_like(byte)
    for i in range(8):
        place = (byte // width * 8 + i).clamp(max=max(codes.shape[1] - 1, 0))
        long += codes[sample, place] << (i * width)
    data = torch.where(valid, long >> (byte % width * 8) & 255, 0).to(torch.uint8)
    return data, in_bfloat16(params)


def decode_samples(
    data: Tensor, params: Tensor, bits: Tensor, group: int, m: int, dtype: torch.dtype
) -> Tensor:
    """Reverse `encode_samples`. Return elements (samples, m)."""
    width = bits.unsqueeze(1)
    unit = -(-m // RUN) * (RUN // 8)
    bit = (bits.cumsum(0) - bits).unsqueeze(1) * (unit * 8) + torch.arange(
        m, device=data.device
    ) * width
    padded = torch.nn.functional.pad(data, (0, 1)).to(torch.int64)
    last = len(padded) - 1
    low, high = (padded[(bit // 8 + i).clamp(max=last)] for i in range(2))
    codes = (low | high << 8) >> (bit % 8) & (2**width - 1)
    return decode_rows(codes, params.view(len(bits), -1, 2), width, group, dtype)


def in_bfloat16(params: Tensor) -> Tensor:
    """Return the high halves of float32 numbers (..., 2): bfloat16 (groups, 2)."""
    return (
        (params.contiguous().view(torch.int32) >> 16)
        .to(torch.int16)
        .view(torch.bfloat16)
        .view(-1, 2)
    )


def _repeat_last(x: Tensor, size: int) -> Tensor:
    """Extend each row to `size` elements by its last one, which changes no minimum or maximum."""
    missing = size - x.shape[1]
    return torch.cat((x, x[:, -1:].expand(-1, missing)), 1) if missing and x.shape[1] else x
