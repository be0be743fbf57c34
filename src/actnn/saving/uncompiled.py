"""Functions that torch.compile leaves to Python, without a wrapper around each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function, *, callees: bool = True) -> Function:
    """Mark a function as one that torch.compile does not compile, and return it.

    Args:
        function: A Python function.
        callees: Whether what it calls is not compiled, either.
    """
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return torch.compiler.disable(function, recursive=callees)  # type: ignore[no-any-return]
    actions = frames._FrameAction
    strategy = frames._FrameExecStrategy(actions.SKIP, actions.SKIP if callees else actions.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it sets the hooks of actnn"  # type: ignore[attr-defined]
    return function
