"""Hooks for torch.compile: graphs that AOTAutograd inlines into those of forward and backward.

There quantization fuses with what makes a tensor, and decoding with what uses it. PyTorch applies
them to intermediate tensors only, not to inputs, outputs and parameters of a graph.
"""

from __future__ import annotations

import math
import operator
import re
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList

from actnn.codec import UNBOUNDED, Bounds, executors, ops
from actnn.codec.memory_order import order_of
from actnn.saving import _native
from actnn.saving.active import ACTIVE, pack_in_step
from actnn.saving.bit_masks import fusible_mask, unpack_flat
from actnn.saving.exclusions import ATTENTION_BITS, attention_bits, bits_of_result, bounds_of
from actnn.saving.graph_divisors import name_of
from actnn.saving.graph_norms import softmax_dim
from actnn.saving.graph_order import (
    arrange,
    bits_beside,
    divides_by,
    has_gradient,
    is_compared,
    is_read,
    traced_node,
)
from actnn.saving.graph_views import made_by, readers_of, source_of
from actnn.saving.groups import group_of
from actnn.saving.records import LOSSLESS, TensorInfo
from actnn.saving.settings import Settings
from actnn.saving.uncompiled import uncompiled

_aten = torch.ops.aten
_LARGEST_ALIGNMENT = 16  # elements, of the rows of a mask
_RELU = _aten.relu.default
_BOUNDS: dict[Any, Bounds] = {
    _aten.sigmoid.default: bounds_of("SigmoidBackward0", torch.float32),
    _aten.tanh.default: bounds_of("TanhBackward0", torch.float32),
    _aten._softmax.default: bounds_of("SoftmaxBackward0", torch.float32),
    _aten._safe_softmax.default: bounds_of("SafeSoftmaxBackward0", torch.float32),
    _aten._log_softmax.default: bounds_of("LogSoftmaxBackward0", torch.float32),
}


def call(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a function. This frame can be compiled where those of torch.nn are not."""
    return function(*arguments, **named)


class GraphHooks:
    """The pack and unpack hooks of a Saving, as graphs.

    Outside of compiled regions they do what the hooks of the running step do.

    Args:
        saving: The settings.
        paths: The paths of the modules of the model.
        inside: The path of the module that is compiled by itself; '' if that is the model.
    """

    def __init__(self, saving: Settings, paths: frozenset[str], inside: str) -> None:
        self._saving = weakref.ref(saving)
        self._paths, self._inside = paths, inside
        self._ids = count()

        def pack(x: Any) -> Any:
            return pack_in_step(x) if traced_node() is None else self._pack(x)

        self.pack = _graph_of(self._pack, _native.pack_hook(uncompiled(pack)))
        self.unpack = _graph_of(_unpack, _native.unpack_hook(uncompiled(_unpack)))

    def _pack(self, x: Any) -> Any:
        """Return a traced tensor as it is held: itself, or a tuple that `_unpack` understands."""
        saving, node = self._saving(), traced_node()
        assert saving is not None
        assert node is not None
        arrange(rounds=not saving.is_uniform or saving.default.bits != LOSSLESS)
        bits = [x.new_empty(n, dtype=torch.uint8) for n in bits_beside()]
        held = self._held(saving, x, node)
        return ("beside", held, *bits) if bits else held

    def _held(self, saving: Settings, x: Any, node: fx.Node) -> Any:
        if not is_read():
            return ("unread",)
        size = math.prod(x.shape) * x.element_size()
        has_codes = x.is_floating_point() or x.dtype is torch.bool
        if size < saving.min_bytes or _is_expanded(x) or not has_codes:
            return x
        # The order of memory, so that the result has strides in the same order.
        order = order_of(x)
        ordered = x.permute(order)
        aligned = _is_read_by_attention(made_by(node))
        sizes = [*ordered.shape, *_padded(ordered)] if aligned else ordered.shape
        layout = (*_distinct(sizes), [order.index(dim) for dim in range(x.dim())])
        flat = ordered.reshape(-1)
        if x.dtype is torch.bool:
            return ("mask", fusible_mask(flat), *layout)
        # whether codes can express float64 is not known here
        bits = None if x.dtype is torch.float64 else self._bits(saving, x, node, size)
        if bits is None:
            return x
        made = made_by(node)
        target, dim = made.target, softmax_dim(made)
        bounds = _BOUNDS.get(target, UNBOUNDED)
        if dim is not None:  # of 1 - p, codes of p say nothing
            flat, bounds = flat.log(), _BOUNDS[_aten._log_softmax.default]
        group = group_of(x, saving.group, target is _aten.convolution.default)
        data, params = encode_in_step(flat, bits, group, saving.stochastic, bounds)
        positive = fusible_mask(flat > 0) if target is _RELU else None
        held = ("codes", data, params, positive, bits, group, x.dtype, bounds, *layout)
        return held if dim is None else ("softmax", held, dim)

    def _bits(self, saving: Settings, x: Tensor, node: fx.Node, size: int) -> int | None:
        made = made_by(node)
        known = _is_statistic(made, x) or is_compared() or _is_computed_weight(node)
        if known or not has_gradient():
            return None
        target = getattr(node.target, "__name__", str(node.target))
        info = TensorInfo(self._path(node), target, next(self._ids), x.shape, x.dtype, size)
        choice = saving.exact(info) if divides_by() else saving.choice(info)
        if choice.action != "compress" or choice.bits in (None, LOSSLESS):
            return None
        least = bits_of_result(name_of(made))
        if _is_read_by_attention(made):
            least = max(least, attention_bits(choice.bits or saving.bits))
        elif any(map(_is_attention, _parents(made))):
            least = max(least, ATTENTION_BITS)
        return max(least, choice.bits or 0)

    def _path(self, node: fx.Node) -> str:
        """Return the path of the module whose forward has made a node."""
        stack = node.meta.get("nn_module_stack") or {}
        for source, _ in reversed(stack.values()):
            names = re.findall(r"\w+", re.sub(r"L\['\w+'\]|__self__|_modules|getattr", "", source))
            path = ".".join(filter(None, (self._inside, *names)))
            if path in self._paths:
                return path
        return self._inside


class CompiledCall:
    """The compiled call of a module of a model, whose graphs get the choices for its path.

    Args:
        call: What `torch.nn.Module.compile` has made.
        saving: The settings of the model.
        path: The path of the module.
    """

    def __init__(self, call: Callable[..., Any], saving: Settings, path: str) -> None:
        self.call, self._saving, self._path = call, weakref.ref(saving), path

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the compiled call inside of its hooks, if those of the model are active."""
        if torch.compiler.is_compiling():
            return self.call(*arguments, **named)
        saving = self._saving()
        if saving is None or not saving.is_active():
            return self.call(*arguments, **named)
        hooks = saving.hooks_in(self._path)
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            return self.call(*arguments, **named)

    def belongs_to(self, saving: Settings) -> bool:
        """Whether it takes the choices of a Saving."""
        return self._saving() is saving


def _graph_of(traced: Callable[[Any], Any], run: Callable[[Any], Any]) -> fx.GraphModule:
    """Return a hook as a graph.

    Args:
        traced: What AOTAutograd inlines.
        run: What is called instead of the graph, also while AOTAutograd traces.
    """

    def actnn_hook(saved: Any) -> Any:
        return traced(saved)

    graph = fx.Graph()
    graph.output(graph.call_function(actnn_hook, (graph.placeholder("saved"),)))
    module = fx.GraphModule({}, graph)
    # Each GraphModule has a class of its own. Its own __call__ would cost as much as the hook.
    type(module).__call__ = staticmethod(run)  # type: ignore[method-assign]
    return module


def _unpack(held: Any) -> Any:
    arrange()
    if not isinstance(held, tuple):
        return held
    kind, *rest = held
    if kind == "beside":
        return _unpack(rest[0])
    if kind == "softmax":
        logarithm = _unpack(rest[0])
        counts = logarithm > _BOUNDS[_aten._log_softmax.default][0]
        return torch.where(counts, logarithm.softmax(rest[1]), 0)
    if kind == "unread":
        return torch.empty(0)
    *rest, sizes, where, places = rest
    found = [sizes[index] for index in where]
    shape, padded = found[: len(places)], found[len(places) :]
    n = math.prod(shape)
    if kind == "mask":
        return unpack_flat(rest[0])[:n].view(shape).permute(places)
    data, params, positive, bits, group, dtype, bounds = rest
    flat = ops.decode(data, params, bits, group, n, dtype, bounds)
    if positive is not None:
        inside = unpack_flat(positive)[:n]
        flat = torch.where(inside, flat.clamp(min=torch.finfo(dtype).tiny), 0)
    decoded = flat.view(shape)
    if padded:
        decoded = functional.pad(decoded, (0, padded[0] - shape[-1])).narrow(-1, 0, shape[-1])
    return decoded.permute(places)


def _padded(ordered: Tensor) -> list[Any]:
    """Return the elements from one row to the next, if those between rows align them; else [].

    Kernels of attention read a mask whose rows are aligned, in backward, too.
    """
    if ordered.dim() < 2 or ordered.stride(-1) != 1:
        return []
    step, row = ordered.stride(-2), ordered.shape[-1]
    return [step] if row < step < row + _LARGEST_ALIGNMENT else []


def _distinct(shape: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct sizes of a shape, and which of them each dimension has.

    AOTAutograd makes a wrong graph of a hook that returns one symbolic size twice.
    """
    names = [str(size) for size in shape]  # to compare symbols themselves would be a guard
    found = {name: size for name, size in zip(names, shape, strict=True)}
    return list(found.values()), [list(found).index(name) for name in names]


def _is_computed_weight(node: fx.Node) -> bool:
    """Whether torch.nn.utils.parametrize makes a tensor, or that of which it is a view."""
    stack = source_of(node).meta.get("nn_module_stack") or {}
    kinds = [kind for _, kind in stack.values()]
    return any(isinstance(kind, type) and issubclass(kind, ParametrizationList) for kind in kinds)


def _is_expanded(x: Tensor) -> bool:
    """Whether elements share memory."""
    return any(s == 0 and n != 1 for s, n in zip(x.stride(), x.shape, strict=True))


def _parents(node: fx.Node) -> list[fx.Node]:
    return [node.args[0]] if node.target is operator.getitem else []  # type: ignore[list-item]


def _is_attention(node: fx.Node) -> bool:
    return "attention" in str(node.target)


def _is_read_by_attention(node: fx.Node) -> bool:
    return any(_is_attention(each) for each in readers_of(node))


def _is_statistic(node: fx.Node, x: Tensor) -> bool:
    """Whether a tensor has one number for many: a mean, a deviation, the logarithm of a sum."""
    more = any(_is_attention(each) or "norm" in str(each.target) for each in _parents(node))
    return x.dim() == 0 or x.shape[-1] == 1 or (more and bool(node.args[1]))


def _encode_in_step(
    x: Tensor, bits: int, group: int, stochastic: bool, bounds: Sequence[float]
) -> tuple[Tensor, Tensor]:
    state, tensor = ACTIVE.steps[-1][0].key(x.device)
    return executors.encode_flat(x, bits, state, tensor, group, stochastic, ops.bounds_of(bounds))


def _fake_encode_in_step(
    x: Tensor, bits: int, group: int, stochastic: bool, bounds: Sequence[float]
) -> tuple[Tensor, Tensor]:
    return ops.fake_encode(x, bits, group)


_LIBRARY = torch.library.Library("actnn", "FRAGMENT")
_LIBRARY.define(
    "encode_in_step(Tensor x, int bits, int group, bool stochastic, float[2] bounds)"
    " -> (Tensor data, Tensor params)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_LIBRARY.impl("encode_in_step", _encode_in_step, "CompositeExplicitAutograd")
torch.library.register_fake("actnn::encode_in_step", _fake_encode_in_step, lib=_LIBRARY)

encode_in_step = torch.ops.actnn.encode_in_step.default
"""`ops.encode` with the noise of the step that runs: modules may share compiled code."""
