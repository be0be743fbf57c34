"""Which saved tensors are held as they are, and why.

Native code follows `reason_to_keep` (saving/native/step.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from actnn.codec.codes import UNBOUNDED, Bounds
from actnn.saving import _native

# Operations that only change the type or the layout. The result for a parameter is a parameter
# in another form: rounding it would make gradients of inputs inexact.
FORMS: frozenset[str] = frozenset(
    name + "Backward0"
    for name in "ToCopy T Transpose Permute View UnsafeView ReshapeAlias Clone Expand "
    "Unsqueeze Squeeze Alias".split()
)
_DEPTH = 8
_COMPUTED = "computed weight"

# Operators whose results enter their own derivative more than linearly, so that noise becomes bias,
# and their autograd nodes.
_NONLINEAR = {
    "sigmoid": "SigmoidBackward0",
    "tanh": "TanhBackward0",
    "_softmax": "SoftmaxBackward0",
    "_safe_softmax": "SafeSoftmaxBackward0",
    "_masked_softmax": "MaskedSoftmaxBackward0",
    "_log_softmax": "LogSoftmaxBackward0",
    "exp": "ExpBackward0",
    "expm1": "Expm1Backward0",
    "sqrt": "SqrtBackward0",
    "rsqrt": "RsqrtBackward0",
    "reciprocal": "ReciprocalBackward0",
    "pow": "PowBackward0",
    "softplus": "SoftplusBackward0",
    "elu": "EluBackward0",
    "log_sigmoid_forward": "LogSigmoidBackward0",
    "logsumexp": "LogsumexpBackward0",
    "norm": "NormBackward0",
    "linalg_vector_norm": "LinalgVectorNormBackward0",
}
NONLINEAR_BITS, ATTENTION_BITS = 8, 4
# Their results may be infinite, and numbers beside infinities have no code of 1 bit.
_INFINITE = {
    "masked_fill": "MaskedFillBackward0",
    "where": "WhereBackward0",
    "log": "LogBackward0",
    "log2": "Log2Backward0",
    "log10": "Log10Backward0",
    "log1p": "Log1PBackward0",
    "logaddexp": "LogaddexpBackward0",
}
_INFINITE_BITS = 2
_LEAST = dict.fromkeys([*_INFINITE, *_INFINITE.values()], _INFINITE_BITS)
_LEAST |= dict.fromkeys([*_NONLINEAR, *_NONLINEAR.values()], NONLINEAR_BITS)
# Functions with a bounded result that enters their own derivative, which is 0 at the bounds.
_BOUNDS: dict[str, Bounds] = {
    "SigmoidBackward0": (0.0, 1.0),
    "SoftmaxBackward0": (0.0, 1.0),
    "SafeSoftmaxBackward0": (0.0, 1.0),
    "MaskedSoftmaxBackward0": (0.0, 1.0),
    "TanhBackward0": (-1.0, 1.0),
}
_LOG_SOFTMAX = "LogSoftmaxBackward0"
# The exponential of numbers below these is 0: of float32, and of float64.
_VANISHED, _VANISHED_IN_FLOAT64 = -104.0, -746.0
CHOSEN_BITS = 4  # of an input of a checkpoint, if a choice or a policy names them
BEYOND = "beyond float32"  # the reason in records for float64 that codes cannot express
RELU = "ReluBackward0"  # of relu as a function; its backward needs the sign of the result
CHECKPOINT = "checkpoint"  # as the operation: an input of a block that runs again in backward


def tensors_in(values: object) -> Iterable[Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def reason_to_keep(tensor: Tensor, known: dict[int, str], storage: int) -> str | None:
    """Return why a tensor is held as it is; None if it may be compressed.

    Args:
        tensor: The tensor, not of a subclass.
        known: Address of a storage -> why it is alive anyway.
        storage: Address of the storage of the tensor.
    """
    found = known.get(storage)
    if found is not None:
        return found if tensor._base is None else f"view of a {found}"
    base = tensor if tensor._base is None else tensor._base
    if base.is_leaf and base.requires_grad:
        kind = "parameter" if isinstance(base, nn.Parameter) else "leaf"
        return kind if base is tensor else f"view of a {kind}"
    if not tensor.is_floating_point():
        return "not floating point"
    return weight_reason(base) if tensor.requires_grad else "without gradient"


def alive_anyway(reason: str) -> bool:
    """Whether a reason says that somebody else holds the storage."""
    return reason.removeprefix("view of a ") in ("parameter", "buffer", "input", "leaf")


def mark_computed(weight: Tensor) -> None:
    """Say that a tensor is a weight that was computed from parameters; so are its copies."""
    _native.mark_computed()
    for each in (weight, weight._base):
        node: Any = None if each is None else each.grad_fn
        if node is not None:
            node.metadata[_COMPUTED] = True


def weight_reason(tensor: Tensor) -> str | None:
    """Return which kind of weight a tensor is, also in another type or layout; None if none."""
    node: Any = tensor.grad_fn
    for _ in range(_DEPTH):
        if node is None:
            break
        if _COMPUTED in node.metadata:
            return _COMPUTED
        if node.name() not in FORMS:
            break
        node = node.next_functions[0][0]
    is_copy = node is not tensor.grad_fn and isinstance(
        getattr(node, "variable", None), nn.Parameter
    )
    return "copy of a parameter" if is_copy else None


def op_of(tensor: Tensor) -> str:
    """Return the name of the autograd node that made a tensor; '' for a leaf."""
    node = tensor.grad_fn
    return "" if node is None else node.name()


def is_attention(op: str) -> bool:
    """Whether an autograd node is one of attention."""
    return op.startswith("ScaledDotProduct")


def bounds_of(op: str, dtype: torch.dtype) -> Bounds:
    """Return what limits the result of an operation; backward sees its elements there exactly.

    A logarithm of a probability below which the exponential is 0 counts as that bound.

    Args:
        op: Name of the autograd node.
        dtype: dtype of the result.
    """
    if op == _LOG_SOFTMAX:
        return (_VANISHED_IN_FLOAT64 if dtype == torch.float64 else _VANISHED), 0.0
    return _BOUNDS.get(op, UNBOUNDED)


def attention_bits(bits: int) -> int:
    """Return the bits of queries and keys where other tensors have `bits`: an exponential follows.

    The noise of scores is that of queries and keys times the scores.
    """
    return min(NONLINEAR_BITS, max(ATTENTION_BITS, 2 * bits))


def least_bits(tensor: Tensor, op: str, bits: int) -> int:
    """Return the fewest bits at which the noise of a tensor does little harm.

    Args:
        tensor: The tensor.
        op: Name of the autograd node that made it.
        bits: Those of other tensors.
    """
    if op == CHECKPOINT:
        return CHOSEN_BITS
    least = bits_of_result(op)
    if least == NONLINEAR_BITS:
        return least
    # Operands of attention: heads are split off by a transposed view (N, H, T, D).
    if tensor.dim() == 4 and tensor._base is not None and not tensor.is_contiguous():
        return attention_bits(bits)
    if is_attention(op):  # with dropout its own backward needs the result, too
        return ATTENTION_BITS
    return least


def bits_of_result(name: str) -> int:
    """Return the fewest bits of what an operator has made.

    Args:
        name: Of the operator, or of its autograd node.
    """
    return _LEAST.get(name, 1)
