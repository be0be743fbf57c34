"""Encoded tensors, their size, and the order in which elements are encoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actnn._errors import ActNNError
from actnn.codec.noise import RUN

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_BITS = 8


@dataclass(frozen=True)
class Key:
    """What makes noise independent.

    Attributes:
        state: int64 (2,), the seed with the rank mixed in and the step, on the device of the data.
            `noise_state` makes one. A captured CUDA graph may advance the step.
        tensor: Id of the tensor within the step, in 0..2^32-1.
    """

    state: Tensor
    tensor: int


@dataclass
class Codes:
    """An encoded tensor.

    Attributes:
        data: Packed codes, uint8.
        params: Base and step of each group, bfloat16 (groups, 2).
        bits: Bits of a code, or those of each sample: integers (samples,).
        group: Elements of a group.
        shape: Shape of the encoded tensor.
        strides: Strides of the decoded tensor.
        dtype: dtype of the encoded tensor.
    """

    data: Tensor
    params: Tensor
    bits: int | Tensor
    group: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes and parameters."""
        return self.data.nbytes + self.params.nbytes

    @property
    def flags(self) -> Tensor:
        """Number of groups that decode to NaN: int32 (1,), on the device of the codes.

        A group does so if it contains NaN or an infinity, or if its range overflows. With bits per
        sample, so do groups beyond the capacity.
        """
        return torch.isnan(self.params[:, 0]).sum(dtype=torch.int32).view(1)


def data_bytes(elements: int, bits: int) -> int:
    """Return the bytes of packed codes: whole runs of 32 codes."""
    return -(-elements // RUN) * bits * (RUN // 8)


def bytes_of(n: int, bits: int, group: int = 256) -> int:
    """Return the bytes of an encoded tensor: codes, and 4 bytes for each group.

    Args:
        n: Number of elements.
        bits: Bits of a code.
        group: Elements of a group.
    """
    return data_bytes(n, bits) + 4 * -(-n // group)


def dense(x: Tensor) -> Tensor:
    """Return x if its elements fill its memory without gaps or overlap, else a contiguous copy."""
    if torch.compiler.is_compiling() or x.is_neg():
        x = x.resolve_neg()
    if x.is_contiguous():
        return x
    # compilers can follow a search, but not sorting
    left, expected = [each for each in zip(x.stride(), x.shape, strict=True) if each[1] != 1], 1
    while left:
        found = [each for each in left if each[0] == expected]
        if not found:
            return x.contiguous()
        left.remove(found[0])
        expected *= found[0][1]
    return x


def in_rows(x: Tensor) -> Tensor:
    """Return x if it is dense and every sample is a block of memory, else a contiguous copy."""
    x = dense(x)
    samples = x.shape[0]
    if samples > 1 and x.numel() and x.stride(0) * samples != x.numel():
        return x.contiguous()
    return x


def flat(x: Tensor) -> Tensor:
    """Return the elements (n,) of a dense tensor in the order of its memory, without a copy."""
    return x.detach().as_strided((x.numel(),), (1,))


def rows_of(x: Tensor) -> Tensor:
    """Return the elements (samples, m) of a tensor from `in_rows`, without a copy."""
    samples = x.shape[0]
    return x.detach().as_strided(
        (samples, x.numel() // max(samples, 1)), (x.numel() // max(samples, 1), 1)
    )


def watched(x: Tensor) -> bool:
    """Whether a compiler, a mode or a transform must see operators instead of their results."""
    return (
        type(x) not in (Tensor, torch.nn.Parameter)
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def check(x: Tensor, bits: int | Tensor, key: Key, group: int, capacity: int | None) -> None:
    """Check the arguments of `encode`.

    Raises:
        ActNNError: An argument is not supported.
    """
    if x.dtype not in DTYPES:
        raise ActNNError(f"Expected x to be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.layout != torch.strided:
        raise ActNNError(f"Expected x to be strided, got {x.layout}")
    check_group(group)
    if key.state.dtype != torch.int64 or key.state.shape != (2,):
        got = f"{key.state.dtype} {tuple(key.state.shape)}"
        raise ActNNError(f"Expected the key's state to be int64 (2,), got {got}")
    if key.state.device != x.device:
        raise ActNNError(f"Expected the key to be on {x.device}, got {key.state.device}")
    if not 0 <= key.tensor < 1 << 32:
        raise ActNNError(f"Expected the key's tensor to be in 0..2^32-1, got {key.tensor}")
    if isinstance(bits, Tensor):
        _check_bits_of_samples(x, bits, capacity)
    elif not 1 <= bits <= MOST_BITS:
        raise ActNNError(f"Expected bits to be in 1..{MOST_BITS}, got {bits}")
    elif capacity is not None:
        raise ActNNError(f"Expected no capacity for equal bits, got {capacity}")


def check_group(group: int) -> None:
    """Raise an ActNNError if a group size is not a positive multiple of 32."""
    if group < RUN or group % RUN:
        raise ActNNError(f"Expected group to be a positive multiple of {RUN}, got {group}")


def _check_bits_of_samples(x: Tensor, bits: Tensor, capacity: int | None) -> None:
    if x.dim() == 0 or bits.shape != (x.shape[0],):
        shape, got = tuple(x.shape), tuple(bits.shape)
        raise ActNNError(f"Expected bits to have one number per sample of x {shape}, got {got}")
    if bits.dtype.is_floating_point or bits.dtype == torch.bool:
        raise ActNNError(f"Expected bits to be integers, got {bits.dtype}")
    if bits.device != x.device:
        raise ActNNError(f"Expected bits to be on {x.device}, got {bits.device}")
    if capacity is not None and capacity < 0:
        raise ActNNError(f"Expected capacity to be at least 0, got {capacity}")
