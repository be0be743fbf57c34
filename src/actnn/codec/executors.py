"""Selects who encodes and decodes: native code on a CPU, kernels on a GPU, else PyTorch.

All of them return the same bytes. `reference.py` describes the arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from actnn._errors import ActNNWarning
from actnn.codec import cpu, reference
from actnn.codec.codes import UNBOUNDED, Bounds, data_bytes
from actnn.codec.cuda import executor as cuda
from actnn.codec.memory_order import flat
from actnn.codec.noise import RUN
from kernel_runtime.allocators import Maker, maker
from kernel_runtime.cuda import driver

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
