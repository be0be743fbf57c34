"""One forward pass: the tensors that it saves, each storage once."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from actnn import codec
from actnn.saving.bit_masks import positive_mask
from actnn.saving.comparisons import COMPARED, Operands, is_compared
from actnn.saving.dense import is_dense, whole_of
from actnn.saving.exclusions import (
    CHECKPOINT,
    NONLINEAR_BITS,
    RELU,
    alive_anyway,
    is_attention,
    is_attribute,
    least_bits,
    op_of,
    reason_to_keep,
)
from actnn.saving.held import Compressed, Held, Kept, View
from actnn.saving.module_paths import ModulePaths
from actnn.saving.norms import NORM_BITS, is_norm
from actnn.saving.offload import Offloaded, Queue, can_leave
from actnn.saving.records import KEEP, LOSSLESS, Choice, Record, TensorInfo
from actnn.saving.scaled import Promised, Scale, Seen
from actnn.saving.settings import Settings


class _Claim(NamedTuple):
    """What a layer says of a tensor of codes that it is about to save."""

    reason: str
    instead_of: Tensor
    choice: Choice
    op: str = ""  # that made it
    promised: Promised | None = None  # the tensor that will be made from the codes


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


class Step:
    """The saved tensors of one forward pass in one thread.

    Args:
        saving: The settings.
        known: Address of a storage -> why it is alive anyway.
        paths: Paths of the modules.
    """

    def __init__(self, saving: Settings, known: dict[int, str], paths: ModulePaths) -> None:
        self.known = known
        self.records: list[Record] = []
        self.saving = saving
        self._paths = paths
        self._count = 0
        self._seen: dict[tuple[object, ...], Seen] = {}
        self._claims: dict[int, _Claim] = {}
        self._normalized: dict[int, _Claim] = {}
        self._exact: dict[int, str] = {}
        self._compared: dict[int, StorageWeakRef] = {}  # so that no address is used again
        self._operands = Operands()
        self._replaced: dict[int, tuple[Record, StorageWeakRef]] = {}
        self._queue = Queue()
        self.opaque: Opaque | None = None  # the compiled module that is running
        self.kept_until = 0  # the next record when a module last ran without hooks

    def forget(self) -> None:
        """Release what only the forward pass needs."""
        self._seen.clear()
        self._claims.clear()
        self._normalized.clear()
        self._exact.clear()
        self._compared.clear()
        self._operands = Operands()
        self._replaced.clear()
        self.known = {}

    def encode(
        self, tensor: Tensor, bits: int | Tensor, capacity: int | None = None
    ) -> codec.Codes:
        """Encode a tensor with noise of its own; bits and capacity as for the codec."""
        saving, key = self.saving, self.key(tensor.device)
        return codec.encode(
            tensor,
            bits,
            key,
            group=saving.group,
            stochastic=saving.stochastic,
            capacity=capacity,
        )

    def key(self, device: torch.device) -> codec.Key:
        """Return what makes the noise of the next tensor independent."""
        self._count += 1
        return codec.Key(self.saving.noise_state(device), self._count - 1)

    def claim(
        self, codes: Tensor, reason: str, instead_of: Tensor, bits: int | None = None
    ) -> Tensor:
        """Say that a tensor is saved instead of one that torch would save; return the first."""
        choice = KEEP if bits is None else Choice("compress", bits)
        claim = _Claim(reason, instead_of.detach(), choice)
        self._claims[codes.untyped_storage()._cdata] = claim
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
        promised = None
        same = [y is not None and (p is None or p.dtype == y.dtype) for p in (weight, bias)]
        if y is not None and y.stride() == tensor.stride() and is_dense(y) and all(same):
            storage = y.untyped_storage()
            key = (storage._cdata, y.storage_offset(), y.numel(), y.dtype, y._version)
            promised = Promised(key, StorageWeakRef(storage), Scale.of(weight, bias))
        op = op_of(instead_of)
        claim = _Claim("normalized input", instead_of, KEEP, op, promised)
        self._normalized[tensor.untyped_storage()._cdata] = claim

    def keep_exact(self, tensor: Tensor, reason: str) -> None:
        """Say that a tensor is about to be saved, and is rounded only if a choice names it."""
        self._exact[tensor.untyped_storage()._cdata] = reason

    def note(self, tensor: Tensor, reason: str) -> None:
        """Record a tensor that torch would have saved, of which nothing is held."""
        self._record_instead(_Claim(reason, tensor, KEEP), 0)

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

    def rounds(self, tensor: Tensor) -> bool:
        """Whether a tensor that the running module saves is rounded, wherever it is held."""
        path = "" if self.saving.is_uniform else self._paths.current()[0]
        choice = self._choice(tensor, path, op_of(tensor))
        return choice.action in ("compress", "offload") and choice.bits not in (None, LOSSLESS)

    def _choice(self, tensor: Tensor, path: str, op: str, exact: bool = False) -> Choice:
        saving = self.saving
        if saving.is_uniform and not exact:
            choice = saving.default
        else:
            index = len(self.records)
            info = TensorInfo(path, op, index, tensor.shape, tensor.dtype, tensor.nbytes)
            choice = saving.exact(info) if exact else saving.choice(info)
        if choice.action == "offload" and not can_leave(tensor):  # it is in host memory already
            return KEEP if choice.bits in (None, LOSSLESS) else Choice("compress", choice.bits)
        return choice

    def pack(self, tensor: Tensor) -> Held | View:
        """Return a tensor in the form in which it is held for backward."""
        kind = type(tensor)
        plain = (kind is Tensor or kind is nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_neg() or tensor.is_conj():
            return self._keep(tensor, "tensor subclass", 0)
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # inside of a transform of torch.func
            return self._keep(tensor, "tensor subclass", 0)
        address = storage._cdata
        if address in self.known:  # alive anyway, so that nothing is to be shared
            return self._keep(tensor, reason_to_keep(tensor, self.known, address) or "", 0)
        whole = whole_of(tensor)
        dense = whole is not None
        if whole is None:
            whole = tensor
        layout = whole.numel() if dense else (tensor.shape, tensor.stride())
        key = (address, whole.storage_offset(), layout, tensor.dtype, tensor._version)
        seen = self._seen.get(key)
        held = None if seen is None else seen.held()
        if address in self._exact and isinstance(held, Compressed):
            held = None
        if seen is not None and held is not None:
            path, boundary, _ = self._paths.current()
            bits = self.records[seen.record].choice.bits
            if not boundary or bits is None or bits >= NONLINEAR_BITS:
                self._record(tensor, seen.nbytes, 0, f"shared with {seen.record}", path=path)
                if self.saving.adaptive is not None:
                    self.saving.adaptive.share(seen.record, path)
                if isinstance(held, Compressed):
                    held.saves += 1
                if seen.nbytes:
                    self._seen[key] = seen._replace(nbytes=0)
                packed = View(held, tensor, whole) if dense else held
                self._operands.add(tensor, packed, len(self.records) - 1)
                return packed
        claim = self._claims.pop(address, None)
        if claim is not None:
            return self._keep_claimed(tensor, claim)
        replaced = self._replaced.pop(address, None)
        if replaced is not None:  # torch would have held this storage for both
            replaced[0].nbytes = 0
        index, instead = len(self.records), self._normalized.pop(address, None)
        if seen is None and is_compared(tensor):
            self._keep_compared(tensor)
        held = self._hold(whole, address, tensor, instead)
        if seen is not None and seen.operand() is not None:  # torch would have held it once
            self.records[index].nbytes = seen.nbytes
        self._seen[key] = Seen(weakref.ref(held), StorageWeakRef(storage), index)
        if instead is not None and instead.promised is not None:
            name, made, scale = instead.promised
            self._seen[name] = Seen(weakref.ref(held), made, index, scale, tensor.nbytes)
        # Bits per sample need one row for each sample, so that the codes may have another shape.
        adaptive = self.saving.adaptive
        by_sample = adaptive is not None and adaptive.by_sample
        other = whole is not tensor or (dense and by_sample)
        packed = View(held, tensor, whole) if other else held
        self._operands.add(tensor, packed, index)
        return packed

    def _keep_compared(self, result: Tensor) -> None:
        """Hold a result, and the operands that were saved with it, without rounding."""
        storage = result.untyped_storage()
        self._compared[storage._cdata] = StorageWeakRef(storage)
        for index, kept in self._operands.keep(result):
            self.saving.watch(kept)
            record = self.records[index]
            record.held, record.reason, record.choice = kept.held, COMPARED, KEEP

    def _hold(
        self, tensor: Tensor, address: int, part: Tensor, instead: _Claim | None = None
    ) -> Held:
        saving = self.saving
        reason = None if instead else reason_to_keep(tensor, self.known, address)
        if reason == "without gradient" and self.opaque and self.opaque.is_activation(tensor):
            reason = None
        if reason is None and address in self._compared:
            reason = COMPARED
        if reason is not None:
            return self._keep(tensor, reason, 0 if alive_anyway(reason) else tensor.nbytes)
        if tensor.nbytes < saving.min_bytes:
            return self._keep(tensor, "small", tensor.nbytes)
        path, boundary, module = self._paths.current()
        if is_attribute(tensor, module):
            return self._keep(tensor, "attribute of its module", 0)
        op = instead.op if instead else op_of(tensor)
        if boundary:
            op = CHECKPOINT
        exact = self._exact.get(address)
        choice = self._choice(tensor, path, op, exact is not None)
        bits = choice.bits
        if choice.action == "keep" or (choice.action == "compress" and bits == LOSSLESS):
            return self._keep(tensor, exact or "kept", tensor.nbytes, choice, path, op)
        codes = None
        if bits is not None and bits != LOSSLESS:
            least = least_bits(part, op if boundary else op_of(part))
            adaptive = saving.adaptive if bits == saving.bits and least == 1 else None
            norm, each = instead is not None or is_norm(module), None
            if adaptive is not None and is_dense(tensor):
                each = adaptive.bits_of(path, tensor, len(self.records), norm=norm)
            bits = max(bits, least, NORM_BITS if norm else 1, _floor(saving))
            if each is None:
                codes = self.encode(tensor, bits)
            else:
                bits = saving.bits if isinstance(each.bits, Tensor) else each.bits
                codes = self.encode(each.rows, each.bits, each.capacity)
        positive = None
        if codes is not None and op == RELU and is_dense(tensor):
            positive = positive_mask(tensor.detach())
        held: Held
        if codes is None or choice.action == "offload":
            held, reason = Offloaded(codes or tensor, self._queue, positive), "in host memory"
        else:
            held, reason = Compressed(codes, positive, is_attention(op)), "compressed"
        if bits != choice.bits:
            choice = Choice(choice.action, bits)
        if instead is None:
            self._record(tensor, tensor.nbytes, held.held, reason, choice, path, op)
        else:
            self._record_instead(instead._replace(choice=choice), held.held)
        saving.watch(held)
        return held

    def _keep(
        self,
        tensor: Tensor,
        reason: str,
        nbytes: int,
        choice: Choice = KEEP,
        path: str | None = None,
        op: str = "",
    ) -> Kept:
        if 0 < nbytes < self.saving.min_bytes and tensor.untyped_storage().nbytes() > 2 * nbytes:
            tensor = tensor.detach().clone()  # a part of a larger storage: the rest may go
        kept = Kept(tensor, nbytes)
        self._record(tensor, nbytes, nbytes, reason, choice, path, op)
        if nbytes:
            self.saving.watch(kept)
        return kept

    def _keep_claimed(self, tensor: Tensor, claim: _Claim) -> Kept:
        kept = Kept(tensor, tensor.nbytes)
        self._record_instead(claim, kept.held)
        self.saving.watch(kept)
        return kept

    def _record_instead(self, claim: _Claim, held: int) -> None:
        """Record what is held instead of a tensor whose storage torch would hold, once."""
        tensor = claim.instead_of
        storage = tensor.untyped_storage()
        nbytes = 0 if storage._cdata in self._replaced else tensor.nbytes
        self._record(tensor, nbytes, held, claim.reason, claim.choice)
        if nbytes:
            self._replaced[storage._cdata] = (self.records[-1], StorageWeakRef(storage))

    def _record(
        self,
        tensor: Tensor,
        nbytes: int,
        held: int,
        reason: str,
        choice: Choice = KEEP,
        path: str | None = None,
        op: str = "",
    ) -> None:
        if path is None:
            path = self._paths.current()[0]
        index = len(self.records)
        record = Record(index, path, tensor.shape, tensor.dtype, nbytes, held, reason, choice, op)
        self.records.append(record)


def _floor(saving: Settings) -> int:
    """Return the fewest bits of tensors that have no bits of their own."""
    return 1 if saving.adaptive is None else saving.adaptive.floor
