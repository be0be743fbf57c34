"""Selects who encodes and decodes: native code on a CPU, kernels on a GPU, else PyTorch.

All of them return the same bytes. `reference.py` describes the arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from actnn.codec import _native, cpu, reference
from actnn.codec.codes import UNBOUNDED, Bounds, bytes_of, data_bytes
from actnn.codec.cuda import executor as cuda
from actnn.codec.memory_order import flat
from actnn.codec.noise import RUN
from actnn.errors import ActNNWarning
from quant_gru.kernel_runtime.allocators import Maker, maker
from quant_gru.kernel_runtime.cuda import driver

Name = Literal["cpu", "cuda", "reference"]
_RUN: dict[str, Callable[..., None]] = {"cpu": cpu.run, "cuda": cuda.run}


@cache
def executor_of(device: torch.device) -> Name:
    """Return who encodes tensors on a device.

    If the kernels cannot run on a GPU, an ActNNWarning says why, once.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return "reference"
    missing = driver.missing(device)
    if missing is None:
        return "cuda"
    warnings.warn(f"The codec runs slowly on {device}. {missing}", ActNNWarning, stacklevel=2)
    return "reference"


@lru_cache(maxsize=4096)
def _makers(n: int, bits: int, group: int, device: torch.device) -> tuple[Maker, Maker]:
    """Return functions that allocate data and parameters; on a GPU, the current one."""
    return (
        maker((data_bytes(n, bits),), device, torch.uint8),
        maker((-(-n // group), 2), device, torch.bfloat16),
    )


def _elsewhere(device: torch.device) -> bool:
    """Whether a GPU is not the current one, where the makers allocate."""
    return device.type == "cuda" and device.index != torch._C._cuda_getDevice()


def encode_flat(
    x: Tensor,
    bits: int,
    state: Tensor,
    tensor: int,
    group: int,
    stochastic: bool,
    bounds: Bounds = UNBOUNDED,
) -> tuple[Tensor, Tensor]:
    """Encode a dense tensor with equal bits. Return data, and parameters (groups, 2)."""
    device = x.device
    name = executor_of(device)
    if name == "reference":
        return reference.encode_flat(flat(x), bits, state, tensor, group, stochastic, bounds)
    if _elsewhere(device):
        with torch.cuda.device(device):
            return encode_flat(x, bits, state, tensor, group, stochastic, bounds)
    make_data, make_params = _makers(x.numel(), bits, group, device)
    data, params = make_data(), make_params()
    noise = (state, tensor, stochastic)
    _RUN[name]("encode", x, data, params, 1, bits, group, *noise, bounds=bounds)
    return data, params


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
    name = executor_of(data.device)
    if name == "reference":
        return reference.decode_flat(data, params, bits, group, n, dtype, bounds)
    x = torch.empty(n, dtype=dtype, device=data.device)
    _RUN[name]("decode", x, data, params, 1, bits, group, bounds=bounds)
    return x


def coder_of(
    x: Tensor,
    bits: int,
    group: int,
    stochastic: bool,
    bounds: Bounds,
    encode: Callable[[Tensor, Tensor, int], Any],
    decode: Callable[[Any], Tensor],
) -> _native.Coder | None:
    """Return native code that encodes and decodes tensors of one size and layout.

    Args:
        x: A dense tensor of these; on a GPU, the others begin at a multiple of 16 bytes if it does.
        bits: Bits of a code.
        group: Elements of a group.
        stochastic: Whether codes are rounded stochastically.
        bounds: Of the elements.
        encode: What runs instead where a mode must see the tensors that are made, or another GPU is
            the current one.
        decode: The same for decoding; codes are a block of codes and parameters, or what `encode`
            returned.

    Returns:
        None if neither native code nor a kernel can run there.
    """
    device, n = x.device, x.numel()
    name = executor_of(device)
    if name == "reference" or not n:
        return None
    codes = data_bytes(n, bits)
    make_codes = maker((bytes_of(n, bits, group),), device, torch.uint8)
    make_tensor = maker(x.shape, device, x.dtype, x.stride())
    form = (x.dtype, bits, group)
    if name == "cpu":
        start_encode: Any = cpu.call_of("encode", *form, stochastic, 1, n, bounds)
        start_decode: Any = cpu.call_of("decode", *form, False, 1, n, bounds)
    else:
        here = (1, n, device, bounds)
        start_encode = cuda.launch_of("encode", *form, stochastic, cuda.in_tiles(x), *here)
        # what is allocated begins at a multiple of 512 bytes
        start_decode = cuda.launch_of("decode", *form, False, n < cuda.MOST_IN_TILES, *here)
    index = -1 if name == "cpu" else device.index
    makers = (make_codes, make_tensor, codes)
    return _native.Coder(index, *makers, start_encode, start_decode, encode, decode, Tensor)


def sums_of(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return bits of samples in 1..8, and their inclusive sums: int64 (samples,)."""
    if len(bits) and executor_of(bits.device) == "cuda":
        return cuda.sums_of(bits)
    return reference.sums_of(bits)


def encode_samples(
    x: Tensor,
    bits: Tensor,
    ends: Tensor,
    state: Tensor,
    tensor: int,
    group: int,
    stochastic: bool,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    """Encode samples (samples, m) with `sums_of` the bits of each. Return data and parameters."""
    name = executor_of(x.device)
    if name == "reference":
        return reference.encode_samples(x, bits, state, tensor, group, stochastic, capacity)
    samples, m = x.shape
    size = capacity * -(-m // RUN) * (RUN // 8)
    data = torch.empty(size, dtype=torch.uint8, device=x.device)
    params = torch.empty((samples * -(-m // group), 2), dtype=torch.bfloat16, device=x.device)
    noise = (state, tensor, stochastic)
    more = (bits, ends, capacity)
    _RUN[name]("encode", x, data, params, samples, 0, group, *noise, *more)
    return data, params


def decode_samples(
    data: Tensor,
    params: Tensor,
    bits: Tensor,
    ends: Tensor | None,
    group: int,
    m: int,
    dtype: torch.dtype,
) -> Tensor:
    """Reverse `encode_samples`. Return elements (samples, m)."""
    name = executor_of(data.device)
    if name == "reference":
        return reference.decode_samples(data, params, bits, group, m, dtype)
    samples = len(bits)
    x = torch.empty((samples, m), dtype=dtype, device=data.device)
    capacity = data.numel() // max(-(-m // RUN) * (RUN // 8), 1)
    if ends is None:
        ends = bits.cumsum(0)
    more = {"bits_of": bits, "ends": ends, "capacity": capacity}
    _RUN[name]("decode", x, data, params, samples, 0, group, **more)
    return x
