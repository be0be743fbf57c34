"""Selects who encodes and decodes: native code on a CPU, kernels on a GPU, else PyTorch.

All of them return the same bytes. `reference.py` describes the arguments.
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from actnn._errors import ActNNWarning
from actnn.codec import _native, reference
from actnn.codec.codes import data_bytes
from actnn.codec.cuda import executor as cuda
from actnn.codec.memory_order import flat
from actnn.codec.noise import RUN
from kernel_runtime.allocators import Maker, maker
from kernel_runtime.cuda import driver

_WORD = 0xFFFFFFFF
Name = Literal["cpu", "cuda", "reference"]


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
    x: Tensor, bits: int, state: Tensor, tensor: int, group: int, stochastic: bool
) -> tuple[Tensor, Tensor]:
    """Encode a dense tensor with equal bits. Return data, and parameters (groups, 2)."""
    device = x.device
    name = executor_of(device)
    if name == "reference":
        return reference.encode_flat(flat(x), bits, state, tensor, group, stochastic)
    if _elsewhere(device):
        with torch.cuda.device(device):
            return encode_flat(x, bits, state, tensor, group, stochastic)
    make_data, make_params = _makers(x.numel(), bits, group, device)
    data, params = make_data(), make_params()
    if name == "cuda":
        cuda.run("encode", x, data, params, 1, bits, group, state, tensor, stochastic)
    else:
        own = torch.tensor([bits])
        _run_native("encode", x, data, params, own, own, bits, group, state, tensor, stochastic)
    return data, params


def decode_flat(
    data: Tensor, params: Tensor, bits: int, group: int, n: int, dtype: torch.dtype
) -> Tensor:
    """Reverse `encode_flat`. Return elements (n,)."""
    name = executor_of(data.device)
    if name == "reference":
        return reference.decode_flat(data, params, bits, group, n, dtype)
    x = torch.empty(n, dtype=dtype, device=data.device)
    if name == "cuda":
        cuda.run("decode", x, data, params, 1, bits, group)
    else:
        own = torch.tensor([bits])
        _run_native("decode", x, data, params, own, own, bits, group)
    return x


def encode_samples(
    x: Tensor,
    bits: Tensor,
    state: Tensor,
    tensor: int,
    group: int,
    stochastic: bool,
    capacity: int,
) -> tuple[Tensor, Tensor]:
    """Encode samples (samples, m) with bits (samples,) of each. Return data and parameters."""
    name = executor_of(x.device)
    if name == "reference":
        return reference.encode_samples(x, bits, state, tensor, group, stochastic, capacity)
    samples, m = x.shape
    size = capacity * -(-m // RUN) * (RUN // 8)
    # samples that do not fit leave a gap
    data = torch.zeros(size, dtype=torch.uint8, device=x.device)
    params = torch.empty((samples * -(-m // group), 2), dtype=torch.bfloat16, device=x.device)
    ends = bits.cumsum(0)
    if name == "cuda":
        cuda.run(
            "encode",
            x.view(-1),
            data,
            params,
            samples,
            0,
            group,
            state,
            tensor,
            stochastic,
            bits,
            ends,
            capacity,
        )
    else:
        _run_native(
            "encode", x, data, params, bits, ends, capacity, group, state, tensor, stochastic
        )
    return data, params


def decode_samples(
    data: Tensor, params: Tensor, bits: Tensor, group: int, m: int, dtype: torch.dtype
) -> Tensor:
    """Reverse `encode_samples`. Return elements (samples, m)."""
    name = executor_of(data.device)
    if name == "reference":
        return reference.decode_samples(data, params, bits, group, m, dtype)
    samples = len(bits)
    x = torch.empty((samples, m), dtype=dtype, device=data.device)
    ends = bits.cumsum(0)
    capacity = data.numel() // max(-(-m // RUN) * (RUN // 8), 1)
    if name == "cuda":
        cuda.run(
            "decode",
            x.view(-1),
            data,
            params,
            samples,
            0,
            group,
            bits_of=bits,
            ends=ends,
            capacity=capacity,
        )
    else:
        _run_native("decode", x, data, params, bits, ends, capacity, group)
    return x


def _run_native(
    function: Literal["encode", "decode"],
    x: Tensor,
    data: Tensor,
    params: Tensor,
    bits: Tensor,
    ends: Tensor,
    capacity: int,
    group: int,
    state: Tensor | None = None,
    tensor: int = 0,
    stochastic: bool = False,
) -> None:
    """Run native code. x is (rows, m), or (m,) with one number of bits; bits and ends (rows,)."""
    if not x.numel():
        return
    seed, step = (0, 0) if state is None else state.tolist()
    rows = len(bits)
    run = _native.encode if function == "encode" else _native.decode
    run(
        x.data_ptr(),
        data.data_ptr(),
        params.data_ptr(),
        bits.data_ptr(),
        ends.data_ptr(),
        rows,
        x.numel() // rows,
        group,
        capacity,
        seed & 0xFFFFFFFFFFFFFFFF,
        step & _WORD,
        tensor,
        cuda.REAL[x.dtype],
        stochastic,
        torch.get_num_threads(),
    )
