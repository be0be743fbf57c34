"""Which module's forward is running, found in the call stack: nothing is installed in the model."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from torch import nn
from torch.utils import checkpoint

_CALL: CodeType = nn.Module._call_impl.__code__
_CHECKPOINT = checkpoint.__file__


class ModulePaths:
    """Paths of the modules of a model."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = () if model is None else model.named_modules()
        self._paths = {id(module): path for path, module in modules}

    @property
    def all(self) -> frozenset[str]:
        """All paths."""
        return frozenset(self._paths.values())

    def current(self) -> tuple[str, bool]:
        """Return which module is being called.

        Returns:
            The path of the innermost module of the model, '' if there is none; and whether
            torch.utils.checkpoint was called inside of it, so that its inputs are being saved.
        """
        paths, checkpointed = self._paths, False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is _CALL:
                path: str | None = paths.get(id(frame.f_locals["self"]))
                if path is not None:
                    return path, checkpointed
            elif code.co_filename == _CHECKPOINT:
                checkpointed = True
            frame = frame.f_back
        return "", checkpointed
