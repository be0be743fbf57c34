"""What a step knows of its Saving, and of the allocation of bits."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from actnn.allocation import Sensitivities
from actnn.saving import _native
from actnn.saving.held import Held
from actnn.saving.records import Choice, TensorInfo


class Bits(NamedTuple):
    """Bits of a tensor.

    Attributes:
        rows: The tensor; with bits per sample one row for each sample, (N, ...), in the same
            memory.
        bits: An integer for all elements; or those of each sample, int32 (N,), on the device.
        capacity: The most that bits per sample can sum to.
    """

    rows: Tensor
    bits: int | Tensor
    capacity: int | None = None


class Allocator(Protocol):
    """See `actnn.saving.adaptive.Adaptive`."""

    @property
    def statistics(self) -> Sensitivities:
        """Ranges and energies."""
        ...

    def bits_of(self, path: str, tensor: Tensor, record: int) -> Bits | None:
        """Bits of a tensor that is about to be compressed."""
        ...

    def share(self, record: int, path: str) -> None:
        """Say that a module saves a tensor whose codes are held already."""
        ...

    def observe(self, path: str, gradient: Tensor) -> None:
        """Take in the gradient of the output of a layer."""
        ...


class Settings(Protocol):
    """See `actnn.saving.context.Saving`."""

    @property
    def bits(self) -> int:
        """Bits per element."""
        ...

    @property
    def default(self) -> Choice:
        """The choice for tensors that nothing names."""
        ...

    @property
    def is_uniform(self) -> bool:
        """Whether `default` is the choice for all tensors."""
        ...

    @property
    def decides_by_kind(self) -> bool:
        """Whether all tensors of one kind that a module saves get the same choice."""
        ...

    @property
    def counter(self) -> _native.Counter:
        """Counts what native code holds."""
        ...

    @property
    def group(self) -> int:
        """Elements that share a range."""
        ...

    @property
    def min_bytes(self) -> int:
        """Smaller tensors are kept."""
        ...

    @property
    def stochastic(self) -> bool:
        """Whether rounding is random."""
        ...

    @property
    def own_masks(self) -> bool:
        """Whether dropout keeps its seed, and not the mask that PyTorch would draw."""
        ...

    @property
    def adaptive(self) -> Allocator | None:
        """Moves bits to where they are needed."""
        ...

    @property
    def hooks(self) -> Any:
        """The pack and unpack hooks."""
        ...

    def choice(self, info: TensorInfo) -> Choice:
        """What to do with a tensor."""
        ...

    def choice_of(self, path: str) -> Choice | None:
        """What is chosen for a module."""
        ...

    def exact(self, info: TensorInfo) -> Choice:
        """What to do with a tensor that is not rounded by default."""
        ...

    def noise_state(self, device: torch.device) -> Tensor:
        """Seed and step of the noise, int64 (2,)."""
        ...

    def watch(self, held: Held) -> None:
        """Count what Python holds."""
        ...
