"""What a forward changes in the objects that it is given, such as a cache that grows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 6  # of objects in objects
_ITEMS = 4096  # of a container
_OPAQUE = (nn.Module, type, FunctionType, ModuleType)


class Watched:
    """The arguments of a call, as they are now.

    Args:
        arguments: Those by position.
        named: Those by name.
    """

    def __init__(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._given = {f"{index}": each for index, each in enumerate(arguments)} | dict(named)
        self._before = {name: _print_of(each, _DEPTH) for name, each in self._given.items()}

    def changed(self) -> str:
        """Return the name or the position of an argument that is not as it was; '' if all are."""
        for name, each in self._given.items():
            if _print_of(each, _DEPTH) != self._before[name]:
                return name
        return ""


def _print_of(value: Any, depth: int) -> Hashable:
    """Return what differs after an object, or one in it, has changed."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, torch.Generator):
        return hash(value.get_state().numpy().tobytes())
    if isinstance(value, _OPAQUE) or not depth:
        return id(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = (_print_of(each, depth - 1) for each, _ in zip(value, range(_ITEMS), strict=False))
        return type(value), len(value), tuple(items)
    if isinstance(value, Mapping):
        items = (
            (key, _print_of(each, depth - 1))
            for (key, each), _ in zip(value.items(), range(_ITEMS), strict=False)
        )
        return type(value), len(value), tuple(items)
    inside = getattr(value, "__dict__", None)
    return id(value), None if inside is None else _print_of(inside, depth - 1)
