"""Tensors near 0 by which backward divides, so that a small error is a large one of the gradient.

Hooks see a tensor before it is known which operation saves it. The backward of the first steps
tells, and whether the numbers are near 0. Then the gradient is large there, too, so that operands
of the products from which the numbers come have to be exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import local
from typing import Any

import torch
from torch import Tensor

from actnn.errors import ActNNWarning
from actnn.saving.exclusions import FORMS

LEAST_BITS = 4  # with fewer, all is noise
_ITSELF = "Log Log2 Log10 Prod Cumprod Lgamma Digamma Sqrt Rsqrt Reciprocal Std Hypot"
_DIVISORS: dict[str, Callable[[Any, Tensor], Tensor | None]] = {
    **dict.fromkeys((f"{name}Backward0" for name in _ITSELF.split()), lambda node, x: x),
    "DivBackward0": lambda node, x: node._saved_other,
    "AddcdivBackward0": lambda node, x: node._saved_tensor2,
    "Atan2Backward0": lambda node, x: torch.hypot(node._saved_self, node._saved_other),
    "XlogyBackward0": lambda node, x: node._saved_other,
    "Log1PBackward0": lambda node, x: 1 + x,
    "PowBackward0": lambda node, x: x if node._saved_exponent < 1 else None,
    "PowBackward1": lambda node, x: node._saved_self if node._saved_exponent.min() < 1 else None,
    **dict.fromkeys(
        (f"{name}Backward0" for name in "Acos Acosh Asin Atanh Erfinv".split()),
        lambda node, x: 1 - x * x,
    ),
    **dict.fromkeys(("LogitBackward0", "BinaryCrossEntropyBackward0"), lambda node, x: x - x * x),
    "NormBackward1": lambda node, x: node._saved_result,
    "LinalgVectorNormBackward0": lambda node, x: node._saved_result,
}
_FORMS = FORMS | {
    f"{name}Backward{form}"
    for name in "Slice Select Split Narrow Add Sub Neg Sum Mean Clamp ClampMin".split()
    for form in (0, 1)
}
_PASSED = _FORMS | {"MulBackward0"}  # through which gradients pass element by element
_DEPTH = 12
_DIVIDED = "divided by in backward"
_RUNNING = local()  # a divisor that is itself held as codes is decoded here


def divides(tensor: Tensor, bits: int, path: str | None) -> bool:
    """Return whether the node that runs divides by numbers that codes do not tell from 0.

    The answer is the same for the nodes whose products it divides or divides by.

    Args:
        tensor: The decoded tensor that it needs.
        bits: Bits of its codes.
        path: Path of the module that has saved it, for the warning; None if none is needed.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None or getattr(_RUNNING, "is_inside", False):
        return False
    if _DIVIDED not in node.metadata:
        if not _is_steep(node, tensor, bits):
            return False
        _mark(node)
    if path is not None:
        warnings.warn(
            f"Backward divides by numbers near 0 at {path!r}, and codes are not exact enough "
            "there, so that the gradient of this step may be wrong. From the next step on, these "
            "tensors are kept exact. model.actnn.set_choices keeps them from the first",
            ActNNWarning,
            stacklevel=2,
        )
    return True


def _is_steep(node: Any, tensor: Tensor, bits: int) -> bool:
    """Whether a node divides by numbers much nearer to 0 than others."""
    divisor_of = _DIVISORS.get(node.name())
    if divisor_of is None or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    _RUNNING.is_inside = True
    try:
        divisor = divisor_of(node, tensor)
    finally:
        _RUNNING.is_inside = False
    if divisor is None or not divisor.numel():
        return False
    sizes = divisor.detach().abs()
    least = torch.where(sizes > 0, sizes, torch.inf).min()  # divisions by 0 stay what they are
    # Decoded numbers that are not 0 are at least a step of codes from it. Also if one is NaN.
    return not bool(sizes.max() <= 2 ** (max(bits, LEAST_BITS) - 1) * least)


def _mark(node: Any) -> None:
    """Mark the nodes that have made the operands of a node."""
    left = [node]
    for _ in range(_DEPTH):
        nodes = [each for one in left for each, _ in one.next_functions if each is not None]
        left = []
        for each in nodes:
            if each.name() in _PASSED:
                left.append(each)
            if each.name() not in _FORMS:
                each.metadata[_DIVIDED] = True
