"""nn.GRU keeps only the inputs of its layers; backward runs them again, one at a time."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.rnn import PackedSequence

from actnn.layers.dropout import can_regenerate, drawn_seed, dropped
from actnn.saving.active import active_step
from actnn.saving.held import refuse_second_derivative
from actnn.saving.module_classes import Swapped
from actnn.saving.step import Step

Weights: TypeAlias = tuple[Tensor, ...] | list[Tensor]


class _Layer(Function):
    """One layer of a GRU, in one or both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        below: Tensor,
        h0: Tensor,
        active: Tensor | None,
        p: float,
        seed: Tensor | None,
        step: Step,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run torch's own GRU.

        Args:
            ctx: The context of autograd.
            below: (T, N, I), or (steps of all sequences, I) if packed.
            h0: (directions, N, H).
            active: Sequences that are not over for each step, int64 on the host, if packed.
            p: Probability of dropout of the input.
            seed: Seed of this dropout; None for no dropout.
            step: The step that saves.
            weights: w, r, b and c of each direction, or only w and r.
        """
        ctx.strides = below.stride()
        x = below if seed is None else dropped(below, p, seed, ctx.strides)
        ctx.active, ctx.p, ctx.seed = active, p, seed
        kind = below.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        for tensor in (below, h0):
            step.keep_exact(tensor, "gates are made again from it")
        ctx.save_for_backward(below, h0, *weights)
        return _run(x, h0, active, _in_one_piece(x, h0, weights), training=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a compressed nn.GRU", "level='L0'")
        below, h0, *weights = ctx.saved_tensors
        seed = ctx.seed
        x = below if seed is None else dropped(below, ctx.p, seed, ctx.strides)
        needed = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[6:]]
        inputs = [each.detach() for each in (x, h0, *_in_one_piece(x, h0, weights))]
        for each, need in zip(inputs, needed, strict=True):
            each.requires_grad_(need)
        # Hooks of a forward pass that runs around this backward must not see the layer.
        with (
            torch.enable_grad(),
            torch.autocast(*ctx.autocast),
            saved_tensors_hooks(Tensor.detach, _same),
        ):
            # cuDNN differentiates in training mode only; a layer without dropout has but one.
            results = _run(inputs[0], inputs[1], ctx.active, inputs[2:], training=True)
        found = iter(
            torch.autograd.grad(results, [each for each in inputs if each.requires_grad], (dy, dh))
        )
        dx, dh0, *dweights = (next(found) if need else None for need in needed)
        if seed is not None and dx is not None:
            dx = dropped(dx, ctx.p, seed, ctx.strides)
        return (dx, dh0, None, None, None, None, *dweights)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _run(
    x: Tensor, h0: Tensor, active: Tensor | None, weights: Weights, training: bool
) -> tuple[Tensor, Tensor]:
    """Run one layer of torch's GRU; arguments are those of `_Layer`."""
    both, biased = len(h0) == 2, len(weights) == 4 * len(h0)
    if active is None:
        return torch._VF.gru(x, h0, weights, biased, 1, 0.0, training, both, False)
    return torch._VF.gru(x, active, h0, weights, biased, 1, 0.0, training, both)


def _in_one_piece(x: Tensor, h0: Tensor, weights: Weights) -> Weights:
    """Return copies of the weights of a layer in one buffer if cuDNN runs it, else the weights."""
    if not (x.is_cuda and torch.backends.cudnn.is_acceptable(x)):
        return weights
    # In the buffer of a stack, the weights of a layer are in several pieces.
    copies, directions = [weight.detach().clone() for weight in weights], len(h0)
    each = len(copies) // directions
    mode = torch.backends.cudnn.rnn.get_cudnn_mode("GRU")
    torch._cudnn_rnn_flatten_weight(
        copies, each, x.shape[-1], mode, h0.shape[2], 0, 1, False, directions == 2
    )
    return copies


class RecomputedGRU(Swapped):
    """nn.GRU."""

    batch_first: bool
    num_layers: int
    bidirectional: bool
    hidden_size: int
    dropout: float
    training: bool
    _flat_weights: list[Tensor]
    permute_hidden: Any
    check_forward_args: Any

    def forward(self, input: Any, hx: Tensor | None = None) -> Any:
        """Return the result of the module's own forward."""
        step = active_step()
        packed = isinstance(input, PackedSequence)
        data, active, order, back = input if packed else (input, None, None, None)
        weights = self._flat_weights
        if (
            step is None
            or not any(tensor.requires_grad for tensor in (data, *weights))
            or data.nbytes < step.saving.min_bytes
            or (self.dropout and not (self.dropout < 1 and can_regenerate(data)))
            or (self.dropout and self.training and not step.saving.own_masks)
            or data.dim() not in (2, 3)
            or (hx is not None and hx.dim() != (2 if data.dim() == 2 and not packed else 3))
        ):  # too small, or an error that torch explains
            return super().forward(input, hx)  # type: ignore[misc]
        if data.dim() == 2 and not packed:  # one sequence
            hx = None if hx is None else hx.unsqueeze(1)
            dim = 0 if self.batch_first else 1
            y, h = self.forward(data.unsqueeze(dim), hx)
            return y.squeeze(dim), h.squeeze(1)
        swapped = self.batch_first and not packed
        x = data.transpose(0, 1) if swapped else data
        directions = 2 if self.bidirectional else 1
        count = x.shape[1] if active is None else int(active[0])
        if hx is None:
            hx = x.new_zeros(self.num_layers * directions, count, self.hidden_size)
        else:
            hx = self.permute_hidden(hx, order)
        self.check_forward_args(data, hx, active)
        last, each = [], len(weights) // self.num_layers
        for layer, h0 in enumerate(hx.split(directions)):
            p = self.dropout if layer and self.training else 0.0
            seed = drawn_seed(x) if p else None
            x, h = _Layer.apply(x, h0, active, p, seed, step, *weights[layer * each :][:each])
            last.append(h)
        h = self.permute_hidden(torch.cat(last), back)
        if packed:
            return PackedSequence(x, active, order, back), h
        return (x.transpose(0, 1) if swapped else x), h
