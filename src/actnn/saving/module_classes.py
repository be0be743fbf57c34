"""Swaps the classes of modules in place: parameters, hooks, state and identity stay."""

from __future__ import annotations

import copyreg
import inspect
from functools import cache, update_wrapper
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torch import nn

from actnn.errors import ActNNError

ATTRIBUTE = "_actnn_"  # begins the names of what the classes add to a module


class Swapped:
    """Base of the classes that are put in front of a module's own class."""

    _actnn_mixins: ClassVar[tuple[type[Swapped], ...]] = ()
    _actnn_original: ClassVar[type[nn.Module]]

    def _actnn_effect(self) -> str:
        """Return what `print` says of a module that has this class in front of its own."""
        return ""

    def extra_repr(self) -> str:
        """Return the line of the module's own class, and what the classes in front of it do."""
        effects = (mixin._actnn_effect(self) for mixin in self._actnn_mixins)
        own: str = super().extra_repr()  # type: ignore[misc]
        return ", ".join(filter(None, (own, *effects)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so that pickle cannot import it by name.
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        make, arguments, *rest = reduced
        if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return (make, arguments, *rest)
        return (_new, (self._actnn_mixins, self._actnn_original, *arguments[1:]), *rest)


def _as_original(forward: Any, original: Any) -> FunctionType:
    """Return a forward under the name, signature, annotations and text of the original.

    Trainers, tracers and exporters read these to learn which inputs a model takes. The code is
    that of `forward`, so that no call is added. Its positional parameters have the original's
    names.
    """
    signature = inspect.signature(original)
    code = _with_names(forward.__code__, signature)
    copied = FunctionType(code, forward.__globals__, closure=forward.__closure__)
    copied.__defaults__, copied.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    update_wrapper(copied, original, updated=())
    marks = getattr(original, "__dict__", {}).items()  # those of torch.compile are about its code
    copied.__dict__.update(each for each in marks if not each[0].startswith("_torchdynamo"))
    copied.__dict__.update(forward.__dict__, __wrapped__=original, __signature__=signature)
    return copied


def _with_names(code: CodeType, signature: inspect.Signature) -> CodeType:
    """Return code whose positional parameters have the names of a signature, in its order."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    wanted = [each.name for each in signature.parameters.values() if each.kind in kinds]
    own = code.co_varnames[: code.co_argcount]
    # the first is the module, which no call names
    names = {a: b for a, b in zip(own[1:], wanted[1:], strict=False) if a != b}
    if not names:
        return code
    return code.replace(
        co_varnames=(*(names.get(name, name) for name in own), *code.co_varnames[len(own) :]),
        co_cellvars=tuple(names.get(name, name) for name in code.co_cellvars),
    )


@cache
def _inner(mixin: Any, original: Any) -> Any:
    """Return a class for behind others, which call its forward with the original's names."""
    return type(
        mixin.__name__, (mixin,), {"forward": _as_original(mixin.forward, original.forward)}
    )


@cache
def _class(mixins: tuple[type[Swapped], ...], original: Any) -> type[nn.Module]:
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_actnn_mixins": mixins,
        "_actnn_original": original,
        "forward": _as_original(mixins[0].forward, original.forward),  # type: ignore[attr-defined]
    }
    inner: Any = [_inner(mixin, original) for mixin in mixins[1:]]  # type: ignore[arg-type]
    return type(original.__name__, (mixins[0], *inner, original), names)


def _new(mixins: tuple[type[Swapped], ...], original: Any, *arguments: Any) -> Any:
    cls: Any = _class(mixins, original)
    return cls.__new__(cls, *arguments)


def swap(module: nn.Module, mixin: type[Swapped], *, innermost: bool = False) -> None:
    """Put a class in front of the classes of a module; its methods run first.

    Args:
        module: The module; one that has the class stays as it is.
        mixin: The class.
        innermost: Whether it goes behind the classes that are in front of the module's own.
    """
    mixins, original = _parts(module)
    if mixin not in mixins:
        mixins = (*mixins, mixin) if innermost else (mixin, *mixins)
        module.__class__ = _class(mixins, original)


def swap_back(module: nn.Module, mixin: type[Swapped] | None = None) -> None:
    """Remove a class that `swap` put in front of a module's own.

    Args:
        module: The module; one without the class stays as it is.
        mixin: The class; None removes all of them, and their attributes.
    """
    mixins, original = _parts(module)
    if mixin is None:
        for name in [each for each in vars(module) if each.startswith(ATTRIBUTE)]:
            del module.__dict__[name]
    left = () if mixin is None else tuple(other for other in mixins if other is not mixin)
    if left != mixins:
        module.__class__ = _class(left, original) if left else original


def as_plain(module: nn.Module) -> nn.Module:
    """Return an object of a module's own class that has all attributes in common with it.

    A compiler asks for the class of what it compiles: code for one serves all modules of this
    class, whatever is in front of them.
    """
    _, original = _parts(module)
    plain: nn.Module = original.__new__(original)
    object.__setattr__(plain, "__dict__", module.__dict__)
    return plain


def is_swapped(module: nn.Module, mixin: type[Swapped]) -> bool:
    """Whether a class is in front of a module's own."""
    return mixin in getattr(module, "_actnn_mixins", ())


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class without those in front of it."""
    found: type[nn.Module] = getattr(type(module), "_actnn_original", type(module))
    return found


def _parts(module: nn.Module) -> tuple[tuple[type[Swapped], ...], Any]:
    cls: Any = type(module)
    if not isinstance(module, Swapped):
        return (), cls
    if "_actnn_original" not in cls.__dict__:
        raise ActNNError(
            f"Expected the class of a module to stay as compress() left it, got {cls.__name__}; "
            "call uncompress() before other wrappers such as fully_shard change it"
        )
    return cls._actnn_mixins, cls._actnn_original


def runs(module: nn.Module, original: type[nn.Module]) -> bool:
    """Whether a module runs the forward of a class of torch.nn, itself or as a plain subclass."""
    return isinstance(module, original) and type(module).forward is original.forward
