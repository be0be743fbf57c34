"""What each choice would hold, before any training and without the memory that training needs."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    is_fake,
    unset_fake_temporarily,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actnn.codec import bytes_of
from actnn.errors import ActNNError
from actnn.layers.chunks import InChunks
from actnn.layers.dropout import SeededDropout
from actnn.layers.normalization import Normalization, Recognized, statistics_of
from actnn.layers.pooling import AveragePool, MaxPool
from actnn.layers.rectifiers import Rectifier
from actnn.layers.registry import mixin_for
from actnn.planning.sizes import format_bytes
from actnn.planning.training_step import Loss, TrainingStep, leaves_of, mapped
from actnn.planning.units import Unit, find_units
from actnn.saving import Saving, _native
from actnn.saving.attention import REPEATED, drops
from actnn.saving.context import GROUP, MIN_BYTES
from actnn.saving.dense import whole_of
from actnn.saving.exclusions import (
    RELU,
    alive_anyway,
    attention_bits,
    least_bits,
    op_of,
    reason_to_keep,
)
from actnn.saving.groups import CONVOLUTION, group_of
from actnn.saving.module_classes import Swapped, is_swapped
from actnn.saving.module_paths import ModulePaths
from actnn.saving.norms import NORM_BITS, is_norm
from actnn.saving.records import LOSSLESS, checked_bits
from actnn.saving.sides import compares, intervals_of

# Modules that hold a mask, offsets or a seed.
_WITHOUT_TENSORS = (Rectifier, SeededDropout, MaxPool, AveragePool)
_MOST_INTEGERS = 1 << 20  # elements of a tensor that has data
# Recurrent networks of oneDNN, cuDNN and MIOpen.
_WITH_WORKSPACE = {"MkldnnRnnLayerBackward0", "CudnnRnnBackward0", "MiopenRnnBackward0"}


@dataclass(frozen=True)
class Row:
    """Bytes that one unit holds for its backward.

    Attributes:
        exact: Without actnn.
        compressed: Bits -> bytes with these bits.
        recompute: If its forward runs again in backward: its inputs.
        host: Bytes in host memory if everything is moved there; what is left on the device is
            `exact` less this.
    """

    exact: int
    compressed: dict[int, int]
    recompute: int
    host: int


@dataclass(frozen=True)
class Estimate:
    """What each choice would hold: `rows` by unit. Print it for the table.

    `compressed` has codes of what PyTorch keeps, less what modules of norms, rectifiers, dropout
    and pools save, and attention. `nn.GRU` holds less. `nn.Sigmoid` and `nn.Tanh` hold codes of
    their derivatives beside those of their results.
    """

    rows: dict[str, Row]

    @property
    def total(self) -> Row:
        """The sum of all rows."""
        rows = self.rows.values()
        widths = next(iter(rows)).compressed
        return Row(
            sum(row.exact for row in rows),
            {bits: sum(row.compressed[bits] for row in rows) for bits in widths},
            sum(row.recompute for row in rows),
            sum(row.host for row in rows),
        )

    def __str__(self) -> str:
        rows = {**self.rows, "in all": self.total}
        names = ["exact", *(f"{bits} bits" for bits in self.total.compressed)]
        names += ["recompute", "offload"]
        width = max(map(len, rows))
        lines = ["  ".join([" " * width, *(f"{name:>10}" for name in names)])]
        for name, row in rows.items():
            sizes = [row.exact, *row.compressed.values(), row.recompute, row.exact - row.host]
            lines.append(
                "  ".join([f"{name:<{width}}", *(f"{format_bytes(s):>10}" for s in sizes)])
            )
        return "\n".join(lines)


class _UnknownSizeError(Exception):
    """A workspace is saved of which only a library knows the size."""


class _Collector:
    """Adds up what autograd saves, each storage once, by unit."""

    def __init__(self, model: nn.Module, example: Any, units: list[Unit], bits: Sequence[int]):
        alive = {"input": leaves_of(example), "buffer": model.buffers()}
        alive["parameter"] = model.parameters()
        self._known = {
            tensor.untyped_storage()._cdata: reason
            for reason, tensors in alive.items()
            for tensor in tensors
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided
        }
        self._paths = ModulePaths(model)
        self._bits = bits
        self._units = units
        self._now = ""
        self._storages: set[int] = set()
        self._saved: dict[tuple[object, ...], Tensor] = {}  # so that no address is used again
        self._alive: list[Tensor] = []  # likewise
        # (node that made it, which result) -> what became codes, and the bytes of its unit
        self._codes: dict[tuple[Any, int], tuple[Tensor, dict[int, int]]] = {}
        self._in_norm: tuple[int, bool] | None = None  # what the norm that runs will hold
        self._model = model
        self._rectified: set[int] = set()  # storages of results whose signs a module holds
        self._released: dict[int, int] = {}  # bytes of storages that only such modules save
        self._inputs: dict[int, Tensor] = {}
        names = [unit.path for unit in units] + [""]
        self._exact = dict.fromkeys(names, 0)
        self._host = dict.fromkeys(names, 0)
        self._boundary = dict.fromkeys(names, 0)
        self._compressed = {name: dict.fromkeys(bits, 0) for name in names}

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor  # without a storage of its own
        storage = tensor.untyped_storage()
        address = storage._cdata
        reason = reason_to_keep(tensor, self._known, address)
        if reason is not None and alive_anyway(reason):
            return tensor
        if isinstance(tensor, FakeTensor) and op_of(tensor) in _WITH_WORKSPACE:
            raise _UnknownSizeError
        new = address not in self._storages
        exact = storage.nbytes() if new else 0
        self._exact[self._now] += exact
        self._host[self._now] += 0 if reason is not None else exact
        self._storages.add(address)
        _, boundary, module = self._paths.current()
        mixin = None if module is None else mixin_for(module)
        again = new and reason is None and _is_made_again(tensor)
        if mixin in _WITHOUT_TENSORS or self._in_norm is not None or again:
            self._keep_less(tensor, address, exact, mixin)
            return tensor
        exact += self._released.pop(address, 0)
        key, whole = _key_of(tensor)
        if key not in self._saved:
            self._saved[key] = tensor
            in_chunks = module is not None and is_swapped(module, InChunks)
            exactly = boundary or in_chunks or _native.in_custom_function(sys._getframe(1))
            kept = reason is not None or exactly
            least = NORM_BITS if is_norm(module) else 1
            inside = self._compressed[self._now]
            signs = op_of(tensor) == RELU and address not in self._rectified
            for bits in self._bits:
                held = exact if kept else _bytes_held(tensor, whole, bits, exact, least, signs)
                inside[bits] += held
            if not kept and MIN_BYTES <= whole.nbytes:
                self._codes[tensor.grad_fn, tensor.output_nr] = tensor, inside
        return tensor

    def _keep_normalized(self, x: Tensor, y: Tensor, statistics: int, shares: bool) -> None:
        """Count what a norm holds: codes of its normalized input, of which its result is made."""
        n, nbytes = x.numel(), x.numel() * y.element_size()
        for bits in self._bits:
            held = min(nbytes, bytes_of(n, max(bits, NORM_BITS)))
            self._compressed[self._now][bits] += held + 4 * statistics
        if shares and y.is_contiguous():
            self._saved.setdefault(_key_of(y)[0], y)

    def look_at(self, result: Tensor) -> None:
        """Count what the first step finds out about saved tensors, from the graph of a result.

        Operands are known by the nodes that made them: to unpack them would run checkpoints.
        """
        left, seen = [result.grad_fn], set()
        while left:
            node: Any = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            left += [each for each, _ in node.next_functions]
            if compares(node):  # the operand, or the result of one in place
                masks = functools.partial(_sides, len(intervals_of(node)))
                self._add(node.next_functions[0], masks)
                self._add((node, 0), masks)
            elif node.name() in REPEATED:
                for operand in node.next_functions[:2]:  # queries and keys
                    self._add(operand, _refined)

    def _add(self, made_by: tuple[Any, int], more: Callable[[Tensor, int], int]) -> None:
        """Add more(tensor, bits) bytes for a result of a node that has become codes."""
        found = self._codes.get(made_by)
        if found is not None:
            tensor, held = found
            for bits in self._bits:
                held[bits] += more(tensor, bits)

    def _keep_less(
        self, tensor: Tensor, address: int, exact: int, mixin: type[Swapped] | None
    ) -> None:
        """Count what a module holds instead of a tensor, which others may save after it."""
        self._released[address] = self._released.get(address, 0) + exact
        self._alive.append(tensor)
        held = 0
        if mixin is Rectifier:
            held = -(-tensor.numel() // 8)
            self._rectified.add(address)
        elif mixin is MaxPool and not tensor.is_floating_point():
            held = tensor.numel()
        for bits in self._bits:
            self._compressed[self._now][bits] += held

    @contextmanager
    def collecting(self) -> Iterator[None]:
        handles = []

        def enter_norm(module: nn.Module, args: Any) -> None:
            x = args[0] if len(args) == 1 else None
            if isinstance(x, Tensor) and x.requires_grad and MIN_BYTES <= x.nbytes:
                self._in_norm = statistics_of(module, mixin_for(module), x)

        def leave_norm(_: nn.Module, args: Any, y: Any) -> None:
            found, self._in_norm = self._in_norm, None
            if found is not None:
                self._keep_normalized(args[0], y, *found)

        for module in self._model.modules():
            if mixin_for(module) in (Normalization, Recognized):
                handles.append(module.register_forward_pre_hook(enter_norm))
                handles.append(module.register_forward_hook(leave_norm))
        for unit in self._units:

            def enter(_: nn.Module, args: Any, kwargs: Any, path: str = unit.path) -> None:
                self._now = path
                for leaf in tree_leaves((args, kwargs)):
                    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                        continue
                    if leaf.layout is not torch.strided:
                        continue
                    address = leaf.untyped_storage()._cdata
                    if address not in self._known and address not in self._inputs:
                        self._inputs[address] = leaf
                        self._boundary[path] += leaf.numel() * leaf.element_size()

            def leave(*_: object) -> None:
                self._now = ""

            handles.append(unit.module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(unit.module.register_forward_hook(leave))
        try:
            with saved_tensors_hooks(self._save, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def estimate(self) -> Estimate:
        rows = {}
        for name in self._exact:
            row = Row(
                self._exact[name],
                self._compressed[name],
                self._boundary[name] if name else self._exact[name],
                self._host[name],
            )
            if row.exact or row.recompute:
                rows[name or "(elsewhere)"] = row
        empty = Row(0, dict.fromkeys(self._bits, 0), 0, 0)
        return Estimate(rows or {"(nothing)": empty})


def _key_of(tensor: Tensor) -> tuple[tuple[object, ...], Tensor]:
    """Return what tells saved tensors apart, and the tensor that is held as a whole."""
    whole = whole_of(tensor)
    layout = (tensor.shape, tensor.stride()) if whole is None else whole.numel()
    whole = tensor if whole is None else whole
    address = tensor.untyped_storage()._cdata
    return (address, whole.storage_offset(), layout, tensor.dtype, tensor._version), whole


def _is_made_again(tensor: Tensor) -> bool:
    """Whether attention has saved its result, which it makes again from rounded operands."""
    node = tensor.grad_fn
    is_result = node is not None and node.name() in REPEATED and MIN_BYTES <= tensor.nbytes
    return is_result and not drops(node)


def _sides(intervals: int, operand: Tensor, bits: int) -> int:
    """Bytes that say in which intervals the elements of an operand are."""
    return 0 if bits == LOSSLESS else intervals * -(-operand.numel() // 8)


def _refined(operand: Tensor, bits: int) -> int:
    """Bytes by which codes of queries or keys grow when it is known what they are."""
    if bits == LOSSLESS:
        return 0
    n = operand.numel()
    before = max(bits, least_bits(operand, op_of(operand), bits))
    return bytes_of(n, max(before, attention_bits(bits))) - bytes_of(n, before)


def _bytes_held(
    tensor: Tensor, whole: Tensor, bits: int, exact: int, least: int, signs: bool
) -> int:
    """Bytes of the codes of a tensor that may be compressed, held as a whole; else as it is."""
    n, op = whole.numel(), op_of(tensor)
    nbytes = n * whole.element_size()
    if nbytes < MIN_BYTES:  # a small part of a storage is copied, so that the rest is free
        return nbytes if 0 < 2 * nbytes < tensor.untyped_storage().nbytes() else exact
    group = group_of(whole, GROUP, op == CONVOLUTION)
    codes = bytes_of(n, max(bits, least_bits(tensor, op, bits), least), group)
    return min(nbytes, codes + (-(-n // 8) if signs else 0))


def estimate(
    model: nn.Module, example: Any, *, loss: Loss | None = None, bits: Sequence[int] = (8, 4, 2)
) -> Estimate:
    """Say what each choice would hold for backward: exact, some bits, recompute, offload.

    The forward runs on tensors without data, so that no memory is needed and nothing changes. A
    model for which that fails is run in earnest: one whose forward depends on values, that has an
    `nn.LSTM` or on a GPU another recurrent network of PyTorch, or an operator whose version for
    such tensors is wrong.

    Args:
        model: The model in training mode.
        example: A batch: a tensor, a tuple of arguments, a mapping of keyword arguments, or
            whatever `loss` takes.
        loss: (model, example) -> scalar loss.
        bits: Widths to list.

    Returns:
        The estimate: print it for a table of bytes by block.

    Raises:
        ActNNError: If the model is compressed already, an argument is not as described, or a
            model that is run in earnest does not fit the memory.

    Example:
        >>> print(estimate(network, images))  # doctest: +ELLIPSIS
                          exact      8 bits      4 bits      2 bits   recompute     offload
        ...
    """
    if not isinstance(bits, Sequence) or isinstance(bits, str):
        raise ActNNError(f"Expected bits to be widths such as (8, 4, 2), got {bits!r}")
    for each in bits:
        checked_bits(each)
    step = TrainingStep(model, example, loss)
    if isinstance(getattr(model, "actnn", None), Saving):
        raise ActNNError("Expected a model that is not compressed, got one; call uncompress(model)")
    without_data = _WithoutData()
    try:
        with _quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            with FakeCopyMode(mode), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a weight that pruning has made has no gradient
                fake_model = deepcopy(model)

            def faked(leaf: Any) -> Any:
                floats = isinstance(leaf, Tensor) and not _is_small(leaf)
                return mode.from_tensor(leaf) if floats else leaf

            fake = TrainingStep(fake_model, mapped(faked, example), loss)
            with without_data:
                return _estimated(fake, bits)
    except ActNNError:
        raise
    except Exception as error:
        failure = error
    try:
        with step.isolated():
            return _estimated(step, bits)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise ActNNError(
            f"Expected {without_data.name} to run on tensors without data, got "
            f"{type(failure).__name__} in it, and no memory to run the model in earnest; give a "
            "part of the batch, or use report(model, step=) with a step that fits"
        ) from failure


class _WithoutData(TorchDispatchMode):
    """Runs operators on tensors without data, but for small integers, on which forwards depend.

    Attributes:
        name: The operator that ran last.
    """

    name = "the model"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.name, kwargs = str(func), kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        has_data = not any(is_fake(each) or not _is_small(each) for each in tensors)
        if func is torch.ops.aten.native_batch_norm.default and args[0].device.type == "cpu":
            y, *rest = func(*args, **kwargs)  # in the order of x; a CPU has an order of its own
            return y.contiguous(memory_format=suggest_memory_format(args[0])), *rest
        if not has_data or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        if func is not torch.ops.aten._local_scalar_dense.default:
            result = func(*args, **kwargs)
            if not all(
                isinstance(each, Tensor) and _is_small(each) for each in tree_leaves(result)
            ):
                return result
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor has few elements, which are integers."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    return not floats and tensor.numel() <= _MOST_INTEGERS


@contextmanager
def _quiet() -> Iterator[None]:
    """Let PyTorch not write about an operator that fails on tensors without data."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _estimated(step: TrainingStep, bits: Sequence[int]) -> Estimate:
    collector = _Collector(step.model, step.example, find_units(step.model), bits)
    with torch.enable_grad(), collector.collecting():
        collector.look_at(step.loss())
    return collector.estimate()
