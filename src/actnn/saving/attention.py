"""Attention in backward: its result and logarithms of sums are those of the decoded operands.

Nodes of attention make probabilities again, from queries, keys and the logarithm of the sum of
exponentials, and subtract from their gradient its mean, from the result. If operands are rounded
and these are not, probabilities do not sum to 1 and may exceed it by any factor, and the mean is
not theirs. So attention runs once more, on decoded operands, and its result need not be held.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from actnn.errors import ActNNError
from actnn.saving.held import Layout

_aten = torch.ops.aten
_KERNELS: dict[str, Any] = {
    "ScaledDotProductFlashAttentionForCpuBackward0": (
        _aten._scaled_dot_product_flash_attention_for_cpu.default
    ),
    "ScaledDotProductFlashAttentionBackward0": _aten._scaled_dot_product_flash_attention.default,
    "ScaledDotProductEfficientAttentionBackward0": (
        _aten._scaled_dot_product_efficient_attention.default
    ),
    "ScaledDotProductCudnnAttentionBackward0": _aten._scaled_dot_product_cudnn_attention.default,
}
_KERNELS_OF_BACKWARD = {
    getattr(_aten, f"{kernel.__name__.partition('.')[0]}_backward").default: kernel
    for kernel in _KERNELS.values()
}
REPEATED = frozenset(_KERNELS)
"""Autograd nodes of attention that can run again."""
_SETTINGS = {  # of a kernel that runs again; dropout changes no logarithm of a sum
    "dropout_p": 0.0,
    "compute_log_sumexp": True,
    "return_debug_mask": False,
}


def _names(kernel: Any) -> list[str]:
    return [argument.name for argument in kernel._schema.arguments]


def drops(node: Any) -> bool:
    """Whether an autograd node of attention has dropout."""
    return bool(node._saved_dropout_p)


def saves_sums(node: Any, tensor: Tensor) -> bool:
    """Whether a tensor is what a node of attention has saved as the logarithms of sums."""
    names = "_saved_logsumexp", "_saved_log_sumexp"
    found = [getattr(node, name) for name in names if name in dir(type(node))]
    return any(saved.data_ptr() == tensor.data_ptr() for saved in found)


class Again:
    """What a node of attention saved of its results; its backward makes them from its operands."""

    __slots__ = ("__weakref__", "_made")
    held, codes = 0, None

    def __init__(self) -> None:
        self._made: list[Tensor | None] = [None, None]

    def unpack(self, view: Layout | None = None) -> Tensor:
        """Return the result of attention."""
        assert view is None
        return self._take(0)

    def sums(self) -> Tensor:
        """Return the logarithms of the sums of exponentials, float32."""
        return self._take(1)

    def _take(self, index: int) -> Tensor:
        """Return one of both, and hold the other for the next call."""
        found, self._made[index] = self._made[index], None
        if found is None:
            self._made = list(_run_again())
            found, self._made[index] = self._made[index], None
        assert found is not None
        return found


def _run_again() -> tuple[Tensor, Tensor]:
    """Return the results of the attention whose backward is about to run, without dropout."""
    node: Any = torch._C._current_autograd_node()
    name = "" if node is None else node.name()
    if name not in _KERNELS:
        raise ActNNError(
            f"Expected what attention saves to be used by its backward alone, got {name or 'other'}"
            " code that reads it; keep it (set_choices)"
        )
    kernel = _KERNELS[name]
    arguments: dict[str, Any] = {
        each: _SETTINGS[each] if each in _SETTINGS else getattr(node, f"_saved_{each}")
        for each in _names(kernel)
    }
    with torch.no_grad(), torch.autocast(arguments["query"].device.type, enabled=False):
        out, sums, *_ = kernel(**arguments)
    return out, sums


def repeat_attention(forward: fx.Graph, backward: fx.Graph) -> None:
    """Let a backward graph of AOTAutograd make what attention saved of its results likewise.

    Args:
        forward: The forward graph.
        backward: The backward graph; its inputs have the names of what is saved.
    """
    made = {node.name: node for node in forward.nodes}
    for node in [each for each in backward.nodes if each.op == "call_function"]:
        kernel, given = _KERNELS_OF_BACKWARD.get(node.target), _given(node)
        sums = made.get(given["logsumexp"].name) if kernel else None
        before = sums.args[0] if sums is not None and sums.args else None
        if not isinstance(before, fx.Node) or before.target is not kernel:
            continue
        inputs = {each: given[name] for name, each in _given(before).items() if name in given}
        with backward.inserting_before(node):
            again = backward.node_copy(before, inputs.__getitem__)
            results = [backward.call_function(operator.getitem, (again, i)) for i in (0, 1)]
        again.args = tuple(
            _SETTINGS.get(name, value)
            for name, value in zip(_names(kernel), again.args, strict=False)
        )
        for result, value in zip(results, before.meta["val"][:2], strict=True):
            result.meta["val"] = value
        node.replace_input_with(given["logsumexp"], results[1])
        if not given["dropout_p"]:
            node.replace_input_with(given["out"], results[0])


def _given(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by the names of its operator."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    return dict(zip(_names(node.target), node.args, strict=False)) | node.kwargs
