"""Choices about saved tensors, and records of what was saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from actnn.errors import ActNNError

ACTIONS = ("keep", "compress", "recompute", "offload")
LOSSLESS = 32  # as bits: nothing is rounded
BITS = (*range(1, 9), LOSSLESS)


@dataclass(frozen=True)
class Choice:
    """What to do with one saved tensor, or with all that a module saves.

    Attributes:
        action: 'keep' holds the tensor itself. 'compress' holds codes. 'offload' moves the tensor
            to host memory, or its codes if `bits` is given. 'recompute' is for modules: nothing
            but their inputs is held, and backward runs their forward once more.
        bits: Bits per element: 1 to 8, or 32, which rounds nothing. None leaves the width of the
            Saving for 'compress', and rounds nothing for 'offload'.

    Example:
        >>> def policy(info: TensorInfo) -> Choice:
        ...     return Choice("keep" if info.name.startswith("head") else "compress", bits=4)
        >>> _ = compress(network, policy=policy)
    """

    action: Literal["keep", "compress", "recompute", "offload"]
    bits: int | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ActNNError(
                f"Expected the action to be one of {', '.join(ACTIONS)}, got {self.action!r}"
            )
        if self.bits is not None:
            checked_bits(self.bits)


KEEP = Choice("keep")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a policy knows of a tensor that is about to be saved.

    Attributes:
        module: Path of the innermost module whose forward saves it; '' is the root.
        op: Name of the autograd node that made it, such as 'ReluBackward0'; '' for a leaf,
            'checkpoint' for an input of torch.utils.checkpoint.
        index: Position in the order of saving.
        shape: Its shape.
        dtype: Its dtype.
        nbytes: Its size in bytes.
    """

    module: str
    op: str
    index: int
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int


Policy: TypeAlias = Callable[[TensorInfo], Choice]


@dataclass(slots=True)
class Record:
    """One tensor that autograd saved in a step.

    Attributes:
        index: Position in the order of saving.
        module: Path of the innermost module whose forward saved it; '' is the root.
        shape: Its shape.
        dtype: Its dtype.
        nbytes: Bytes that autograd would have held for it; 0 if they are held anyway.
        held: Bytes that are held on its device.
        reason: Why, such as 'compressed', 'parameter', 'small' or 'shared with 12'.
        choice: What was done.
        op: Name of the autograd node that made it; '' for a leaf.
    """

    index: int
    module: str
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    held: int
    reason: str
    choice: Choice
    op: str = ""


def checked_bits(bits: int) -> int:
    """Return a number of bits; raise if it is none of `BITS`."""
    if bits not in BITS or type(bits) is not int:
        raise ActNNError(
            f"Expected bits to be 1 to 8, or 32 (nothing is rounded), as an int, got {bits!r}"
        )
    return bits
