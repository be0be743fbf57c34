"""The shortest way through an inference call on a GPU: nothing changed since the last one.

What `quant_gru._quick` is for the CPU: launches are prepared, and what was built once is kept with
what tells that it still holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels.cuda.numbers import capturing
from quant_gru.kernels.cuda.stack import Stack
from quant_gru.kernels.ops import runs_on_gpu, stack_on_gpu

_KINDS = (Tensor, torch.nn.Parameter)


class QuickGPU:
    """A stack on a GPU, and the weights it was made of.

    Args:
        stack: The stack.
        weights: All weights of the module: they are kept, so that identity and version tell
            whether they changed; aliases keep their storage, so that its address is not given to
            another one.
    """

    def __init__(self, stack: Stack, weights: Collection[Tensor]) -> None:
        self._stack = stack
        self._aliases = [w.detach() for w in weights]
        self._stamps = [(w, w._version, w.data_ptr()) for w in weights]
        self._asks = [w for w in weights if w.is_floating_point()]
        self._device = stack.device
        self._states = stack.states
        self._C, self._H = stack.input_size, stack.hidden_size

    def run(
        self, weights: Collection[Tensor | None], x: object, hx: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Run a whole call, if it is of the plain kind.

        Args:
            weights: The module's weights now, in the order they were given in.
            x: What was given as input; taken if float32 (T, N, C), (N, T, C) if `batch_first`, on
                the weights' device.
            hx: float32 (states, N, H) or None.
            batch_first: Whether N comes before T.

        Returns:
            As `QuantGRU.forward`; None where the call is of another kind, a weight changed, a
            gradient may be asked for, or weights fit no registers.
        """
        if (
            type(x) is not Tensor
            or x.dtype is not torch.float32
            or x.device != self._device
            or x.dim() != 3
        ):
            return None
        if batch_first:
            x = x.transpose(0, 1)
        if x.shape[2] != self._C or not x.shape[0]:
            return None
        if hx is not None and (
            type(hx) is not Tensor
            or hx.dtype is not torch.float32
            or hx.device != self._device
            or hx.shape != (self._states, x.shape[1], self._H)
        ):
            return None
        if not self.holds(weights):
            return None
        if torch.is_grad_enabled() and (
            x.requires_grad
            or (hx is not None and hx.requires_grad)
            or any(w.requires_grad for w in self._asks)
        ):
            return None
        result = self._stack.run(x, hx)
        if result is None or not batch_first:
            return result
        return result[0].transpose(0, 1), result[1]

    def holds(self, weights: Collection[Tensor | None]) -> bool:
        """Whether the weights are still those that were given, unchanged.

        Args:
            weights: The module's weights now, in the order they were given in.
        """
        if len(weights) != len(self._stamps):
            return False
        for w, (kept, version, address) in zip(weights, self._stamps, strict=True):
            if w is not kept or w._version != version or w.data_ptr() != address:
                return False
        return True


def quick_gpu_of(
    plan: GRUPlan, weights: Collection[Tensor | None], used: Iterable[Tensor | None]
) -> QuickGPU | None:
    """The quick way for a plan on a GPU, if there is one.

    Args:
        plan: The plan.
        weights: All weights of the module.
        used: What the plan was made of. Where that is computed from the module's weights, as
            parametrizations and pruning do, their versions tell nothing, so there is no quick way.
    """
    device = plan.cells[0][0].weights.W.device
    if not runs_on_gpu(device) or capturing(device):
        return None
    found: list[Tensor] = []
    for w in weights:
        # inference tensors keep no version, so a change of them would go unseen
        if w is None or type(w) not in _KINDS or w.device != device or w.is_inference():
            return None
        # the output has the dtype of the weights
        if w.is_floating_point() and w.dtype != torch.float32:
            return None
        found.append(w)
    known = {id(w) for w in found}
    if not all(w is None or id(w) in known for w in used):
        return None
    stack = stack_on_gpu(plan)
    return None if stack is None else QuickGPU(stack, found)
