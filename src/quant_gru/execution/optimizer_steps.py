"""How many optimizer steps there have been: fused optimizers write weights and tell nobody."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class Steps:
    """A count that every optimizer of the process raises, from when it is first asked for."""

    def __init__(self) -> None:
        self._count = 0
        self._watched = False

    @property
    def count(self) -> int:
        """Steps so far; what was made at another count may be of other weights."""
        if not self._watched:
            self._watched = True
            register_optimizer_step_post_hook(self._add)
        return self._count

    def _add(self, *_: Any) -> None:
        self._count += 1


steps = Steps()
