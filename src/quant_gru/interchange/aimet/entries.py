"""One encoding, independent of the version of the file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """The encoding of a tensor: real value = scale * (code - zero_point), for each channel.

    Attributes:
        name: Name of the tensor.
        bits: Width of a code.
        signed: Whether codes are signed; zero points are on this grid.
        scales: One scale, or one per channel.
        zero_points: As many as scales.
        axis: The dimension of the channels; None for one scale, or if a file does not state it.
        is_param: Whether the tensor is a weight or bias.
    """

    name: str
    bits: int
    signed: bool
    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    axis: int | None
    is_param: bool

    @property
    def is_symmetric(self) -> bool:
        """Whether AIMET calls it symmetric: signed codes, all zero points 0."""
        return self.signed and not any(self.zero_points)

    @property
    def lowest(self) -> int:
        """The smallest code."""
        return -(1 << (self.bits - 1)) if self.signed else 0
