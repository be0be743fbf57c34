"""What a model computes before its first GRU: kept from one call, and repeated in those like it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from quant_gru.interchange.onnx.scripted import is_tracing

# Bytes of kept results of all calls together.
_MOST_BYTES = 1 << 30


class Replay:
    """Repeats the operations of a model before its first GRU from an earlier call.

    An operation is repeated only if it and all operations before it in the call have the same
    arguments as in the kept call: results of kept operations, tensors of equal values, equal
    numbers. Everything else is computed, so that a call gives what it would give without. What an
    operation changes in place is no longer repeated.

    Args:
        model: The model whose calls are repeated.
        grus: Its GRUs; what a call computes after it has reached one is computed each time.

    Attributes:
        is_on: Whether calls are kept and repeated.
        repeated: How many operations have been repeated.
        seen: How many operations there were, without those in GRUs.
    """

    def __init__(self, model: torch.nn.Module, grus: Iterable[torch.nn.Module]) -> None:
        self._model, self._grus = model, tuple(grus)
        self._tapes: dict[Hashable, _Tape] = {}
        self._bytes = 0
        self.is_on = True
        self.repeated = self.seen = 0

    @property
    def operations(self) -> int:
        """How many operations are kept."""
        return sum(len(tape.steps) for tape in self._tapes.values())

    def forget(self) -> None:
        """Keep and repeat nothing from here on."""
        self._tapes.clear()
        self.is_on = False

    @contextmanager
    def calls(self, key: Hashable) -> Iterator[None]:
        """Keep or repeat the calls of the model inside, the first, second .. as under this key."""
        if not self.is_on:
            yield
            return
        thread, count = threading.get_ident(), 0
        mode: _Mode | None = None

        def begin(*_: Any) -> None:
            nonlocal mode, count
            busy = _get_current_dispatch_mode() is not None or torch.compiler.is_compiling()
            busy = busy or is_tracing() or torch.is_grad_enabled()
            if mode is None and not busy and threading.get_ident() == thread:
                mode = _Mode(self, self._tapes.setdefault((key, count), _Tape()))
                mode.__enter__()
            count += 1

        def pause(*_: Any) -> None:
            if mode is not None and threading.get_ident() == thread:
                mode.finish()
                mode.__exit__(None, None, None)

        def resume(*_: Any) -> None:
            if mode is not None and threading.get_ident() == thread:
                mode.__enter__()

        def end(_: Any, __: Any, outputs: Any) -> None:
            nonlocal mode
            if mode is not None and threading.get_ident() == thread:
                mode.finish()
                mode.__exit__(None, None, None)
                mode = None
                for each in tree_flatten(outputs)[0]:  # which the caller may change in place
                    if isinstance(each, Tensor):
                        self.changed(each)

        hooks = [self._model.register_forward_pre_hook(begin, prepend=True)]
        for gru in self._grus:
            hooks.append(gru.register_forward_pre_hook(pause))
            hooks.append(gru.register_forward_hook(resume, prepend=True, always_call=True))
        hooks.append(self._model.register_forward_hook(end, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, size: int) -> bool:
        """Return whether so many bytes more can be kept, and count them."""
        self._bytes += size
        return self._bytes <= _MOST_BYTES

    def changed(self, tensor: Tensor) -> None:
        """Repeat nothing from the first operation on that has made or read this memory."""
        for tape in self._tapes.values():
            tape.cut(_memory(tensor))


@dataclass
class _Step:
    """A kept operation.

    Attributes:
        operation: What is called.
        leaves: Its arguments, flat: `_Result`, `_Outside`, or what is no tensor.
        structure: How they are nested.
        results: Its results, flat; None if it is computed again: it changes its argument, or gives
            another view of it.
        result_structure: How they are nested.
        copied: Which results are changed in place later, so that each call needs a copy.
    """

    operation: Any
    leaves: list[Any]
    structure: TreeSpec
    results: list[Any] | None
    result_structure: TreeSpec
    copied: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Result:
    """An argument that an earlier operation of the call has made.

    Attributes:
        step: The operation.
        index: Which of its results.
    """

    step: int
    index: int


@dataclass(frozen=True)
class _Outside:
    """An argument that no kept operation has made, with its version."""

    tensor: Tensor
    version: int

    def is_same(self, other: Tensor) -> bool:
        """Return whether a tensor has the values that this one had."""
        mine = self.tensor
        if mine._version != self.version:
            return False
        return other is mine or (
            (mine.dtype, mine.device, mine.shape) == (other.dtype, other.device, other.shape)
            and mine.stride() == other.stride()
            and torch.equal(mine, other)
        )


@dataclass
class _Tape:
    """The kept operations of a call, in order.

    Attributes:
        steps: The operations.
        is_complete: Whether it gets no more.
        first: Memory -> the first operation that has made or read what is kept there.
    """

    steps: list[_Step] = field(default_factory=list)
    is_complete: bool = False
    first: dict[int, int] = field(default_factory=dict)

    def add(self, step: _Step) -> None:
        """Append an operation."""
        at = len(self.steps)
        self.steps.append(step)
        tensors = [each.tensor for each in step.leaves if isinstance(each, _Outside)]
        tensors += [each for each in step.results or () if isinstance(each, Tensor)]
        for each in tensors:
            self.first.setdefault(_memory(each), at)

    def copy(self, result: _Result) -> None:
        """Keep a copy of a result, and give copies of it."""
        step = self.steps[result.step]
        assert step.results is not None
        if result.index not in step.copied:
            before = step.results[result.index]
            step.results[result.index] = before.clone()
            step.copied.add(result.index)
            del self.first[_memory(before)]

    def cut(self, memory: int) -> None:
        """Drop the operations from the first one on that has made or read this memory."""
        at = self.first.get(memory)
        if at is not None:
            del self.steps[at:]
            self.first = {key: each for key, each in self.first.items() if each < at}
            self.is_complete = True


class _Mode(TorchDispatchMode):
    """Sees the operations of one call, but for those in GRUs."""

    def __init__(self, owner: Replay, tape: _Tape) -> None:
        super().__init__()
        self._owner, self._tape = owner, tape
        self._is_new = not tape.is_complete
        self._is_computed = False  # whether all that follows is computed
        self._at = 0
        self._made: dict[Hashable, _Result] = {}
        self._owners: dict[int, list[_Result]] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the memory of one in `_made`

    def finish(self) -> None:
        """Keep and repeat no more operations of this call."""
        self._is_computed = self._tape.is_complete = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._owner.seen += 1
        if not self._is_computed:
            given, structure = tree_flatten((args, kwargs))
            if self._is_new and _is_repeatable(func, given):
                return self._kept(func, args, kwargs, given, structure)
            step = None if self._is_new else self._next(func, given, structure)
            if step is not None:
                return self._repeated(step, args, kwargs)
            self.finish()
        for each in _changed(func, args, kwargs):
            self._owner.changed(each)
        return func(*args, **kwargs)

    def _kept(
        self, func: Any, args: Any, kwargs: Any, given: list[Any], structure: TreeSpec
    ) -> Any:
        """Compute an operation and keep it, if it can be repeated."""
        leaves = [self._leaf(each) for each in given]
        changed = _changed(func, args, kwargs)
        for each in changed:
            owners = self._owners.get(_memory(each), [])
            if len(owners) == 1:
                self._tape.copy(owners[0])
            else:
                self.finish()
                self._owner.changed(each)
        made = func(*args, **kwargs)
        results, result_structure = tree_flatten(made)
        tensors = [each for each in results if isinstance(each, Tensor)]
        known = {_memory(each) for each in self._alive}
        new = [each for each in tensors if _memory(each) not in known]
        size = sum(each.untyped_storage().nbytes() for each in new)
        if any(each.is_inference() for each in tensors) or not self._owner.take(size):
            self.finish()
        if not self._is_computed:
            again = changed or _is_view(func) or len(new) < len(tensors)
            kept = None if again else results
            at = len(self._tape.steps)
            self._tape.add(_Step(func, leaves, structure, kept, result_structure))
            if not changed:
                self._name(at, results)
            for i, each in enumerate(kept or ()):
                if isinstance(each, Tensor):
                    self._owners.setdefault(_memory(each), []).append(_Result(at, i))
        return made

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = self._made.get(_identity(value))
        return _Outside(value, value._version) if made is None else made

    def _next(self, func: Any, given: list[Any], structure: TreeSpec) -> _Step | None:
        """Return the kept operation if this is the same one."""
        if self._at >= len(self._tape.steps):
            return None
        step = self._tape.steps[self._at]
        if func is not step.operation or structure != step.structure:
            return None
        return step if all(map(self._is_equal, step.leaves, given)) else None

    def _is_equal(self, leaf: Any, value: Any) -> bool:
        if isinstance(value, Tensor):
            made = self._made.get(_identity(value))
            if made is None:
                return isinstance(leaf, _Outside) and leaf.is_same(value)
            return bool(made == leaf)
        return type(leaf) is type(value) and repr(leaf) == repr(value)

    def _repeated(self, step: _Step, args: Any, kwargs: Any) -> Any:
        at = self._at
        self._at += 1
        self._owner.repeated += 1
        if step.results is None:
            found = step.operation(*args, **kwargs)
            if not step.operation._schema.is_mutable:
                self._name(at, tree_flatten(found)[0])
            return found
        results = [
            each.clone() if i in step.copied else each for i, each in enumerate(step.results)
        ]
        self._name(at, results)
        return tree_unflatten(results, step.result_structure)

    def _name(self, step: int, results: list[Any]) -> None:
        for i, each in enumerate(results):
            if isinstance(each, Tensor):
                self._made[_identity(each)] = _Result(step, i)
                self._alive.append(each)


def _is_repeatable(func: Any, given: list[Any]) -> bool:
    """Return whether an operation gives equal results for equal arguments, and tells of changes."""
    return (
        func.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not any(
            isinstance(each, Tensor) and (each.is_inference() or each.layout != torch.strided)
            for each in given
        )
    )


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    values = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]


def _is_view(func: Any) -> bool:
    """Return whether an operation gives other views of its arguments, which must be new tensors."""
    return any(each.alias_info is not None for each in func._schema.returns)


def _memory(tensor: Tensor) -> int:
    """Return what views of the same memory have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _identity(tensor: Tensor) -> Hashable:
    """Return what tensors of the same values in the same memory have in common."""
    if tensor.layout != torch.strided:
        return id(tensor)
    place = _memory(tensor), tensor.storage_offset()
    return *place, tuple(tensor.shape), tensor.stride(), tensor.dtype
