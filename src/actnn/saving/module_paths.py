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

    def current(self) -> tuple[str, bool, nn.Module | None]:
        """Return which module is being called.

        Returns:
            The path of the innermost module of the model, '' if there is none; whether
            torch.utils.checkpoint was called inside of it, so that its inputs are being saved; and
            the innermost module, of the model or not.
        """
        paths, checkpointed, innermost = self._paths, False, None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is _CALL:
                module = frame.f_locals["self"]
                innermost = module if innermost is None else innermost
                path: str | None = paths.get(id(module))
                if path is not None:
                    return path, checkpointed, innermost
            elif code.co_filename == _CHECKPOINT:
                checkpointed = True
            frame = frame.f_back
        return "", checkpointed, innermost
