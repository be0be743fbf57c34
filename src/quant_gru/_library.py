"""The quantized GRU as operators of torch: what torch.compile, torch.export and torch.func see.

`quant_gru::forward` runs all layers and directions, `quant_gru::backward` is its straight-through
gradient. Both are functions of their tensors alone: the scales come as a tensor, too, the
parameter document as text, so a graph that holds them needs no module. Plans are built and kept
inside the operators, for as long as that tensor lives.

Eager calls do not come here: `traced` says, cheaply, when they have to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from quant_gru._errors import QuantGRUError
from quant_gru._frozen_plan import FrozenPlans
from quant_gru._layers import Weights, run_real
from quant_gru._plan_cache import PlanCache
from quant_gru.export import params
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.qparams import QParams

_INPUTS = (
    "Tensor x, Tensor h0, Tensor? lengths, Tensor[] weights, Tensor parameters, Tensor? seed, "
    "float dropout, bool bidirectional, bool live"
)
# plans are built and kept inside: not to be recorded by a CUDA graph (a tag since torch 2.8)
_TAGS = [
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
]
_library = torch.library.Library("quant_gru", "DEF")
_library.define(f"forward({_INPUTS}) -> (Tensor, Tensor)", tags=_TAGS)
_library.define(
    f"backward(Tensor grad_y, Tensor grad_h_n, {_INPUTS}) -> (Tensor, Tensor, Tensor[])",
    tags=_TAGS,
)
_forward_op = torch.ops.quant_gru.forward.default
_backward_op = torch.ops.quant_gru.backward.default
_peek_functorch = torch._C._functorch.peek_interpreter_stack
_count_modes = torch._C._len_torch_dispatch_stack
_jit_state = torch._C._get_tracing_state


class Source(Protocol):
    """What makes plans: `LivePlans` from real weights, `FrozenPlans` from integers."""

    def plan(self, weights: Sequence[Tensor], live: bool) -> GRUPlan:
        """The plan of all layers and directions; see `forward` for the arguments."""
        ...


class LivePlans:
    """Plans that follow real weights.

    Args:
        qparams: [layer][direction] -> quantizers and tables.
        cache: Where plans are kept.
    """

    def __init__(self, qparams: Sequence[Sequence[QParams]], cache: PlanCache) -> None:
        self._qparams = qparams
        self._cache = cache

    def plan(self, weights: Sequence[Tensor], live: bool) -> GRUPlan:
        """The plan of all layers and directions; see `forward` for the arguments."""
        return self._cache.plan(self._qparams, _nested(weights, len(self._qparams)), live)


_sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def keep(parameters: Tensor, source: Source) -> None:
    """Say where the plans of a parameter tensor come from, as long as the tensor lives."""
    _sources[parameters] = source


def traced(x: object) -> bool:
    """Whether a call is to go through the operators: a tracer or a transform is watching.

    Args:
        x: The input of the call.

    Raises:
        QuantGRUError: torch.jit.trace is running.
    """
    if torch.compiler.is_compiling():
        return True
    if _jit_state() is not None:
        raise QuantGRUError(
            "Expected torch.export or torch.compile for a quantized GRU, got torch.jit.trace, "
            "which would record constants"
        )
    return (
        _count_modes() > 0
        or _peek_functorch() is not None
        or (isinstance(x, Tensor) and type(x) is not Tensor)
    )


def forward(
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Tensor],
    parameters: Tensor,
    dropout: float = 0.0,
    bidirectional: bool = False,
    live: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run all layers on real values, by the operator.

    Args:
        x: (T, N, C).
        h0: (layers * directions, N, H).
        lengths: int64 (N,) or None.
        weights: W, R and, unless there are no biases, bw, br of each cell, cell after cell; or the
            integers of a frozen GRU, as `FrozenPlans.plan` takes them.
        parameters: The parameter document as text, uint8 (L,); not to be written into.
        dropout: Probability of a value between layers to become zero.
        bidirectional: Whether each layer has two directions.
        live: Whether weights may change unseen (training).

    Returns:
        Output (T, N, D*H) and last states (layers * directions, N, H), float32.
    """
    seed = torch.randint(1 << 62, (), dtype=torch.int64) if dropout else None
    numbers = (dropout, bidirectional, live)
    if not torch.compiler.is_compiling() and _peek_functorch() is not None:
        y, h_n = _Transformed.apply(x, h0, lengths, parameters, seed, numbers, *weights)
    else:
        y, h_n = _forward_op(x, h0, lengths, list(weights), parameters, seed, *numbers)
    return y, h_n


# --- what runs


def _forward(
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: list[Tensor],
    parameters: Tensor,
    seed: Tensor | None,
    dropout: float,
    bidirectional: bool,
    live: bool,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), _seeded(seed, x.device):
        plan = _source(parameters, weights).plan(weights, live)
        nested = _gradient_weights(plan, weights)
        y, h_n = run_real(plan, x, h0, lengths, nested, dropout)
    return y.contiguous(), h_n.contiguous()


def _backward(
    grad_y: Tensor,
    grad_h_n: Tensor,
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: list[Tensor],
    parameters: Tensor,
    seed: Tensor | None,
    dropout: float,
    bidirectional: bool,
    live: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    if not weights[0].is_floating_point():
        raise QuantGRUError("Expected weights to be real for a gradient, got a frozen GRU")
    with _autograd(), torch.enable_grad(), _seeded(seed, x.device):
        leaves = [t.detach().requires_grad_() for t in (x, h0, *weights)]
        plan = _source(parameters, weights).plan([w.detach() for w in weights], live)
        nested = _gradient_weights(plan, leaves[2:])
        outputs = run_real(plan, leaves[0], leaves[1], lengths, nested, dropout)
        grads = torch.autograd.grad(outputs, leaves, (grad_y, grad_h_n))
    dx, dh0, *rest = (grad.contiguous() for grad in grads)
    return dx, dh0, rest


def _source(parameters: Tensor, weights: Sequence[Tensor]) -> Source:
    found: Source | None = _sources.get(parameters)
    if found is None:
        document = params.from_tensor(parameters, "a graph")
        document.pop("batch_first", None)
        cells = params.from_document(document, "a graph").cells
        real = weights[0].is_floating_point()
        found = LivePlans(cells, PlanCache()) if real else FrozenPlans(cells)
        keep(parameters, found)
    return found


def _gradient_weights(plan: GRUPlan, weights: Sequence[Tensor]) -> list[list[Weights]]:
    if weights[0].is_floating_point():
        return _nested(weights, len(plan.cells))
    return [[(None, None, None, None) for _ in cells] for cells in plan.cells]


def _nested(weights: Sequence[Tensor], layers: int) -> list[list[Weights]]:
    """[layer][direction] -> W, R, bw, br, of a flat list."""
    size = 4 if len(weights) > 2 and weights[2].dim() == 1 else 2
    flat: list[Weights] = [
        (*weights[i : i + size], *(None,) * (4 - size))  # type: ignore[misc]
        for i in range(0, len(weights), size)
    ]
    D = len(flat) // layers
    return [flat[i : i + D] for i in range(0, len(flat), D)]


@contextmanager
def _seeded(seed: Tensor | None, device: torch.device) -> Iterator[None]:
    """Random numbers of a seed, so that backward draws forward's dropout; then those of before."""
    if seed is None:
        yield
        return
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        torch.default_generator.manual_seed(int(seed))
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int(seed))
        yield


def _autograd() -> AbstractContextManager[None]:
    """Autograd inside an operator, below which the dispatcher turns it off."""
    guard: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.AutogradFunctionality, False
    )
    return guard


# --- what is known without running


def _fake_forward(
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: list[Tensor],
    parameters: Tensor,
    seed: Tensor | None,
    dropout: float,
    bidirectional: bool,
    live: bool,
) -> tuple[Tensor, Tensor]:
    T, N, _ = x.shape
    D = 2 if bidirectional else 1
    y = x.new_empty((T, N, D * h0.shape[2]), dtype=torch.float32)
    return y, x.new_empty(h0.shape, dtype=torch.float32)


def _fake_backward(
    grad_y: Tensor,
    grad_h_n: Tensor,
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: list[Tensor],
    *rest: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    dx, dh0, *others = (t.new_empty(t.shape) for t in (x, h0, *weights))
    return dx, dh0, others


# --- gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, h0, lengths, weights, parameters, seed, *numbers = inputs
    ctx.save_for_backward(x, h0, lengths, parameters, seed, *weights)
    ctx.numbers = numbers


def _differentiate(ctx: Any, grad_y: Tensor, grad_h_n: Tensor) -> tuple[Any, ...]:
    x, h0, lengths, parameters, seed, *weights = ctx.saved_tensors
    dx, dh0, dweights = _backward_op(
        grad_y, grad_h_n, x, h0, lengths, weights, parameters, seed, *ctx.numbers
    )
    return (dx, dh0, None, dweights, *(None,) * 5)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """A backward that only refuses needs nothing."""


def _refuse(ctx: Any, *grads: Any) -> None:
    raise QuantGRUError(
        "Expected a quantized GRU to be differentiated once, got a gradient of its gradient"
    )


class _Transformed(torch.autograd.Function):
    """`quant_gru::forward` for torch.func, which differentiates functions, not operators."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        h0: Tensor,
        lengths: Tensor | None,
        parameters: Tensor,
        seed: Tensor | None,
        numbers: tuple[Any, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        y, h_n = _forward_op(x, h0, lengths, list(weights), parameters, seed, *numbers)
        return y, h_n

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.numbers = inputs[:6]
        ctx.save_for_backward(*tensors, *inputs[6:])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_h_n: Tensor) -> tuple[Any, ...]:
        grads = _TransformedBackward.apply(ctx.numbers, grad_y, grad_h_n, *ctx.saved_tensors)
        return (*grads[:2], None, None, None, None, *grads[2:])


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        numbers: tuple[Any, ...],
        grad_y: Tensor,
        grad_h_n: Tensor,
        x: Tensor,
        h0: Tensor,
        lengths: Tensor | None,
        parameters: Tensor,
        seed: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        dx, dh0, rest = _backward_op(
            grad_y, grad_h_n, x, h0, lengths, list(weights), parameters, seed, *numbers
        )
        return dx, dh0, *rest

    setup_context = staticmethod(_save_nothing)
    backward = staticmethod(_refuse)


# --- torch.func.vmap


def _vmap_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """One run where only sequences are batched: the new dimension joins the rows."""
    x, h0, lengths, weights, parameters, seed, *numbers = args
    x_dim, h0_dim, lengths_dim, *others = in_dims
    if seed is not None or any(_is_batched(dim) for dim in others):
        return _one_by_one(_forward_op, info.batch_size, in_dims, args)
    B = info.batch_size
    x, h0 = _into_rows(x, x_dim, 1, B), _into_rows(h0, h0_dim, 1, B)
    lengths = None if lengths is None else _into_rows(lengths, lengths_dim, 0, B)
    outputs = _forward_op(x, h0, lengths, weights, parameters, seed, *numbers)
    return tuple(t.unflatten(1, (B, -1)) for t in outputs), (1, 1)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return _one_by_one(_backward_op, info.batch_size, in_dims, args)


def _into_rows(value: Tensor, dim: int | None, rows: int, size: int) -> Tensor:
    """Batch dimension `dim`, or `size` times the same, joined with the dimension `rows`."""
    if dim is None:
        batched = value.unsqueeze(rows).expand(*value.shape[:rows], size, *value.shape[rows:])
    else:
        batched = value.movedim(dim, rows)
    return batched.flatten(rows, rows + 1)


def _one_by_one(
    op: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[Any, Any]:
    results = [
        op(*(_pick(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(_stack(each) for each in zip(*results, strict=True))
    return stacked, tuple([0] * len(t) if isinstance(t, list) else 0 for t in stacked)


def _is_batched(dim: Any) -> bool:
    return any(map(_is_batched, dim)) if isinstance(dim, list | tuple) else dim is not None


def _pick(value: Any, dim: Any, index: int) -> Any:
    if isinstance(value, list | tuple):
        dims = dim if isinstance(dim, list | tuple) else [dim] * len(value)
        return [_pick(v, d, index) for v, d in zip(value, dims, strict=True)]
    return value if dim is None else value.select(dim, index)


def _stack(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list | tuple):
        return [_stack(each) for each in zip(*values, strict=True)]
    return torch.stack(list(values))


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("quant_gru::forward", _fake_forward, lib=_library)
torch.library.register_fake("quant_gru::backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "quant_gru::forward", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd(
    "quant_gru::backward", _refuse, setup_context=_save_nothing, lib=_library
)
torch.library.register_vmap("quant_gru::forward", _vmap_forward, lib=_library)
torch.library.register_vmap("quant_gru::backward", _vmap_backward, lib=_library)
