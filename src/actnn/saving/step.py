"""One forward pass: the tensors that it saves, each storage once.

Native code decides about each tensor (saving/native/step.cpp). It asks the rules here once for all
tensors of a kind, and for what is rare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from actnn import codec
from actnn.saving import _native
from actnn.saving.attention import REPEATED, Again, drops, saves_sums
from actnn.saving.bit_masks import positive_mask
from actnn.saving.comparisons import COMPARED, COMPARING, is_compared, operands_of
from actnn.saving.dense import is_dense, whole_of
from actnn.saving.divisors import DIVIDED, Recent, Saved, Slope, divides
from actnn.saving.exclusions import (
    BEYOND,
    CHECKPOINT,
    CHOSEN_BITS,
    FORMS,
    RELU,
    attention_bits,
    bounds_of,
    least_bits,
    op_of,
    tensors_in,
    weight_reason,
)
from actnn.saving.groups import CONVOLUTION, group_of
from actnn.saving.held import (
    Compressed,
    Held,
    Kept,
    View,
    refuse_changed,
    refuse_second_derivative,
    view_of_storage,
)
from actnn.saving.norm_limits import (
    LOG_SOFTMAX,
    NORMS,
    STATISTIC,
    STATISTICS,
    limit_normalized,
)
from actnn.saving.norms import NORM_BITS, is_norm
from actnn.saving.offload import Offloaded, Queue, can_leave
from actnn.saving.records import KEEP, LOSSLESS, Choice, Record, TensorInfo
from actnn.saving.scaled import Scale, Scaled
from actnn.saving.settings import Bits, Settings
from actnn.saving.sides import COMPARED_WITH, Intervals, restore_sides, sides_of
from actnn.saving.uncompiled import uncompiled

_native.set_rules(KEEP, FORMS, COMPARING | REPEATED | STATISTICS)
_native.set_held_rules(
    refuse_changed,
    refuse_second_derivative,
    restore_sides,
    view_of_storage,
    frozenset({*NORMS, LOG_SOFTMAX}),
    uncompiled(limit_normalized),
)
_native.set_divides(uncompiled(divides))
_KEEP, _ENCODE, _OTHER, _ADAPT = range(4)  # the actions of a decision
INPUT = "input of a checkpoint"  # the reason in records
SLOPES = "codes of the derivative"  # the reason in records
_CODES = {bits: Choice("compress", bits) for bits in range(1, 9)}


class Opaque(NamedTuple):
    """A module whose inner operations are hidden, because it is compiled.

    What it saves does not require gradients, so that its size must tell activations from the rest.

    Attributes:
        smallest: Elements of the smallest tensor that counts as an activation.
        weights: Elements of its parameters; a tensor of this size may be a copy of one.
    """

    smallest: int
    weights: frozenset[int]

    def is_activation(self, tensor: Tensor) -> bool:
        """Whether a saved tensor may be compressed."""
        elements = tensor.numel()
        return (
            elements >= self.smallest
            and elements not in self.weights
            and tensor.is_floating_point()
            and is_dense(tensor)
        )


class Step(_native.Step):
    """The saved tensors of one forward pass in one thread.

    Args:
        saving: The settings.
        paths: Paths of the modules.
        model: Its parameters and buffers.
        decisions: Decisions of earlier steps that are still valid.
        uses: What the first steps have found out.

    Attributes:
        records: What was saved, in order.
        opaque: The compiled module that is running; None if there is none.
        announced: A unit that ran without records, and the next record then.
        kept_until: The next record when a module last ran without hooks.
    """

    def __init__(
        self,
        saving: Settings,
        paths: _native.ModulePaths,
        model: _native.ModelTensors,
        decisions: _native.Decisions,
        uses: _native.Uses,
    ) -> None:
        adaptive = saving.adaptive
        super().__init__(
            saving.min_bytes,
            adaptive is not None and adaptive.by_sample,
            not saving.is_uniform,
            saving.decides_by_kind,
            saving.adapts,
            saving.counter,
            paths,
            model,
            decisions,
            uses,
            _native.Records(Record),
        )
        self.saving = saving
        self._paths = paths
        self._queue = Queue()
        self.announced = ("", 0)
        self.kept_until = 0
        self._recent = Recent(self._keep_divided, self._keep_sides) if self.is_first else None
        self._is_looked_at = False

    def look_at(self, results: object) -> None:
        """Find what backward divides by in the graph of results, while it can be kept exact."""
        if self._recent is not None:
            self._is_looked_at = True
            for tensor in tensors_in(results):
                self._recent.look(tensor)

    def forget(self) -> None:
        """Release what only the forward pass needs.

        If nobody has said what the results are, backward decides about the last tensors.
        """
        if self._recent is not None:
            (self._recent.close if self._is_looked_at else self._recent.leave_to_backward)()
        self._recent = None
        super().forget()

    def encode(
        self,
        tensor: Tensor,
        bits: int | Tensor,
        capacity: int | None = None,
        bounds: codec.Bounds = codec.UNBOUNDED,
        group: int | None = None,
    ) -> codec.Codes:
        """Encode a tensor with noise of its own; the rest as for the codec."""
        saving, key = self.saving, self.key(tensor.device)
        return codec.encode(
            tensor,
            bits,
            key,
            group=saving.group if group is None else group,
            stochastic=saving.stochastic,
            capacity=capacity,
            bounds=bounds,
        )

    def key(self, device: torch.device) -> codec.Key:
        """Return what makes the noise of the next tensor independent."""
        return codec.Key(self.saving.noise_state(device), self._next())

    def claim(
        self, codes: Tensor, reason: str, instead_of: Tensor, bits: int | None = None
    ) -> Tensor:
        """Say that a tensor is saved instead of one that torch would save; return the first."""
        self._claim(codes, reason, instead_of, KEEP if bits is None else Choice("compress", bits))
        return codes

    def promise(
        self,
        tensor: Tensor,
        instead_of: Tensor,
        y: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        """Say that a tensor is saved, and rounded, instead of one that torch would save.

        Args:
            tensor: The tensor, dense.
            instead_of: The tensor that torch would save.
            y: tensor x weight + bias: nothing more is held for it if it is saved, too. Or None.
            weight: For the last dimensions, or None.
            bias: For the last dimensions, or None.
        """
        same = [y is not None and (p is None or p.dtype == y.dtype) for p in (weight, bias)]
        made = None
        if y is not None and y.stride() == tensor.stride() and is_dense(y) and all(same):
            made = y
        scale = None if made is None else Scale.of(weight, bias)
        self._promise(tensor, instead_of, op_of(instead_of), KEEP, made, scale)

    def note(self, tensor: Tensor, reason: str) -> None:
        """Record a tensor that torch would have saved, of which nothing is held."""
        self._note(reason, tensor, KEEP)

    def bits_for(self, tensor: Tensor) -> int | None:
        """Return the bits for what the running module saves instead of a tensor.

        Returns:
            1 to 8; None if it is to be held as it is or moved to host memory.
        """
        path = self._paths.current()[0]
        choice = self._choice(tensor, path, op_of(tensor))
        if choice.action != "compress" or choice.bits == LOSSLESS:
            return None
        adaptive = self.saving.adaptive if choice.bits == self.saving.bits else None
        own = None if adaptive is None else adaptive.bits_of_derivative(path, tensor.numel())
        return max(choice.bits or self.saving.bits, _floor(self.saving)) if own is None else own

    def divides_by(self, module: nn.Module, x: Tensor) -> bool:
        """Whether backward divides by the result of an activation, and no choice names it."""
        if module not in self.saving.divided:
            return False
        return self._choice(x, self._paths.current()[0], op_of(x), exact=True).action != "compress"

    def watch_slope(self, result: Tensor, slope: Slope) -> None:
        """Find out whether backward divides by the result of an activation."""
        if self._recent is not None:
            records = range(len(self.records) - 1, -1, -1)
            claimed = (i for i in records if self.records[i].reason == SLOPES)
            self._recent.add(result, slope, next(claimed), None)

    def rounds(self, tensor: Tensor) -> bool:
        """Whether a tensor that the running module saves is rounded, wherever it is held."""
        choice = self._choice(tensor, self._path(), op_of(tensor))
        return choice.action in ("compress", "offload") and choice.bits not in (None, LOSSLESS)

    def _path(self) -> str:
        return "" if self.saving.is_uniform else self._paths.current()[0]

    def _choice(self, tensor: Tensor, path: str, op: str, exact: bool = False) -> Choice:
        saving = self.saving
        if saving.is_uniform and not exact and op != CHECKPOINT:
            choice = saving.default
        else:
            index = len(self.records)
            info = TensorInfo(path, op, index, tensor.shape, tensor.dtype, tensor.nbytes)
            choice = saving.exact(info) if exact else saving.choice(info)
        if choice.action == "offload" and not can_leave(tensor):  # it is in host memory already
            return KEEP if choice.bits in (None, LOSSLESS) else Choice("compress", choice.bits)
        return choice

    # What native code calls. It may be called from frames that torch.compile looks at.

    @uncompiled
    def _decide(
        self,
        tensor: Tensor,
        part: Tensor,
        path: str,
        op: str | None,
        boundary: bool,
        exact: str | None,
        module: nn.Module | None,
    ) -> tuple[int, Choice, str, Any, int, bool]:
        """Decide about tensors that may be compressed.

        Args:
            tensor: One of them.
            part: The tensor that is saved, if it is a view of the one that is held.
            path: Path of the module that saves it.
            op: Name of the node that made it, if it is saved instead of another tensor, as norms
                do; else None.
            boundary: Whether it is an input of torch.utils.checkpoint.
            exact: Why it is not to be rounded unless a choice names it; None if it may be.
            module: The innermost module that is being called.

        Returns:
            See `Decision` in saving/native/step.hpp.
        """
        norm = op is not None or is_norm(module)
        op = CHECKPOINT if boundary else op_of(tensor) if op is None else op
        choice = self._choice(tensor, path, op, exact is not None)
        bits = choice.bits
        if choice.action == "keep" or (choice.action == "compress" and bits == LOSSLESS):
            why = INPUT if boundary and choice == KEEP else "kept"
            return _KEEP, choice, exact or why, None, 0, False
        least = self._least(part, op, boundary, bits or 0)
        adapts = self.saving.adapts and bits == self.saving.bits and least == 1
        by_sample = adapts and self.saving.adaptive is not None and self.saving.adaptive.by_sample
        if (
            choice.action != "compress"
            or bits is None
            or tensor.dtype == torch.float64
            or by_sample
        ):
            return _OTHER, choice, "", None, 0, False
        bits = self._equal_bits(bits, least, norm)
        bounds = bounds_of(op_of(tensor), tensor.dtype)
        action = _ADAPT if adapts else _ENCODE
        return action, _CODES[bits], "", bounds, bits, op == RELU

    @uncompiled
    def _adapt(
        self, tensor: Tensor, path: str, module: nn.Module | None, instead: bool
    ) -> tuple[int, Choice]:
        """Return the bits that a tensor gets by itself, and the choice."""
        norm = instead or is_norm(module)
        each = self._own_bits(tensor, path, norm)
        if each is not None and isinstance(each.bits, int):
            return each.bits, _CODES[each.bits]
        bits = self._equal_bits(self.saving.bits, 1, norm)
        return bits, _CODES[bits]

    def _own_bits(self, tensor: Tensor, path: str, norm: bool) -> Bits | None:
        """Return what the allocator gives a tensor; None if it has no bits of its own."""
        adaptive = self.saving.adaptive
        if adaptive is None or not is_dense(tensor):
            return None
        return adaptive.bits_of(path, tensor, len(self.records), norm=norm)

    def _equal_bits(self, bits: int, least: int, norm: bool) -> int:
        """Return the bits of a tensor that has none of its own."""
        return max(bits, least, NORM_BITS if norm else 1, _floor(self.saving))

    def _group(self, tensor: Tensor) -> int:
        """Return the elements of a group of a tensor with equal bits."""
        return group_of(tensor, self.saving.group, op_of(tensor) == CONVOLUTION)

    def _least(self, part: Tensor, op: str, boundary: bool, bits: int) -> int:
        return least_bits(part, op if boundary else op_of(part), bits)

    @uncompiled
    def _coder(
        self, tensor: Tensor, bits: int, bounds: codec.Bounds
    ) -> tuple[Callable[..., Any], Callable[..., Any], torch.Size, tuple[int, ...], int, int]:
        """Return how tensors like one are encoded: see `Coder` in saving/native/step.hpp."""
        group = self._group(tensor)
        found = codec.coder_of(tensor, bits, group, self.saving.stochastic, bounds)
        for function in found.frames:
            uncompiled(function)
        n = tensor.numel()
        sizes = codec.bytes_of(n, bits, group), -(-n // group)
        return found.encode, found.decode, found.shape, found.strides, *sizes

    @uncompiled
    def _hold(
        self,
        tensor: Tensor,
        part: Tensor,
        path: str,
        op: str,
        boundary: bool,
        exact: str | None,
        module: nn.Module | None,
        instead: bool,
    ) -> tuple[Held | None, str, Choice]:
        """Hold a tensor in host memory, or in bits of its own. Return it, why, and the choice."""
        saving = self.saving
        choice = self._choice(tensor, path, op, exact is not None)
        bits, codes = choice.bits, None
        if bits is not None and bits != LOSSLESS:
            bounds = bounds_of(op_of(tensor), tensor.dtype)
            if not codec.fits(tensor, saving.group, small=bounds == codec.UNBOUNDED):
                return None, BEYOND, KEEP
            least = self._least(part, op, boundary, bits)
            norm = instead or is_norm(module)
            moves = bits == saving.bits and least == 1
            each = self._own_bits(tensor, path, norm) if moves else None
            bits = self._equal_bits(bits, least, norm)
            if each is None:
                codes = self.encode(tensor, bits, bounds=bounds, group=self._group(tensor))
            else:
                bits = saving.bits if isinstance(each.bits, Tensor) else each.bits
                codes = self.encode(each.rows, each.bits, each.capacity)
        positive = None
        if codes is not None and op == RELU and is_dense(tensor):
            positive = positive_mask(tensor.detach())
        choice = choice if bits == choice.bits else Choice(choice.action, bits)
        if codes is None or choice.action == "offload":
            held = Offloaded(codes or tensor, self._queue, positive)
            saving.watch(held)
            return held, "in host memory", choice
        return self._compressed(codes, positive), "compressed", choice

    def _compressed(self, codes: codec.Codes, positive: Tensor | None) -> Compressed:
        held = codes.nbytes + (0 if positive is None else positive.nbytes)
        layout = (codes.shape, codes.strides, codes.dtype)
        decode = uncompiled(codec.decoder_of(codes))
        counter = self.saving.counter
        found, groups = (codes.data, codes.params), len(codes.params)
        return Compressed(found, decode, positive, *layout, held, groups, counter)

    @uncompiled
    def _look_back(self, result: Tensor, is_new: bool) -> Again | None:
        """Hold what an operation has saved as its backward needs it; its result is saved last.

        Args:
            result: The result.
            is_new: Whether nothing else has saved a part of its storage.

        Returns:
            How the result is held; None if as others.
        """
        if op_of(result) in REPEATED:
            return self._repeat(result) if is_new else None
        if op_of(result) in STATISTICS and result.output_nr:
            self.keep_exact(result, STATISTIC)
        if is_compared(result):
            self._keep_compared(result)
        return None

    def _repeat(self, result: Tensor) -> Again | None:
        """Let attention run again in backward if its operands are rounded."""
        rounded = any(True for _ in operands_of(result, self._operands()))
        sums, node = self._last_kept(), result.grad_fn
        if not rounded or sums is None or not saves_sums(node, sums.tensor):
            return None  # as if attention ran where no hook sees it, and another node saves it
        again = Again()
        sums.replace(again.sums)
        if not self.saving.adapts:  # else their bits are measured
            for packed, tensor, index in operands_of(result, self._operands(), first=2):
                self._refine(packed, tensor, index)
        return None if drops(node) else again

    def _refine(self, packed: Any, tensor: Tensor, index: int) -> None:
        """Give queries or keys their bits; when they were saved, nobody knew what they are."""
        record = self.records[index]
        choice = self._choice(tensor, record.module, record.op)
        if choice.action != "compress" or not choice.bits or not record.choice.bits:
            return
        bits = attention_bits(choice.bits)
        if record.choice.bits >= bits:
            return
        codes = self.encode(tensor, bits)
        held = self._compressed(codes, None)
        packed.keep(held)
        self.records.change(index, held.held, record.reason, _CODES[bits])

    def _keep_compared(self, result: Tensor) -> None:
        """Hold a result, and the operands that were saved with it, without rounding."""
        self._compare(result)
        for packed, tensor, index in operands_of(result, self._operands()):
            base = tensor if tensor._base is None else tensor._base
            kept: Kept = self._keep_operand(tensor, base.nbytes)
            packed.keep(kept)
            self.records.change(index, kept.held, COMPARED, KEEP)

    @uncompiled
    def _remember(self, tensor: Tensor, packed: Any, record: int) -> None:
        if self._recent is not None:
            self._recent.add(tensor, packed, record, self.records[record].choice.bits)

    def _keep_divided(self, saved: Saved, reason: str = DIVIDED) -> None:
        """Hold a tensor by which backward divides without rounding, unless a choice names it."""
        packed, record = saved.packed(), self.records[saved.record]
        if packed is None or isinstance(packed, Kept):
            return
        shape, dtype = record.shape, record.dtype
        info = TensorInfo(record.module, record.op, saved.record, shape, dtype, record.nbytes)
        choice = self.saving.exact(info)
        if choice.action == "compress":
            return
        tensor = saved.tensor
        if isinstance(packed, Slope):
            if packed.source is None:
                return
            tensor = packed.source
        held: Held
        if choice.action == "offload" and can_leave(tensor):
            held = Offloaded(tensor.detach(), self._queue, None)
            self.saving.watch(held)
        else:
            base = tensor if tensor._base is None else tensor._base
            held, choice = self._keep_operand(tensor, base.nbytes), KEEP
        if reason == DIVIDED and isinstance(packed, (Compressed, View, Slope)):
            packed.divided()
        packed.keep(held)
        self.records.change(saved.record, held.held, reason, choice)

    def _keep_sides(self, intervals: Intervals, saved: Saved) -> None:
        """Hold a tensor that backward compares; if with bounds, later ones have sides instead."""
        packed = saved.packed()
        if isinstance(packed, (Compressed, View)):
            packed.compares(intervals)
            self._keep_divided(saved, COMPARED_WITH if intervals else COMPARED)

    @uncompiled
    def _may_share(self, record: int, tensor: Tensor, path: str) -> bool:
        """Return whether what another tensor holds will do for an input of a checkpoint."""
        held, choice = self.records[record].choice, self._choice(tensor, path, CHECKPOINT)
        return (held.bits or LOSSLESS) >= max(CHOSEN_BITS, choice.bits or LOSSLESS)

    @uncompiled
    def _share(self, record: int, path: str) -> None:
        if self.saving.adaptive is not None:
            self.saving.adaptive.share(record, path)

    _scaled = staticmethod(Scaled)
    _whole = staticmethod(uncompiled(whole_of))
    _weight_reason = staticmethod(uncompiled(weight_reason))
    _positive = staticmethod(uncompiled(positive_mask))
    _sides = staticmethod(uncompiled(sides_of))

    @uncompiled
    def _noise_state(self, device: torch.device) -> Tensor:
        return self.saving.noise_state(device)


def _floor(saving: Settings) -> int:
    """Return the fewest bits of tensors that have no bits of their own."""
    return 1 if saving.adaptive is None else saving.adaptive.floor
