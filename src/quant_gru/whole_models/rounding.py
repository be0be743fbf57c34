"""How far results of float layers may differ between two runtimes: a bound from rounding.

Two runtimes that compute the same float layers differ by rounding. Most results are within a few
units in the last place of their largest value. Others are ill-conditioned: sums that cancel,
decisions between values that are almost equal. How far those may differ is measured: PyTorch
repeats the run with every operand of every operator changed by a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_ULPS = 8
_RUNS = 16
_SPREADS = 6.0

Values = Mapping[str, Tensor]


class Perturbed(TorchDispatchMode):
    """Change every operand of every float operator by up to a few units in the last place.

    Zeros remain zeros. Integers and booleans are not changed, decisions that lead to them are.

    Args:
        seed: Of the changes.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # views and changes in place must see the tensors themselves
        if not any(each.alias_info is not None for each in func._schema.returns):
            args = tree_map_only(Tensor, self._changed, args)
        return func(*args, **(kwargs or {}))

    def _changed(self, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        size, generator = value.shape, self._generators[value.device]
        real = torch.float64 if value.dtype is torch.float64 else torch.float32
        noise = torch.rand(size, generator=generator, dtype=real, device=value.device) * 2 - 1
        ulps = _ULPS * torch.finfo(value.dtype).eps
        return (value * (1 + ulps * noise)).to(value.dtype)


def beyond_rounding(
    found: Values, expected: Values, again: Callable[[], Values]
) -> dict[str, tuple[int, float]]:
    """Return how many values differ by more than rounding explains, and by how much at most.

    Args:
        found: Name -> values of the other runtime.
        expected: Name -> values of PyTorch, of the same shapes.
        again: Repeats PyTorch's run; called in a `Perturbed` context, if it is needed.

    Returns:
        Name -> number of values, and the largest difference in multiples of its bound.
    """
    bounds = {name: _plain_bound(found[name], each) for name, each in expected.items()}
    ratios = {name: _ratio(found[name], each, bounds[name]) for name, each in expected.items()}
    if any(bool((each > 1).any()) for each in ratios.values()):
        runs = []
        for seed in range(_RUNS):
            with Perturbed(seed):
                runs.append(again())
        for name, each in expected.items():
            bound = bounds[name] + _spread(each, [run.get(name) for run in runs])
            ratios[name] = _ratio(found[name], each, bound)
    return {
        name: (int((each > 1).sum()), float(each.max()) if each.numel() else 0.0)
        for name, each in ratios.items()
    }


def real_difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return |found - expected| in float64; 0 where both are NaN or the same infinity."""
    a, b = found.detach().cpu().double(), expected.detach().cpu().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, torch.nan_to_num((a - b).abs(), nan=torch.inf))


def _plain_bound(found: Tensor, expected: Tensor) -> Tensor:
    """Return a few units in the last place of the largest value; 0 for integers."""
    dtypes = [each.dtype for each in (found, expected) if each.is_floating_point()]
    if not dtypes:
        return torch.zeros((), dtype=torch.float64)
    finite = expected.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0).abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    return torch.tensor(_ULPS * eps * largest, dtype=torch.float64)


def _spread(expected: Tensor, runs: Sequence[Tensor | None]) -> Tensor:
    """Return how far values move under perturbation; infinity for integers that change at all."""
    moved = [
        real_difference(each, expected)
        for each in runs
        if each is not None and each.shape == expected.shape
    ]
    if not moved:
        return torch.zeros((), dtype=torch.float64)
    if not expected.is_floating_point():
        return torch.where(torch.stack(moved).amax(0) > 0, torch.inf, 0.0)
    return _SPREADS * torch.stack(moved).square().mean(0).sqrt()


def _ratio(found: Tensor, expected: Tensor, bound: Tensor) -> Tensor:
    difference = real_difference(found, expected)
    return torch.where(difference == 0, 0.0, difference / bound).nan_to_num(nan=0.0)
