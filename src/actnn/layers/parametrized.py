"""Weights that torch.nn.utils.parametrize computes are weights: they are not rounded."""

from __future__ import annotations

from torch import Tensor

from actnn.saving.active import active_step
from actnn.saving.exclusions import mark_computed
from actnn.saving.module_classes import Swapped


class ComputedWeight(Swapped):
    """torch.nn.utils.parametrize.ParametrizationList, such as that of spectral_norm."""

    def forward(self) -> Tensor:
        """Return the weight."""
        weight: Tensor = super().forward()  # type: ignore[misc]
        if active_step() is not None and type(weight) is Tensor:
            mark_computed(weight)
        return weight
