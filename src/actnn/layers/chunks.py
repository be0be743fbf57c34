"""Modules that work on each token by itself run on some tokens at a time, also in backward.

What such a module saves for backward, and the gradients inside of it, then exist for one chunk of
tokens only. Its forward runs once more in backward, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from actnn.errors import ActNNError
from actnn.layers.chunk_runs import Call, run_in_chunks
from actnn.layers.root import Root
from actnn.layers.tokens import check_tokens
from actnn.saving.active import transformed
from actnn.saving.module_classes import Swapped, is_swapped, swap, swap_back
from actnn.saving.uncompiled import uncompiled

Module = TypeVar("Module", bound=nn.Module)
_TOKENS, _CHECKED = "_actnn_tokens", "_actnn_tokens_checked"


def in_chunks(module: Module, tokens: int | None) -> Module:
    """Run a module on some tokens at a time, in forward and in backward, in place.

    For modules that work on each token by itself, such as norms and multilayer perceptrons of
    Transformers: forward takes a tensor (..., T, C) by position and returns a tensor (..., T, D).
    Backward holds the input alone, and runs the forward of each chunk again. Inside of
    `torch.utils.checkpoint` that run replaces the one of the checkpoint. The results are those of
    the module, up to the order of sums. The first call checks with a few tokens that the module
    gives the same to tokens alone. `compress` and `uncompress` leave chunks as they are.

    Args:
        module: The module.
        tokens: The most tokens of a chunk, over all leading dimensions alike; None runs the module
            as a whole again.

    Returns:
        The module.

    Raises:
        ActNNError: If an argument is not as described; in a call, if the module does not work on
            each token by itself, or if arguments or the result have another form.

    Example:
        >>> mlp = in_chunks(torch.nn.Linear(8, 8), tokens=64)
        >>> mlp(torch.randn(2, 300, 8)).shape
        torch.Size([2, 300, 8])
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise ActNNError(
            f"Expected a torch.nn.Module that Python runs, got {type(module).__name__}"
        )
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ActNNError(f"Expected tokens to be an int of at least 1, or None, got {tokens!r}")
    if "forward" in vars(module):
        raise ActNNError(
            f"Expected the forward of the module to be that of its class, got one that was set on "
            f"this {type(module).__name__}"
        )
    if tokens is not None and is_swapped(module, Root):
        raise ActNNError(
            f"Expected a module inside of a compressed model, or one that is not compressed, got a "
            f"{type(module).__name__} that was compressed itself; uncompress it"
        )
    if is_swapped(module, InChunks):
        swap_back(module, InChunks)
    for name in (_TOKENS, _CHECKED):
        vars(module).pop(name, None)
    if tokens is not None:
        vars(module)[_TOKENS] = tokens
        swap(module, InChunks)
    return module


@contextmanager
def as_wholes(model: nn.Module) -> Iterator[None]:
    """Let the modules of a model run as wholes, while others change their classes."""
    found = {each: vars(each)[_TOKENS] for each in model.modules() if is_swapped(each, InChunks)}
    for each in found:
        in_chunks(each, None)
    try:
        yield
    finally:
        for each, tokens in found.items():
            in_chunks(each, tokens)


class InChunks(Swapped):
    """A module that runs on some tokens at a time."""

    def _actnn_effect(self) -> str:
        return f"actnn: {vars(self)[_TOKENS]} tokens at a time"

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's own forward on each chunk."""
        run = super().forward  # type: ignore[misc]
        if torch._C._get_tracing_state() is not None or transformed():
            return run(*arguments, **named)
        module = cast(nn.Module, self)
        x = _only_tensor(module, arguments, named)

        others = arguments[1:]  # backward keeps `on`, which must not hold x

        def on(part: Tensor) -> Any:
            return run(part, *others, **named)

        tokens = vars(self)[_TOKENS]
        if not vars(self).get(_CHECKED) and check_tokens(module, on, x):
            vars(self)[_CHECKED] = True
        return run_in_chunks(Call(module, on, tokens), x)

    uncompiled(forward)


def _only_tensor(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Return the first argument; raise unless it is the only tensor."""
    others = [each for each in tree_leaves((arguments[1:], named)) if isinstance(each, Tensor)]
    x = arguments[0] if arguments else None
    if not isinstance(x, Tensor) or x.dim() < 2 or others:
        shapes = [list(each.shape) for each in (x, *others) if isinstance(each, Tensor)]
        raise ActNNError(
            f"Expected a module in chunks to get one tensor (..., T, C), the first by position, "
            f"got {type(module).__name__} with {len(arguments)} by position and tensors of {shapes}"
        )
    return x
