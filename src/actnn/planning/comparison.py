"""Compares the gradient of a step under choices with an exact one, at the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actnn.errors import ActNNError
from actnn.planning.blocks import BlockChoice
from actnn.planning.training_step import TrainingStep
from actnn.planning.units import Unit

SHARES = (1, 2, 4, 8, 16)  # parts of the batch, for choices that do not fit
KEEP, RECOMPUTE = BlockChoice("keep"), BlockChoice("recompute")
LOSSLESS = BlockChoice("compress", 32)
Apply = Callable[[Sequence[BlockChoice]], None]


class Difference(NamedTuple):
    """How far a gradient is from the exact one.

    Attributes:
        total: The squared difference over the squared norm; infinite for NaN.
        by_unit: That of the parameters of each unit, over the same norm.
        error: What the step has raised, or ''. The difference is infinite then.
    """

    total: float
    by_unit: np.ndarray
    error: str = ""


def exact_form(choice: BlockChoice) -> BlockChoice:
    """Return the choice that rounds nothing and draws the same random numbers.

    Compressed dropout has masks of its own.
    """
    if choice.whole:
        return BlockChoice("keep", whole=True)
    if choice.action == "recompute":
        return RECOMPUTE
    if choice.action == "offload" or (choice.action == "compress" and not choice.fused):
        return LOSSLESS
    return KEEP


class Comparison:
    """Runs steps and compares their gradients.

    Args:
        step: The training step.
        units: The units of the model.
        apply: Sets one choice for each unit.
    """

    def __init__(self, step: TrainingStep, units: list[Unit], apply: Apply) -> None:
        self._step, self._units, self._apply = step, units, apply
        # For choices that are exact and a share of the batch: gradients, on the host, and their
        # energy.
        self._exact: dict[tuple[tuple[BlockChoice, ...], int], tuple[dict[str, Tensor], float]] = {}

    def __call__(
        self, choices: Sequence[BlockChoice], exact: Sequence[BlockChoice], share: int = 1
    ) -> Difference:
        """Compare the gradient of choices with that of others, which are exact.

        Args:
            choices: A choice for each unit.
            exact: The same.
            share: The part of the batch that fits; smaller ones are taken if it does not.

        Raises:
            ActNNError: If a sixteenth of the example does not fit the memory.
        """
        wanted = tuple(exact)
        for each in SHARES[SHARES.index(share) :]:
            step = self._step if each == 1 else self._step.shrunk(each)
            found = None
            try:
                found = self._gradient_of(wanted, step, each)
                return self._compared(choices, step, *found)
            except torch.OutOfMemoryError:
                pass
            except Exception as error:
                if found is None:
                    raise  # the model's own step
                nothing = np.full(len(self._units), np.inf)
                lines = str(error).strip().splitlines() or [""]
                return Difference(np.inf, nothing, f"{type(error).__name__}: {lines[0]}")
            torch.cuda.empty_cache()  # here the error no longer holds tensors
        raise too_large(wanted[0])

    def _gradient_of(
        self, exact: tuple[BlockChoice, ...], step: TrainingStep, share: int
    ) -> tuple[dict[str, Tensor], float]:
        if (exact, share) in self._exact:
            return self._exact[exact, share]
        self._apply(exact)
        with _gradients(step) as gradients:
            on_host = {name: each.cpu() for name, each in gradients.items()}
            found = on_host, sum(map(_energy, gradients.values()))
        if len(set(exact)) == 1:  # those of all plans would be too many
            self._exact[exact, share] = found
        return found

    def _compared(
        self,
        choices: Sequence[BlockChoice],
        step: TrainingStep,
        exact: dict[str, Tensor],
        energy: float,
    ) -> Difference:
        self._apply(choices)
        with _gradients(step) as noisy:
            noise = {
                name: _energy(each - exact[name].to(each.device)) / max(energy, 1e-300)
                for name, each in noisy.items()
                if name in exact
            }
        by_unit = np.zeros(len(self._units))
        for index, unit in enumerate(self._units):
            for name, _ in unit.module.named_parameters():
                by_unit[index] += noise.get(f"{unit.path}.{name}", 0.0)
        both = np.nan_to_num([sum(noise.values()), *by_unit], nan=np.inf)
        return Difference(float(both[0]), both[1:])


def too_large(choice: BlockChoice) -> ActNNError:
    """Return the error for an example of which not even a small part fits."""
    return ActNNError(
        f"Expected a sixteenth of the example to fit the memory, got an error with {choice}; make "
        "the example smaller"
    )


@contextmanager
def _gradients(step: TrainingStep) -> Iterator[dict[str, Tensor]]:
    with step.isolated():
        step.loss().backward()
        parameters = step.model.named_parameters()
        yield {name: each.grad for name, each in parameters if each.grad is not None}


def _energy(x: Tensor) -> float:
    """Sum of the squares of all elements, real or complex."""
    if x.is_sparse:
        x = x.coalesce().values()
    wide = torch.complex128 if x.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(x, dtype=wide).square())
