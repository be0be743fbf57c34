"""Whether a module works on each token by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.dropout import _DropoutNd

from actnn.errors import ActNNError
from actnn.saving.recompute import buffer_versions, spare_buffers

_FEW = 16  # tokens that are run alone
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2}  # of the norm of the result
_TOLERANCE_ELSE = 1e-3


def check_tokens(module: nn.Module, on: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Check with a few tokens that a module gives the same to tokens alone.

    Args:
        module: The module.
        on: Its forward, a function of the tokens alone.
        x: The tokens, (..., T, C).

    Returns:
        Whether there were enough tokens with data to know it.

    Raises:
        ActNNError: If it does not, if it changes buffers, or if tensors other than x and its
            parameters want gradients.
    """
    count = min(x.shape[-2] // 2, _FEW)
    if not x.numel() or not count or x.is_meta or is_fake(x) or _is_captured(x):
        return False
    sample = x.detach().narrow(-2, 0, 2 * count).clone()
    devices = [x.device] if x.is_cuda else []
    with spare_buffers(module.modules()), _without_dropout(module), torch.random.fork_rng(devices):
        before = buffer_versions(module)
        # Hooks around the call, such as those of a checkpoint, must not see the sample.
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, Tensor.detach):
            whole = on(sample.requires_grad_(x.requires_grad))
        if isinstance(whole, Tensor):
            _check_leaves(module, whole, sample)
        with torch.no_grad():
            parts = [on(part) for part in sample.detach().split(count, -2)]
        after = buffer_versions(module)
    changed = [old for old, new in zip(before, after, strict=True) if old != new]
    if changed:
        raise _error(module, "leave its buffers as they are", f"changes {changed[0][0]!r}")
    shapes = [list(each.shape) if isinstance(each, Tensor) else None for each in (whole, *parts)]
    wanted = [list(each.shape[:-1]) for each in (sample, *sample.split(count, -2))]
    if [shape and shape[:-1] for shape in shapes] != wanted:
        raise _error(module, "return a tensor (..., T, D) for (..., T, C)", f"returns {shapes[0]}")
    first, second = (
        torch.nan_to_num(each.detach().double()) for each in (whole, torch.cat(parts, -2))
    )
    difference, norm = float((first - second).norm()), float(first.norm())
    if not difference <= _TOLERANCE.get(whole.dtype, _TOLERANCE_ELSE) * norm:
        raise _error(
            module,
            "work on each token by itself",
            f"gives {count} tokens alone another result than beside others: it differs by "
            f"{difference:.2g} where its norm is {norm:.2g}",
        )
    return True


def _error(module: nn.Module, rule: str, got: str) -> ActNNError:
    return ActNNError(
        f"Expected a module in chunks to {rule}, got {type(module).__name__}, whose forward {got}"
    )


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    found = [each for each in module.modules() if isinstance(each, _DropoutNd) and each.training]
    for each in found:
        each.training = False
    try:
        yield
    finally:
        for each in found:
            each.training = True


def _check_leaves(module: nn.Module, result: Tensor, sample: Tensor) -> None:
    """Raise if a result depends on a leaf beside the sample and the module's parameters."""
    known = {id(sample), *map(id, module.parameters())}
    left, seen = [result.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in known:
            raise _error(
                module,
                "want gradients of its input and parameters alone",
                f"uses another tensor of {list(leaf.shape)} that wants one",
            )
        left += [each for each, _ in node.next_functions]
