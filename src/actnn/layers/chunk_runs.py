"""Runs a module in chunks of tokens, and each chunk again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import get_device_states, set_device_states

from actnn.errors import ActNNError
from actnn.saving.active import active_step
from actnn.saving.held import refuse_changed, refuse_second_derivative


class Call(NamedTuple):
    """One call of a module in chunks.

    Attributes:
        module: The module.
        on: Its own forward, a function of the tokens alone.
        tokens: The most tokens of a chunk.
    """

    module: nn.Module
    on: Callable[[Tensor], Any]
    tokens: int

    @property
    def weights(self) -> list[Tensor]:
        """The parameters that want gradients."""
        return [each for each in self.module.parameters() if each.requires_grad]

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether each module in it is in training."""
        return tuple(each.training for each in self.module.modules())

    @property
    def draws(self) -> bool:
        """Whether the forward draws random numbers."""
        found = (each for each in self.module.modules() if isinstance(each, _DropoutNd))
        return any(each.training and each.p > 0 for each in found)

    def result(self, x: Tensor) -> Tensor:
        """Return the results of all chunks: (..., T, C) to (..., T, D)."""
        result, first = None, 0
        for part in x.split(self.tokens, -2):
            y = self.on(part)
            if not isinstance(y, Tensor) or y.dim() < 2 or y.shape[:-1] != part.shape[:-1]:
                got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
                raise ActNNError(
                    f"Expected a module in chunks to return a tensor (..., T, D) for "
                    f"{list(part.shape)}, got {got} from {type(self.module).__name__}"
                )
            if part.shape[-2] == x.shape[-2]:
                return y
            if result is None:
                result = y.new_empty((*x.shape[:-1], y.shape[-1]))
            result.narrow(-2, first, y.shape[-2]).copy_(y)
            first += y.shape[-2]
        return cast(Tensor, result)


def run_in_chunks(call: Call, x: Tensor) -> Tensor:
    """Run a module in chunks: (..., T, C) to (..., T, D).

    Args:
        call: The module, and how.
        x: The tokens.
    """
    weights = call.weights
    if not torch.is_grad_enabled() or not (x.requires_grad or weights):
        with torch.no_grad():
            return call.result(x)
    step = active_step()
    if step is not None:
        step.keep_exact(x, "the module runs again on it")
    # An input without gradient has a node, too: it holds what backward runs on.
    node = [] if x.requires_grad else [x.new_empty(0, requires_grad=True)]
    held = _Input.apply(x, *node)
    result: Tensor = _Chunks.apply(call, held.grad_fn, x.requires_grad, held, *weights)
    return result


class _Autocast(NamedTuple):
    """The autocast of a forward; `dtype` is None if the device has none."""

    kind: str
    dtype: torch.dtype | None
    enabled: bool

    @classmethod
    def now(cls, kind: str) -> _Autocast:
        """Return the autocast that is in effect."""
        if not torch.amp.is_autocast_available(kind):
            return cls(kind, None, enabled=False)
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def again(self, *, cache: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which it is in effect, with or without a cache of weights."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=cache)


class _Input(Function):
    """Holds the input of a module, and is saved before the module runs.

    A checkpoint around the module ends its recomputation with the last tensor that is saved. So it
    does not run the chunks, which only backward needs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *node: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, ...]:
        return dx, *(None for _ in ctx.needs_input_grad[1:])


class _Chunks(Function):
    """Runs a module in chunks, and each again in backward."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, node: Any, wants: bool, x: Tensor, *weights: Tensor
    ) -> Tensor:
        """Run the chunks.

        Args:
            ctx: The context of autograd.
            call: The call.
            node: Node of `_Input` that holds x.
            wants: Whether a gradient of x is wanted.
            x: (..., T, C).
            weights: The parameters that want gradients.
        """
        ctx.set_materialize_grads(False)
        ctx.call, ctx.node, ctx.wants = call, node, wants
        ctx.weights, ctx.versions = weights, [each._version for each in weights]
        ctx.modes = call.modes
        ctx.random = (torch.get_rng_state(), *get_device_states(x)) if call.draws else None
        ctx.autocast = _Autocast.now(x.device.type)
        # Casts of weights that are made here have no gradient, and must not stay in the cache.
        with ctx.autocast.again(cache=False):
            return call.result(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a module in chunks", "in_chunks(module, None)")
        if dy is None:
            return None, None, None, None, *(None for _ in ctx.weights)
        kind = type(ctx.call.module).__name__
        if list(map(id, ctx.weights)) != list(map(id, ctx.call.weights)):
            raise ActNNError(
                f"Expected a module in chunks to have the same parameters with gradients in "
                f"backward as in forward, got {kind}, whose parameters have changed"
            )
        if ctx.modes != ctx.call.modes:
            raise ActNNError(
                f"Expected a module in chunks to be in the same mode in backward as in forward, "
                f"got {kind} after train() or eval()"
            )
        for each, version in zip(ctx.weights, ctx.versions, strict=True):
            refuse_changed(each, version)
        (x,) = ctx.node.saved_tensors
        with _random_numbers(x, ctx.random), ctx.autocast.again():
            dx, sums = _gradients(ctx.call, x, ctx.wants, ctx.weights, dy)
        cast_back = zip(sums, ctx.weights, strict=True)
        return None, None, None, dx, *(s if s is None else s.to(w.dtype) for s, w in cast_back)


@contextmanager
def _random_numbers(x: Tensor, states: tuple[Any, ...] | None) -> Iterator[None]:
    """Let the generators give what they gave in forward, and go on as before afterwards."""
    if states is None:
        yield
        return
    before = torch.get_rng_state(), *get_device_states(x)
    try:
        torch.set_rng_state(states[0])
        set_device_states(*states[1:], device_type=x.device.type)
        yield
    finally:
        torch.set_rng_state(before[0])
        set_device_states(*before[1:], device_type=x.device.type)


def _gradients(
    call: Call, x: Tensor, wants: bool, weights: tuple[Tensor, ...], dy: Tensor
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of x, or None, and of the weights, in float32 at least.

    Args:
        call: The call.
        x: (..., T, C).
        wants: Whether a gradient of x is wanted.
        weights: The parameters that want gradients.
        dy: Gradient of the result, (..., T, D).
    """
    dx = torch.empty_like(x) if wants else None
    sums: list[Tensor | None] = [None for _ in weights]
    first = 0
    for part, d in zip(x.split(call.tokens, -2), dy.split(call.tokens, -2), strict=True):
        leaf = part.detach().requires_grad_(wants)
        inputs = [leaf, *weights] if wants else list(weights)
        # Hooks of a forward pass that runs around this backward must not see the module.
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, Tensor.detach):
            y = call.on(leaf)
        if not y.requires_grad:  # it depends on none of them
            found: list[Tensor | None] = [None for _ in inputs]
        else:
            found = list(torch.autograd.grad(y, inputs, d, allow_unused=True))
        if dx is not None:
            dpart = found.pop(0)
            rows = dx.narrow(-2, first, part.shape[-2])
            rows.zero_() if dpart is None else rows.copy_(dpart)
        first += part.shape[-2]
        for index, gradient in enumerate(found):
            if gradient is None:
                continue
            wide = torch.promote_types(gradient.dtype, torch.float32)
            before = sums[index]
            sums[index] = gradient.to(wide) if before is None else before.add_(gradient)
    return dx, sums
