"""Registration of the operators as soon as both torch and this package are imported.

`import quant_gru` does not import torch. A program loaded with `torch.export.load` needs the
operators, and torch cannot ask for them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]
_OPERATORS = f"{_PACKAGE}.torch_ops.operators"


def register_with_torch() -> None:
    """Import the operators now if torch is imported, otherwise right after torch is imported."""
    if "torch" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch:
    """A finder on `sys.meta_path` that lets the first import of torch end with the registration."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of torch, with the registration added; None for other modules."""
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _register()

        # the loader itself stays, because others ask it for sources and resources
        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    """Import the operators, unless a module that they may need is missing or partly imported.

    A build for actnn alone has no kernels of the GRU, and `quant_gru.kernels` says so when asked.
    """
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name.startswith(f"{_PACKAGE}.") and getattr(spec, "_initializing", False):
            return
    if find_spec(f"{_PACKAGE}.kernels._native") is not None:
        import_module(_OPERATORS)
