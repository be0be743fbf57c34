"""Operations whose backward compares their result with their operands, which are not rounded then.

Some give the gradient to the elements that are equal to the result. Of rounded ones, none is: the
gradient would be zero, or NaN. Others take the exponential of the difference, where operands may be
infinite or as good as that (masks). The hooks see an operand before it is known which operation
saves it, so that it is exchanged when the result is saved.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from actnn.saving.held import Held, Kept, View

COMPARED = "compared in backward"  # the reason in records
_MOST_OPERANDS = 8  # tensors that one operation saves
_EXTREMES = frozenset(
    name + "Backward0" for name in "Amax Amin Aminmax Median Nanmedian".split()
) | {"MaxBackward1", "MinBackward1"}
_REDUCTIONS = frozenset(
    name + "Backward0" for name in "IndexReduce ScatterReduce SegmentReduce".split()
)

_EXPONENTIALS = frozenset({"LogsumexpBackward0", "LogcumsumexpBackward0"})

_NORMS = {  # and where they keep their order, which is infinite if they compare
    "LinalgVectorNormBackward0": "_saved_ord",
    **{
        name: "_saved_p"
        for name in "NormBackward1 DistBackward0 CdistBackward0 PdistBackward0".split()
    },
}


def is_compared(tensor: Tensor) -> bool:
    """Whether a tensor is the result of an operation that compares it with its operands."""
    node: Any = tensor.grad_fn
    name = "" if node is None else node.name()
    if name in _REDUCTIONS:
        return getattr(node, "_saved_reduce", "") not in ("mean", "sum", "prod")
    if name in _NORMS:
        return getattr(node, _NORMS[name], math.inf) in (math.inf, -math.inf)
    return name in _EXTREMES or name in _EXPONENTIALS


class Operands:
    """The tensors that were rounded last."""

    def __init__(self) -> None:
        # What `pack` returned, the tensor, its version, the index of its record.
        self._rounded: deque[tuple[weakref.ref[Any], weakref.ref[Tensor], int, int]]
        self._rounded = deque(maxlen=_MOST_OPERANDS)

    def add(self, tensor: Tensor, packed: Held | View, record: int) -> None:
        """Remember a tensor, unless it is held as it is.

        Args:
            tensor: The tensor.
            packed: What `pack` returns for it.
            record: Index of its record.
        """
        if type(packed) is not Kept:
            references = weakref.ref(packed), weakref.ref(tensor)
            self._rounded.append((*references, tensor._version, record))

    def keep(self, result: Tensor) -> Iterator[tuple[int, Kept]]:
        """Hold the operands of an operation, which has just saved them, without rounding.

        Yields:
            Index of the record of an operand, and what is held now.
        """
        assert result.grad_fn is not None
        nodes = [node for node, _ in result.grad_fn.next_functions if node is not None]
        operands = {node._sequence_nr() for node in nodes}
        for packed, tensor, version, record in self._rounded:
            held, exact = packed(), tensor()
            if held is None or exact is None or exact.grad_fn is None:
                continue
            if exact._version != version:  # what was saved exists as codes only
                continue
            if exact.grad_fn._sequence_nr() in operands:
                base = exact if exact._base is None else exact._base
                kept = Kept(exact, base.nbytes)
                held.keep(kept)
                yield record, kept
