"""Which module's forward is running, found in the call stack: nothing is installed in the model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn
from torch.utils import checkpoint

from actnn.saving import _native


class ModulePaths(_native.ModulePaths):
    """Paths of the modules of a model.

    `current` returns which module is being called: the path of the innermost module of the model,
    '' if there is none; whether torch.utils.checkpoint was called inside of it, so that its inputs
    are being saved; and the innermost module, of the model or not.
    """

    def __init__(self, model: nn.Module | None) -> None:
        modules = {} if model is None else dict(model.named_modules())
        paths = {id(module): path for path, module in modules.items()}
        super().__init__(paths, nn.Module._wrapped_call_impl.__code__, checkpoint.__file__)
        self.all = frozenset(modules)
        self._modules = {path: weakref.ref(module) for path, module in modules.items()}

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that exist, with their paths."""
        for path, reference in self._modules.items():
            module = reference()
            if module is not None:
                yield path, module
