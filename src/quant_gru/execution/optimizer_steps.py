"""A count of optimizer steps: fused optimizers change weights without raising their version."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class Steps:
    """A count that every optimizer of the process increments, starting with the first query."""

    def __init__(self) -> None:
        self._count = 0
        self._watched = False

    @property
    def count(self) -> int:
        """Steps so far. A cached result from another count may belong to other weights."""
        if not self._watched:
            self._watched = True
            register_optimizer_step_post_hook(self._add)
        return self._count

    def _add(self, *_: Any) -> None:
        self._count += 1


steps = Steps()
