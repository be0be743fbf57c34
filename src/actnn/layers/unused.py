"""Says so, once, if a compressed model trains and nothing that it saves can be compressed."""

from __future__ import annotations

import warnings
import weakref
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from torch import Tensor, nn

from actnn.errors import ActNNWarning
from actnn.saving.context import Saving
from actnn.saving.uncompiled import uncompiled

_LATER = (GeneratorType, CoroutineType, AsyncGeneratorType, map)


class Watch:
    """Warns if the first gradient comes to a model before any step of its Saving.

    Hooks of the parameters see it, and are removed then.

    Args:
        model: The compressed model.
        saving: Its Saving.
    """

    def __init__(self, model: nn.Module, saving: Saving) -> None:
        self._model, self._saving = weakref.ref(model), weakref.ref(saving)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._see)
            for parameter in model.parameters()
            if type(parameter) is nn.Parameter and parameter.requires_grad
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.__dict__.pop("_handles", ()):
            handle.remove()

    def _see(self, _: Tensor) -> None:
        self.remove()
        model, saving = self._model(), self._saving()
        if model is None or saving is None or saving.started:
            return
        kind = type(model).__name__
        warnings.warn(
            f"Expected training to call the compressed {kind} itself, got gradients without such a "
            f"call, so that nothing was compressed. Call the model in the step, as self(x) and "
            f"not {_a_call(model)}; or compress {_called(model)} instead; or write `with "
            "model.actnn:` around the forward",
            ActNNWarning,
            stacklevel=2,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: the hooks belong to the parameters of one model."""
        return {}


def _trained_children(model: nn.Module) -> list[str]:
    return [
        name
        for name, child in model.named_children()
        if any(parameter.requires_grad for parameter in child.parameters())
    ]


def _a_call(model: nn.Module) -> str:
    children = _trained_children(model)
    return f"self.{children[0]}(x)" if children else "another method"


def _called(model: nn.Module) -> str:
    children = _trained_children(model)
    if not children:
        return "what it calls"
    return "what it calls (" + " or ".join(repr(name) for name in children[:3]) + ")"


@uncompiled
def check_result(model: nn.Module, result: object) -> None:
    """Warn if the forward of a model has returned something that does its work later."""
    if isinstance(result, _LATER):
        warnings.warn(
            f"Expected the forward of {type(model).__name__} to do its work before it returns, got "
            f"a {type(result).__name__}, so that nothing was compressed; compress "
            f"{_called(model)} instead, or write `with model.actnn:` around the loop",
            ActNNWarning,
            stacklevel=3,
        )
