"""How many bits each saved tensor, layer and sample gets."""

from actnn.allocation.greedy import calc_precision, damage
from actnn.allocation.sensitivity import Sensitivities
from actnn.allocation.threshold import MAX_BITS, MIN_BITS, allocate

__all__ = [
    "MAX_BITS",
    "MIN_BITS",
    "Sensitivities",
    "allocate",
    "calc_precision",
    "damage",
]
