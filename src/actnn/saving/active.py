"""Which step is running in this thread."""

from __future__ import annotations

import threading

import torch
from torch.autograd.graph import saved_tensors_hooks

from actnn.saving.held import Held, View
from actnn.saving.step import Step


class _Active(threading.local):
    """The steps whose forward is running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.steps: list[tuple[Step, saved_tensors_hooks | None]] = []


ACTIVE = _Active()
_innermost_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def pack_in_step(tensor: torch.Tensor) -> Held | View:
    """Pack a tensor in the step whose forward is running."""
    return ACTIVE.steps[-1][0].pack(tensor)


def active_step() -> Step | None:
    """Return the step whose hooks see what is saved now; None if there is none.

    Inside torch.utils.checkpoint the hooks of the checkpoint see it, and keep nothing.
    """
    if torch.compiler.is_compiling() or not ACTIVE.steps:
        return None
    step = ACTIVE.steps[-1][0]
    if _innermost_hooks is not None:
        hooks = _innermost_hooks(False)
        if hooks is None or hooks[0] is not step.saving.hooks.pack:
            return None
    return step
