"""Which step is running in this thread."""

from __future__ import annotations

import threading
from types import GeneratorType, TracebackType

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from actnn.saving import _native
from actnn.saving.step import Step
from actnn.saving.uncompiled import uncompiled


class _Active(threading.local):
    """The steps whose forward is running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.steps: list[tuple[Step, saved_tensors_hooks | None]] = []

    def begin(self, step: Step, hooks: saved_tensors_hooks | None) -> None:
        """Begin the forward of a step."""
        self.steps.append((step, hooks))
        _native.begin(step, None if hooks is None else hooks.pack_hook)

    def end(self) -> tuple[Step, saved_tensors_hooks | None]:
        """End the forward of the innermost step, and return it."""
        _native.end()
        return self.steps.pop()


ACTIVE = _Active()
_innermost_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


pack_in_step = _native.pack
"""Packs a tensor in the step whose forward is running."""


def active_step() -> Step | None:
    """Return the step whose hooks see what is saved now; None if there is none.

    Inside torch.utils.checkpoint the hooks of the checkpoint see it, and keep nothing. Under
    torch.func and in forward mode, modules run as torch's own.
    """
    if torch.compiler.is_compiling():
        return None
    return _native.active()  # type: ignore[no-any-return]


def in_checkpoint() -> bool:
    """Whether torch.utils.checkpoint sees what is saved now."""
    hooks = None if _innermost_hooks is None else _innermost_hooks(False)
    code = None if hooks is None else getattr(hooks[0], "__code__", None)
    return code is not None and code.co_filename == checkpoint.__file__


def leave_checkpoints(trace: TracebackType | None) -> None:
    """Remove the hooks of the checkpoints that an error has left.

    Before 2.13, torch.utils.checkpoint leaves its hooks in place until the error is forgotten, and
    the hooks around it would be taken for those.
    """
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        if frame.f_code.co_filename == checkpoint.__file__:
            for value in frame.f_locals.values():
                if isinstance(value, GeneratorType):
                    value.close()


def step_for(x: torch.Tensor, least: int = 0) -> Step | None:
    """Return the active step if a layer may keep less than autograd would keep of its input.

    Args:
        x: The input.
        least: Bytes of an input that matters to the layer.

    Returns:
        None also for an input without gradient, one that is too small, or one of a subclass.
    """
    if torch.compiler.is_compiling():
        return None
    return _native.active_for(x, least)  # type: ignore[no-any-return]


def innermost_step() -> Step | None:
    """Return the step whose forward is running, whether or not its hooks see what is saved."""
    if torch.compiler.is_compiling() or not ACTIVE.steps:
        return None
    return ACTIVE.steps[-1][0]


@uncompiled
def transformed() -> bool:
    """Whether a transform of torch.func, or differentiation in forward mode, is running."""
    return _native.transformed()
