"""Statistics of several processes."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist


class Mergeable(Protocol):
    """Statistics that are picklable, with their state on the CPU."""

    def merge(self, other: Any, /) -> None:
        """Add the statistics of another process, in place."""


def merge_ranks(state: Mergeable, group: Any = None) -> None:
    """Give every rank of `group` the merged statistics of all ranks, in place; a collective.

    Without an initialized torch.distributed there is one process, and nothing happens.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    states: list[Any] = [None] * dist.get_world_size(group)
    # Gather objects instead of tensors: c10d moves them through the device of the backend.
    dist.all_gather_object(states, state, group=group)
    total = states[0]
    for other in states[1:]:
        total.merge(other)
    state.__dict__.update(total.__dict__)
