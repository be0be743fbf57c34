"""A training step that can be run again and again without changing the model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from actnn.errors import ActNNError
from actnn.saving.recompute import spare_grad

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]


def default_loss(model: nn.Module, example: Any) -> Tensor:
    """Call the model, and return a scalar that its backward begins with.

    That is the output if it is a scalar; a scalar called `loss` in a mapping or an object, as
    models of Hugging Face return it if the example has labels; else the sum of mean squares.
    """
    if isinstance(example, Mapping):
        output = model(**example)
    elif isinstance(example, tuple):
        output = model(*example)
    else:
        output = model(example)
    own = _own_loss(output)
    if own is not None:
        return own
    leaves = [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point()
    ]
    if not leaves:
        raise ActNNError(
            f"Expected the model's output to contain a tensor that requires gradients, got "
            f"{type(output).__name__}; pass loss="
        )
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return leaves[0]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def leaves_of(example: Any) -> list[Any]:
    """Return what an example contains, also in mappings that are no dict, as BatchEncoding."""
    return tree_leaves(dict(example) if isinstance(example, Mapping) else example)


def mapped(function: Callable[[Any], Any], example: Any) -> Any:
    """Return an example of the same kind with the results of a function for its leaves."""
    if not isinstance(example, Mapping) or isinstance(example, dict):
        return tree_map(function, example)
    result: Any = copy.copy(example)
    for key, value in example.items():
        result[key] = tree_map(function, value)
    return result


def _own_loss(output: Any) -> Tensor | None:
    """Return the loss that a model has computed by itself; None if there is none."""
    if isinstance(output, Tensor):
        return None
    mapping = isinstance(output, Mapping)
    loss = output.get("loss") if mapping else getattr(output, "loss", None)
    scalar = isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad
    return loss if scalar else None


class TrainingStep:
    """Forward and backward of a model on an example, with the same random numbers every time.

    Args:
        model: The model, in training mode.
        example: A batch: a tensor, a tuple of arguments, a mapping of keyword arguments, or
            whatever `loss` takes.
        loss: (model, example) -> scalar. Autocast and targets belong here. Without one the model
            is called with the example.
    """

    def __init__(self, model: nn.Module, example: Any, loss: Loss | None = None) -> None:
        if not isinstance(model, nn.Module):
            got = type(model).__name__
            raise ActNNError(f"Expected the model to be a torch.nn.Module, got {got}")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ActNNError(
                "Expected the model to have parameters that require gradients, got none"
            )
        if loss is not None and not callable(loss):
            raise ActNNError(f"Expected loss to be a function of (model, example), got {loss!r}")
        if not model.training:
            raise ActNNError("Expected the model to be in training mode, got eval(); call train()")
        self.model, self.example = model, example
        self._loss = default_loss if loss is None else loss
        self.device = next(model.parameters()).device

    def loss(self) -> Tensor:
        """Run the forward and return the loss."""
        value = self._loss(self.model, self.example)
        if not isinstance(value, Tensor) or value.ndim != 0:
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ActNNError(f"Expected loss to return a scalar tensor, got {what}")
        return value

    def known(self) -> list[Tensor]:
        """Tensors that exist before a step: parameters, buffers, gradients and the example."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        example = [leaf for leaf in leaves_of(self.example) if isinstance(leaf, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *gradients, *example]

    def shrunk(self, share: int) -> TrainingStep:
        """Return the step with the first 1/share of the batch (the first dimension)."""
        sizes = {
            leaf.shape[0]
            for leaf in leaves_of(self.example)
            if isinstance(leaf, Tensor) and leaf.ndim
        }
        batch = max(sizes, default=0)
        if batch < share:
            raise ActNNError(
                f"Expected the example to be a batch of at least {share} samples, got {batch}; "
                "it must be divided, because one choice does not fit the memory"
            )

        def cut(leaf: Any) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == batch
            return leaf[: batch // share] if is_batch else leaf

        less = copy.copy(self)
        less.example = mapped(cut, self.example)
        return less

    def draws(self) -> bool:
        """Run the forward, and say whether it draws random numbers of torch."""
        with self.isolated():
            before = self._random_states()
            self.loss()
            after = self._random_states()
        return not all(map(torch.equal, before, after))

    def _random_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Start from no gradients and fixed random numbers; afterwards everything is as before.

        The gradients are those of the parameters and of the example. Random numbers are those of
        torch, Python and numpy.

        Buffers are restored, too: batch norm's running statistics do not notice the step. So are
        numbers that are attributes of modules, such as a count of steps.
        """
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        leaves = [x for x in leaves_of(self.example) if isinstance(x, Tensor) and x.is_leaf]
        leaves += self.model.parameters()
        devices = [self.device] if self.device.type == "cuda" else []
        numbers = [(module, _numbers_of(module)) for module in self.model.modules()]
        with _python_seeded(), torch.random.fork_rng(devices), spare_grad(leaves):
            torch.manual_seed(0)
            try:
                yield
            finally:
                with torch.no_grad():
                    for name, buffer in self.model.named_buffers():
                        buffer.copy_(buffers[name])
                for module, each in numbers:
                    vars(module).update(each)


def _numbers_of(module: nn.Module) -> dict[str, int | float]:
    """Return the attributes of a module that are plain numbers."""
    return {name: each for name, each in vars(module).items() if type(each) in (int, float)}


@contextmanager
def _python_seeded() -> Iterator[None]:
    """Let the random numbers of Python and numpy begin anew; afterwards they are as before."""
    python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
