"""What the codes of each saved tensor do to the whole gradient, at each width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from actnn.allocation.spend import law
from actnn.allocation.threshold import MAX_BITS, MIN_BITS

GROUPS = 24  # groups of tensors whose costs are measured, one step for each
CHEAPEST = 10  # of these, that are measured at 1 bit, too; others get no single bit
REST = MAX_BITS  # bits of all other tensors meanwhile
AT = 2  # bits at which costs are measured
MOST = 1e30  # as the cost of what makes the gradient infinite


@dataclass
class Saved:
    """One tensor of a step that has bits of its own.

    Attributes:
        elements: Its elements.
        kind: 'input' of linear layers alone, 'norm', 'derivative' or 'other'.
        spread: Of an input, factor x squared ranges, on the host.
        users: Paths of the linear layers that save it.
    """

    elements: int
    kind: str
    spread: float = 0.0
    users: list[str] = field(default_factory=list)


def measure(
    saved: Mapping[str, Saved],
    energies: Mapping[str, float],
    energy: float,
    average: int,
    error: Callable[[dict[str, int]], float],
) -> dict[str, list[float]]:
    """Return the costs of all tensors at 1 to 8 bits.

    Args:
        saved: The tensors, by name.
        energies: Squared norms of the gradients of layers' outputs, by path.
        energy: Squared norm of the whole gradient.
        average: Average bits.
        error: Bits by name, with 8 for all others -> relative squared error of the gradient.
    """
    costs, rest = {}, {}
    for name, each in saved.items():
        if each.kind == "input" and all(user in energies for user in each.users):
            total = sum(energies[user] for user in each.users)
            costs[name] = law(min(each.spread * total / energy, MOST), 1)
        else:
            rest[name] = each
    parts = groups(rest)
    sizes = [sum(saved[name].elements for name in names) for names in parts]

    def cost_of(index: int, bits: int) -> float:
        return min(error(dict.fromkeys(parts[index], bits)), MOST)

    found = [cost_of(index, AT) for index in range(len(parts))]
    order = sorted(range(len(parts)), key=lambda index: found[index] / sizes[index])
    single = {index: cost_of(index, MIN_BITS) for index in order[:CHEAPEST]}
    for index, names in enumerate(parts):
        table = law(found[index], AT, min(AT, average))
        if index in single:
            table[0] = max(single[index], found[index])
        for name in names:
            share = saved[name].elements / sizes[index]
            costs[name] = [cost * share for cost in table]
    return {name: costs[name] for name in saved}


def groups(saved: Mapping[str, Saved]) -> list[list[str]]:
    """Divide tensors into groups of neighbours of one kind, about equally many in each."""
    kinds: dict[str, list[str]] = {}
    for name, each in saved.items():
        kinds.setdefault(each.kind, []).append(name)
    count = max(1, min(len(saved), GROUPS))
    found = []
    for names in kinds.values():
        parts = max(1, round(count * len(names) / len(saved)))
        edges = [round(index * len(names) / parts) for index in range(parts + 1)]
        found += [names[a:b] for a, b in pairwise(edges) if a < b]
    return found


@contextmanager
def observed(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, float]]:
    """Yield the squared norms of the gradients of some modules' outputs, by path."""
    energies: dict[str, float] = {}
    modules = dict(model.named_modules())
    handles = [
        modules[path].register_forward_hook(partial(_observe, energies, path))
        for path in paths
        if path in modules
    ]
    try:
        yield energies
    finally:
        for handle in handles:
            handle.remove()


def _observe(
    energies: dict[str, float], path: str, module: nn.Module, args: Any, output: Any
) -> None:
    """Forward hook of a layer: observe the gradient of its output."""
    if isinstance(output, Tensor) and output.requires_grad:

        def add(gradient: Tensor) -> None:
            energy = float(torch.linalg.vector_norm(gradient, dtype=_wide(gradient))) ** 2
            energies[path] = energies.get(path, 0.0) + energy

        output.register_hook(add)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
