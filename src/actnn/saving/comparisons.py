"""Operations whose backward compares their result with their operands, which are not rounded then.

Some give the gradient to the elements that are equal to the result. Of rounded ones, none is: the
gradient would be zero, or NaN. Others take the exponential of the difference, where operands may be
infinite or as good as that (masks). The hooks see an operand before it is known which operation
saves it, so that it is exchanged when the result is saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

COMPARED = "compared in backward"  # the reason in records
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
COMPARING = _EXTREMES | _EXPONENTIALS | _REDUCTIONS | frozenset(_NORMS)
"""Nodes whose backward may compare."""


def is_compared(tensor: Tensor) -> bool:
    """Whether a tensor is the result of an operation that compares it with its operands."""
    node: Any = tensor.grad_fn
    name = "" if node is None else node.name()
    if name in _REDUCTIONS:
        return getattr(node, "_saved_reduce", "") not in ("mean", "sum", "prod")
    if name in _NORMS:
        return getattr(node, _NORMS[name], math.inf) in (math.inf, -math.inf)
    return name in _EXTREMES or name in _EXPONENTIALS


def operands_of(
    result: Tensor, rounded: Iterable[tuple[Any, Any, int, int]], first: int | None = None
) -> Iterator[tuple[Any, Tensor, int]]:
    """Find the operands of an operation, which has just saved them, among rounded tensors.

    Args:
        result: The result of the operation.
        rounded: The tensors that were rounded last: weak references to what is held and to the
            tensor, its version, and the index of its record.
        first: How many of the operands are looked for, in their order; None for all.

    Yields:
        What is held, the tensor, and the index of its record.
    """
    assert result.grad_fn is not None
    nodes = [node for node, _ in result.grad_fn.next_functions[:first] if node is not None]
    operands = {node._sequence_nr() for node in nodes}
    for packed, tensor, version, record in rounded:
        held, exact = packed(), tensor()
        if held is None or exact is None or exact.grad_fn is None:
            continue
        if exact._version != version:  # what was saved exists as codes only
            continue
        if exact.grad_fn._sequence_nr() in operands:
            yield held, exact, record
