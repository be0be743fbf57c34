"""What a step knows of its Saving, and of the allocation of bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

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


class OutputWatch(Protocol):
    """Sees the gradients of the outputs of a forward."""

    def watch(self, output: Any) -> Any:
        """Return the output with which to go on."""
        ...


class Allocator(Protocol):
    """What moves bits, or looks at their noise; see `actnn.adapting`."""

    @property
    def by_sample(self) -> bool:
        """Whether samples of a tensor have bits of their own."""
        ...

    @property
    def adapts(self) -> bool:
        """Whether tensors may have fewer bits than with equal bits."""
        ...

    @property
    def corrects(self) -> bool:
        """Whether the backward of batch norms is corrected for the noise of their input."""
        ...

    @property
    def floor(self) -> int:
        """The fewest bits of tensors that have no bits of their own; above 1 in trials."""
        ...

    @property
    def runs(self) -> int:
        """How many steps comparisons of gradients have run so far."""
        ...

    def begin_step(self, model: nn.Module | None) -> None:
        """Begin a forward pass of a model."""
        ...

    def begin_batch(self, samples: int) -> None:
        """Say how many samples the model's input has."""
        ...

    def bits_of(self, path: str, tensor: Tensor, record: int, *, norm: bool) -> Bits | None:
        """Bits of a tensor that is about to be compressed."""
        ...

    def bits_of_derivative(self, path: str, elements: int) -> int | None:
        """Bits of the codes of a derivative; None for those of all tensors."""
        ...

    def record_of(self, name: str) -> int | None:
        """Index of the record of a tensor by its name."""
        ...

    def share(self, record: int, path: str) -> None:
        """Say that a module saves a tensor whose codes are held already."""
        ...

    def watch(
        self, saving: Any, forward: Callable[..., Any], arguments: Any, named: Any
    ) -> OutputWatch | None:
        """Begin a forward of the model; return what is to see its output, or None."""
        ...

    def detach(self) -> None:
        """Remove what observes the model."""
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
    def divided(self) -> weakref.WeakSet[nn.Module]:
        """Activations by whose results backward divides."""
        ...

    @property
    def own_masks(self) -> bool:
        """Whether dropout keeps its seed, and not the mask that PyTorch would draw."""
        ...

    @property
    def adaptive(self) -> Allocator | None:
        """Moves bits to where they are needed."""
        ...

    def hooks_in(self, path: str) -> Any:
        """The pack and unpack hooks for a module that is compiled by itself."""
        ...

    def is_own(self, pack: object) -> bool:
        """Whether it is one of these pack hooks."""
        ...

    def is_active(self) -> bool:
        """Whether its hooks see what is saved now."""
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

    @property
    def adapts(self) -> bool:
        """Whether tensors may have fewer bits than with equal bits."""
        ...

    def noise_state(self, device: torch.device) -> Tensor:
        """Seed and step of the noise, int64 (2,)."""
        ...

    def watch(self, held: Held) -> None:
        """Count what Python holds."""
        ...
