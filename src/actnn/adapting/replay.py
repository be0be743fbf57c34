"""A forward of a model, and the gradient of its outputs, that can be run again.

The gradient that the loss gave to the outputs is all that backward needs of the loss. So the
gradient of the parameters can be computed again for the same batch, with other bits, in any loop.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from actnn.saving.dense import is_batched
from actnn.saving.recompute import spare_buffers, spare_grad
from actnn.saving.uncompiled import uncompiled

SAMPLED = 1 << 16  # elements of each gradient that stand for all of it


class Gradient:
    """Elements of the gradients of parameters and inputs, scaled so that squares sum to the norm's.

    Args:
        parameters: The gradients of the parameters; None for those that have none.
        inputs: Those of the inputs, likewise.
    """

    def __init__(self, parameters: list[Tensor | None], inputs: list[Tensor | None]) -> None:
        self._parts = [[_sample(g) for g in part] for part in (parameters, inputs)]

    def energy(self) -> float:
        """Squared norm of the gradients of the parameters, or of the inputs if these have none."""
        parameters, inputs = (_sum([_square(g) for g in part]) for part in self._parts)
        return parameters if parameters != 0 else inputs

    def distance(self, other: Gradient) -> float:
        """Squared norm of the difference, likewise; infinite if it is not finite."""
        parameters, inputs = self._distances(other)
        found = parameters if _sum([_square(g) for g in other._parts[0]]) != 0 else inputs
        return _finite(found)

    def relative(self, exact: Gradient) -> float:
        """Squared distance over the squared norm, summed over parameters and inputs."""
        found = 0.0
        for distance, part in zip(self._distances(exact), exact._parts, strict=True):
            energy = _sum([_square(g) for g in part])
            found += distance / energy if energy else 0.0
        return _finite(found)

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return bool(np.isfinite([_sum([_square(g) for g in part]) for part in self._parts]).all())

    def _distances(self, other: Gradient) -> tuple[float, float]:
        parameters, inputs = (
            _sum([_square(_minus(a, b)) for a, b in zip(mine, theirs, strict=True)])
            for mine, theirs in zip(self._parts, other._parts, strict=True)
        )
        return parameters, inputs


def _finite(x: float) -> float:
    return x if np.isfinite(x) else float("inf")


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else -b if a is None else a - b


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _square(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.square().sum(dtype=torch.float64)


def _sum(parts: list[Tensor | None]) -> float:
    """Add numbers that may be on several devices."""
    return float(sum(float(part) for part in parts if part is not None))


@torch.no_grad()
def _sample(gradient: Tensor | None) -> Tensor | None:
    if gradient is None or not gradient.numel():
        return None
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    flat = gradient.reshape(-1)
    taken = flat[:: max(1, -(-flat.numel() // SAMPLED))]
    scale = (flat.numel() / max(1, taken.numel())) ** 0.5
    return taken.to(torch.float32, copy=True).mul_(scale)


class _Through(Function):
    """The same tensor, whose gradient is shown to a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return x.detach()  # no view: fully_shard warns of these

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.take(gradient)
        return gradient, None


class _Stored:
    """A copy of a tensor in host memory, so that a device holds no more between steps.

    Args:
        tensor: The tensor.
        copies: Whether a tensor that is in host memory may change.
    """

    def __init__(self, tensor: Tensor, *, copies: bool) -> None:
        self.device, self.requires_grad = tensor.device, tensor.requires_grad
        moves = type(tensor) is Tensor and tensor.device.type != "cpu"
        tensor = tensor.detach()
        self.tensor = tensor.cpu() if moves else tensor.clone() if copies else tensor

    def first(self, samples: int) -> _Stored:
        """Return the first samples."""
        found = copy.copy(self)
        found.tensor = self.tensor[:samples]
        return found

    def restored(self) -> Tensor:
        """Return a copy where the tensor was."""
        return self.tensor.to(self.device, copy=True).requires_grad_(self.requires_grad)


class Replay:
    """Copies of the inputs of one forward, the state of random numbers, and what backward gave.

    Args:
        model: The model.
        arguments: Positional arguments of the forward.
        named: Those by name.
    """

    def __init__(self, model: nn.Module, arguments: Any, named: Any) -> None:
        self._inputs = tree_map(_stored, (arguments, named))
        self._random = _RandomState(model)
        self._gradients: dict[int, _Stored] = {}  # by the position among the leaves of the output

    @property
    def complete(self) -> bool:
        """Whether a backward has given gradients of the outputs."""
        return bool(self._gradients)

    @property
    def samples(self) -> int:
        """Length of the first dimension of the first input; 0 if there is none."""
        stored = [x.tensor for x in tree_leaves(self._inputs) if isinstance(x, _Stored)]
        sizes = [x.shape[0] for x in stored if x.ndim]
        return sizes[0] if sizes else 0

    def has_batch_of(self, other: Replay) -> bool:
        """Whether the inputs are tensors that equal those of another forward."""
        mine, theirs = (
            [x.tensor for x in tree_leaves(each._inputs) if isinstance(x, _Stored)]
            for each in (self, other)
        )
        return 0 < len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    def frozen(self) -> Replay:
        """Return the same, to which further backwards of the forward add nothing."""
        found = copy.copy(self)
        found._gradients = dict(self._gradients)
        return found

    def first(self, samples: int) -> Replay:
        """Return the same of the first samples; tensors of other lengths stay whole."""
        n = self.samples

        def part(x: Any, whole: int) -> Any:
            if not isinstance(x, _Stored) or not x.tensor.ndim or x.tensor.shape[0] != whole:
                return x
            return x.first(whole // n * samples)

        found = copy.copy(self)
        found._inputs = tree_map(lambda x: part(x, n), self._inputs)
        found._gradients = {}  # an output may have several rows for each sample
        for index, gradient in self._gradients.items():
            rows = gradient.tensor.shape[0] if gradient.tensor.ndim else 0
            found._gradients[index] = part(gradient, rows if rows % n == 0 else 0)
        return found

    @uncompiled
    def watch(self, output: Any) -> Any:
        """Return the output of the forward, through which gradients from outside are seen."""
        leaves, form = tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                # Outputs may depend on each other, as a loss does on logits. Here passes what comes
                # from outside alone.
                leaves[index] = _Through.apply(leaf, partial(self._take, index))
        return form.unflatten(leaves)

    def _take(self, index: int, gradient: Tensor) -> None:
        if is_batched(gradient):
            return
        gradient, known = gradient.detach(), self._gradients.get(index)
        if known is not None:
            gradient = gradient + known.restored()
        self._gradients[index] = _Stored(gradient, copies=False)

    def run(self, model: nn.Module, forward: Callable[[Any, Any], Any]) -> Gradient:
        """Run forward and backward again; the model stays as it is.

        Buffers, random numbers and `grad` of the parameters are as before afterwards, and hooks
        of `AccumulateGrad`, such as those of DistributedDataParallel, do not see it.

        Args:
            model: The model.
            forward: (positional arguments, arguments by name) -> the output.
        """
        arguments, named = tree_map(_restored, self._inputs)
        inputs = [x for x in tree_leaves((arguments, named)) if _wants_gradient(x)]
        inputs = [x for x in inputs if not isinstance(x, nn.Parameter)]
        parameters = [p for p in model.parameters() if p.requires_grad]
        with (
            self._random.restored(),
            spare_buffers(model.modules()),
            spare_grad(parameters),
            torch.enable_grad(),
        ):
            leaves = tree_leaves(forward(arguments, named))
            found = torch.autograd.grad(
                [leaves[index] for index in self._gradients],
                [*parameters, *inputs],
                [gradient.restored() for gradient in self._gradients.values()],
                allow_unused=True,
            )
            own = [p.grad for p in parameters]
        torch.clear_autocast_cache()  # casts of weights that the next forward would share
        of_parameters = [_plus(a, b) for a, b in zip(found, own, strict=False)]
        return Gradient(of_parameters, list(found[len(parameters) :]))


def _wants_gradient(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _stored(x: Any) -> Any:
    return (
        _Stored(x, copies=True) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) else x
    )


def _restored(x: Any) -> Any:
    return x.restored() if isinstance(x, _Stored) else x


class _RandomState:
    """The state of all random numbers that a model may draw.

    Args:
        model: The model: its parameters tell the devices.
    """

    def __init__(self, model: nn.Module) -> None:
        self._devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
        self._states = self._now()

    def _now(self) -> tuple[Any, ...]:
        devices = [torch.cuda.get_rng_state(device) for device in self._devices]
        return torch.get_rng_state(), devices, random.getstate(), np.random.get_state()

    def _set(self, states: tuple[Any, ...]) -> None:
        host, devices, python, numpy = states
        torch.set_rng_state(host)
        for device, state in zip(self._devices, devices, strict=True):
            torch.cuda.set_rng_state(state, device)
        random.setstate(python)
        np.random.set_state(numpy)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Go back to this state; afterwards all is as before."""
        now = self._now()
        self._set(self._states)
        try:
            yield
        finally:
            self._set(now)
