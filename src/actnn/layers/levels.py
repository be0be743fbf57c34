"""The levels of compression."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from actnn.errors import ActNNError
from actnn.saving.records import LOSSLESS


@dataclass(frozen=True)
class Level:
    """What a level does.

    Attributes:
        bits: Bits per element, on average if `adaptive`.
        compress: Whether anything is compressed; if not, tensors are held as they are.
        norms: Whether the inputs of normalizations are compressed.
        adaptive: Whether bits move to the tensors and samples that need them.
        swap: Whether codes move to host memory.
    """

    bits: int
    compress: bool = True
    norms: bool = True
    adaptive: bool = False
    swap: bool = False


LEVELS = {
    "L0": Level(LOSSLESS, compress=False),
    "L1": Level(4, norms=False),
    "L1.1": Level(8, norms=False),
    "L1.2": Level(2, norms=False),
    "L2": Level(4),
    "L2.1": Level(3),
    "L2.2": Level(2),
    "L2.8": Level(8),
    "L3": Level(2, adaptive=True),
    "L3.1": Level(2, adaptive=True),
    "L4": Level(2, adaptive=True, swap=True),
    "L5": Level(2, adaptive=True, swap=True),
    "swap": Level(LOSSLESS, compress=False, swap=True),
}


def level_of(name: str) -> Level:
    """Return a level by its name.

    Raises:
        ActNNError: If there is no such level.
    """
    if name not in LEVELS:
        near = difflib.get_close_matches(str(name), LEVELS, n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ActNNError(f"Expected level to be one of {', '.join(LEVELS)}, got {name!r}{hint}")
    return LEVELS[name]
