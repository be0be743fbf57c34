"""The quantized GRU as PyTorch operators, for torch.compile, torch.export and torch.func.

`quant_gru::forward` runs all layers and directions, `quant_gru::backward` is its straight-through
gradient. Both depend only on their tensors. The scales are also a tensor, which contains the
parameter document as text, so a graph with these operators needs no module. Plans are built inside
the operators and kept for the lifetime of that tensor.

Eager calls do not use them: `quant_gru.torch_ops.watchers` detects cheaply when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant_gru.autograd.backward_pass import (
    Asked,
    Pass,
    flat_gradients,
    gradients,
    nan_of,
    of_cells,
)
from quant_gru.autograd.straight_through import refuse
from quant_gru.errors import QuantGRUError
from quant_gru.execution.layers import run_real
from quant_gru.execution.noise import Noise
from quant_gru.integer.backward import Kept
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels.dispatch import PRECISIONS
from quant_gru.torch_ops.plan_sources import check_inputs, has_bias, run_prepared, source_of
from quant_gru.torch_ops.vmap import into_rows, is_batched, one_by_one

_INPUTS = (
    "Tensor x, Tensor h0, Tensor? lengths, Tensor[] weights, Tensor parameters, Tensor? seed, "
    "Tensor? updates, float dropout, float zoneout, float recurrent_dropout, bool bidirectional, "
    "bool live, str precision"
)
# operators build and keep plans, so a CUDA graph must not record them (a tag since torch 2.8)
_TAGS = [
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
]
_library = torch.library.Library("quant_gru", "DEF")
# `kept`: dtypes of the state codes that backward needs, such as "int8,uint8"; empty for none
_library.define(f"forward({_INPUTS}, str kept) -> (Tensor, Tensor, Tensor[])", tags=_TAGS)
# `needs`: for x and each weight; gradients that are not needed are returned empty
_library.define(
    "backward(Tensor grad_y, Tensor grad_h_n, Tensor nan, Tensor[] out, "
    f"{_INPUTS}, bool[] needs) -> (Tensor, Tensor, Tensor[])",
    tags=_TAGS,
)
_forward_op = torch.ops.quant_gru.forward.default
_backward_op = torch.ops.quant_gru.backward.default
_peek_functorch = torch._C._functorch.peek_interpreter_stack


@dataclass(frozen=True)
class Settings:
    """The settings of a run of all layers.

    Attributes:
        noise: Random masks, or None.
        bidirectional: Whether each layer has two directions.
        live: Whether weights may change undetected (training).
        precision: See `quant_gru.kernels.dispatch.PRECISIONS`.
        kept: dtypes of the codes of output.h of each layer and direction, if a gradient may be
            needed.
    """

    noise: Noise | None = None
    bidirectional: bool = False
    live: bool = False
    precision: str = PRECISIONS[0]
    kept: Sequence[torch.dtype] = ()


def forward(
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Tensor],
    parameters: Tensor,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Run all layers on real values, through the operator.

    Args:
        x: (T, N, C).
        h0: (layers * directions, N, H).
        lengths: int64 (N,) or None.
        weights: W, R and, with biases, bw, br, cell by cell; or the integers of a frozen GRU, as
            for `FrozenPlans.plan`.
        parameters: The parameter document as text, uint8 (L,); must not be modified.
        settings: The settings of the run.

    Returns:
        Output (T, N, D*H) and last states (layers * directions, N, H), float32.
    """
    noise = settings.noise or Noise()
    kept = ",".join(str(dtype).removeprefix("torch.") for dtype in settings.kept)
    rest = (
        noise.dropout,
        noise.zoneout,
        noise.recurrent_dropout,
        settings.bidirectional,
        settings.live,
        settings.precision,
        kept,
    )
    tensors = (x, h0, lengths, parameters, noise.seed, noise.updates)
    if not torch.compiler.is_compiling() and _peek_functorch() is not None:
        y, h_n, *_ = _Transformed.apply(*tensors, rest, *weights)
    else:
        y, h_n, _ = _forward_op(*tensors[:3], list(weights), *tensors[3:], *rest)
    return y, h_n


# --- implementations


def _forward(
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: list[Tensor],
    parameters: Tensor,
    seed: Tensor | None,
    updates: Tensor | None,
    dropout: float,
    zoneout: float,
    recurrent_dropout: float,
    bidirectional: bool,
    live: bool,
    precision: str,
    kept: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    noise = _noise(seed, updates, (dropout, zoneout, recurrent_dropout))
    keeps = Kept() if kept else None
    with torch.no_grad():
        plain = noise is None and keeps is None and not live
        source = source_of(parameters, weights)
        check_inputs(source, weights, x, h0, lengths)
        result = run_prepared(source, weights, x, h0, lengths) if plain else None
        if result is None:
            plan = _plan(parameters, weights, live, noise, h0, bidirectional)
            result = run_real(plan, x, h0, lengths, noise, keeps)
        y, h_n = result
    return y.contiguous(), h_n.contiguous(), _apart(keeps.out) if keeps else []


def _backward(
    grad_y: Tensor,
    grad_h_n: Tensor,
    nan: Tensor,
    out: list[Tensor],
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: list[Tensor],
    parameters: Tensor,
    seed: Tensor | None,
    updates: Tensor | None,
    dropout: float,
    zoneout: float,
    recurrent_dropout: float,
    bidirectional: bool,
    live: bool,
    precision: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    if not weights[0].is_floating_point():
        raise QuantGRUError("Expected weights to be real for a gradient, got a frozen GRU")
    noise = _noise(seed, updates, (dropout, zoneout, recurrent_dropout))
    bias = has_bias(weights)
    done = Pass(x, h0, lengths, noise, out, nan, precision)
    asked = Asked(needs[0], True, of_cells(needs[1:], bias))
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        check_inputs(source_of(parameters, weights), weights, x, h0, lengths)
        plan = _plan(parameters, weights, live, noise, h0, bidirectional)
        found = gradients(plan, done, grad_y, grad_h_n, asked)
    grads = [
        like.new_empty(0) if grad is None else grad.to(like.dtype).contiguous()
        for grad, like in zip(
            (found.x, *flat_gradients(found.cells, bias)), (x, *weights), strict=True
        )
    ]
    assert found.h0 is not None
    dx, grad_h0, *others = _apart([grads[0], found.h0.to(h0.dtype).contiguous(), *grads[1:]])
    return dx, grad_h0, others


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the same tensors without shared memory, as operator outputs must not overlap."""
    seen: set[int] = set()
    found = []
    for each in tensors:
        storage = each.untyped_storage().data_ptr()
        found.append(each.clone() if storage and storage in seen else each)
        seen.add(storage)
    return found


def _noise(
    seed: Tensor | None, updates: Tensor | None, chances: tuple[float, float, float]
) -> Noise | None:
    return None if seed is None and updates is None else Noise(seed, *chances, updates)


def _plan(
    parameters: Tensor,
    weights: Sequence[Tensor],
    live: bool,
    noise: Noise | None,
    h0: Tensor,
    bidirectional: bool,
) -> GRUPlan:
    source = source_of(parameters, weights)
    if noise is None:
        return source.plan(weights, live)
    D = 2 if bidirectional else 1
    dropped = noise.all_dropped(h0.shape[0] // D, D, h0.shape[2])
    return source.plan(weights, live, dropped, noise.recurrent_dropout)


# --- fake implementations


def _fake_forward(
    x: Tensor,
    h0: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    *_, bidirectional, _, _, kept = rest
    T, N, _ = x.shape
    H = h0.shape[2]
    y = x.new_empty((T, N, (2 if bidirectional else 1) * H), dtype=torch.float32)
    out = [x.new_empty((T, N, H), dtype=getattr(torch, name)) for name in kept.split(",") if name]
    return y, x.new_empty(h0.shape, dtype=torch.float32), out


def _fake_backward(
    grad_y: Tensor,
    grad_h_n: Tensor,
    nan: Tensor,
    out: list[Tensor],
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: list[Tensor],
    *rest: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    dx, *others = (
        t.new_empty(t.shape if needed else 0)
        for t, needed in zip((x, *weights), rest[-1], strict=True)
    )
    return dx, h0.new_empty(h0.shape), others


# --- gradients

_SAVED = 7  # tensors before the codes and the weights


def _gradients(
    cells: int,
    rest: Sequence[Any],
    grad_y: Tensor,
    grad_h_n: Tensor,
    saved: Sequence[Tensor],
    needs: list[bool],
) -> Any:
    x, h0, lengths, parameters, seed, updates, nan, *others = saved
    out, weights = others[:cells], others[cells:]
    tensors = (grad_y, grad_h_n, nan, out, x, h0, lengths, weights, parameters, seed, updates)
    return _backward_op(*tensors, *rest, needs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, h0, lengths, weights, parameters, seed, updates, *rest = inputs
    _, h_n, out = output
    ctx.save_for_backward(x, h0, lengths, parameters, seed, updates, nan_of(h_n), *out, *weights)
    ctx.rest, ctx.cells = rest[:-1], len(out)


def _differentiate(ctx: Any, grad_y: Tensor, grad_h_n: Tensor, _: Any) -> tuple[Any, ...]:
    needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3]]
    call = ctx.cells, ctx.rest, grad_y, grad_h_n, ctx.saved_tensors
    dx, dh0, dweights = _gradients(*call, needs)
    given = [g if needed else None for g, needed in zip((dx, *dweights), needs, strict=True)]
    return (given[0], dh0, None, given[1:], *(None,) * 10)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save nothing: a backward that only raises needs no tensors."""


class _Transformed(torch.autograd.Function):
    """`quant_gru::forward` for torch.func, which differentiates functions instead of operators."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        h0: Tensor,
        lengths: Tensor | None,
        parameters: Tensor,
        seed: Tensor | None,
        updates: Tensor | None,
        rest: tuple[Any, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        y, h_n, out = _forward_op(x, h0, lengths, list(weights), parameters, seed, updates, *rest)
        return y, h_n, *out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.rest = inputs[:7]
        _, h_n, *out = output
        ctx.cells = len(out)
        ctx.mark_non_differentiable(*out)
        ctx.save_for_backward(*tensors, nan_of(h_n), *out, *inputs[7:])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_h_n: Tensor, *_: Any) -> tuple[Any, ...]:
        grads = _TransformedBackward.apply(
            ctx.cells, ctx.rest[:-1], grad_y, grad_h_n, *ctx.saved_tensors
        )
        return (*grads[:2], *(None,) * 5, *grads[2:])


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        cells: int, rest: tuple[Any, ...], grad_y: Tensor, grad_h_n: Tensor, *saved: Tensor
    ) -> tuple[Tensor, ...]:
        needs = [True] * (1 + len(saved) - cells - _SAVED)
        dx, dh0, dweights = _gradients(cells, rest, grad_y, grad_h_n, saved, needs)
        return dx, dh0, *dweights

    setup_context = staticmethod(_save_nothing)
    backward = staticmethod(refuse)


# --- torch.func.vmap


def _vmap_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """Use one run if only sequences are batched: the new dimension becomes part of the rows."""
    x, h0, lengths, weights, parameters, seed, updates, *rest = args
    x_dim, h0_dim, lengths_dim, *others = in_dims
    random = seed is not None or updates is not None
    if random or any(is_batched(dim) for dim in others):
        return one_by_one(_forward_op, info.batch_size, in_dims, args)
    B = info.batch_size
    x, h0 = into_rows(x, x_dim, 1, B), into_rows(h0, h0_dim, 1, B)
    lengths = None if lengths is None else into_rows(lengths, lengths_dim, 0, B)
    y, h_n, out = _forward_op(x, h0, lengths, weights, parameters, seed, updates, *rest)
    y, h_n, *out = (t.unflatten(1, (B, -1)) for t in (y, h_n, *out))
    return (y, h_n, out), (1, 1, [1] * len(out))


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return one_by_one(_backward_op, info.batch_size, in_dims, args)


_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("quant_gru::forward", _fake_forward, lib=_library)
torch.library.register_fake("quant_gru::backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    "quant_gru::forward", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd(
    "quant_gru::backward", refuse, setup_context=_save_nothing, lib=_library
)
torch.library.register_vmap("quant_gru::forward", _vmap_forward, lib=_library)
torch.library.register_vmap("quant_gru::backward", _vmap_backward, lib=_library)
