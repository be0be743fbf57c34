"""Weights in training: every forward updates the weight part of a plan in place."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import (
    CellPlan,
    FrozenPart,
    GRUPlan,
    WeightPart,
    build_weights,
    matmul_sum,
)
from quant_gru.integer.qparams import QParams
from quant_gru.integer.quantizer import Quantizer, code_limits, container_dtype
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernel_runtime.cuda import driver
from quant_gru.kernel_runtime.cuda.driver import Device, Prepared
from quant_gru.kernel_runtime.cuda.graph_capture import capturing, on
from quant_gru.kernels import _native
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.cpu.requantize_weights import Writer as OnCPU
from quant_gru.kernels.cuda.plan.tensors import CHANGES, kept_numbers
from quant_gru.kernels.cuda.weights.requantize import Given
from quant_gru.kernels.cuda.weights.requantize import Writer as OnGPU

_MATRIX_BITS = 16
WEIGHTS = ("weight.W", "weight.R", "weight.bw", "weight.br")
_WEIGHTS = ("W", "R", "bw", "br")


class Writer(Protocol):
    """Rewrites the tensors of a weight part."""

    def takes(self, *values: Tensor | None) -> bool:
        """Return whether the writer can read these weights."""
        ...

    def write(
        self,
        matrices: tuple[Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        dropped: Tensor | None,
        p: float,
    ) -> bool:
        """Rewrite the part. Return whether anything had to be written."""
        ...

    def forget(self) -> None:
        """Make the next `write` unconditional, because other code has written the part."""
        ...


class LiveWeights:
    """A weight part that is updated in place: its tensors keep their addresses.

    An update also updates all data that executors derived from the part. Prepared launches,
    captured graphs and packed layers therefore stay valid. A reader of the part always reads the
    latest update. Only one thread may use the part at a time. On a GPU, only one stream may use it
    at a time: an update waits for the stream of the previous update. `epoch` does not count
    updates in the replay of a captured graph.

    Args:
        qparams: Quantizers, widths and granularities.
        frozen: The frozen part of the same cell.
        W: (3H, C), for its shape and device.
        R: (3H, H).
        machine: The GPU that runs the CUDA kernels; None for the weights' GPU.

    Attributes:
        qparams: As given.
        frozen: As given.
        part: The weight part. The object and its tensors never change identity. Its numbers are
            undefined before the first update.
        epoch: The number of updates so far.
        captured: Whether an update was captured in a CUDA graph, whose replays write the part.
        lock: Held by an update. A signal handler may find it held by its own thread.
    """

    def __init__(
        self,
        qparams: QParams,
        frozen: FrozenPart,
        W: Tensor,
        R: Tensor,
        machine: Device | None = None,
    ) -> None:
        self.qparams, self.frozen = qparams, frozen
        self.epoch = 0
        self.captured = False
        self.lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream: int | None = None
        self._index = W.device.index if W.device.type == "cuda" else None
        # torch refuses in-place changes of inference-mode tensors outside of inference mode
        with torch.inference_mode(False):
            self.part = _empty_part(qparams, frozen, W, R)
            self._writer = self._choose(machine)
        self._shapes = {name: tuple(getattr(self.part, name).shape) for name in _WEIGHTS}
        _live[self.part] = weakref.ref(self)

    def _choose(self, machine: Device | None) -> Writer | None:
        """Return a writer that is faster than `build_weights`; None if there is none."""
        device, config = self.part.W.device, self.qparams.config
        if (
            self.qparams.pinned.keys() & set(WEIGHTS)
            # the product of the offset with the codes is only in `build_weights`
            or self.qparams.quantizers["input.x"].is_outside
            or {config.operators[name].granularity for name in WEIGHTS} - {"channel", None}
            or max(self.part.bits_W, self.part.bits_R) > _MATRIX_BITS
        ):
            return None
        if machine is not None or driver.available(device):
            return OnGPU(self.qparams, self.frozen, self.part, machine)
        if device.type == "cpu" and (variant := cpu.chosen()) != cpu.REFERENCE:
            return OnCPU(self.qparams, self.frozen, self.part, variant)
        return None

    def writes(self, *weights: Tensor | None) -> bool:
        """Return whether native code computes an update from these weights."""
        return self._writer is not None and self._writer.takes(*weights)

    def update(
        self,
        W: Tensor,
        R: Tensor,
        bw: Tensor | None,
        br: Tensor | None,
        dropped: Tensor | None = None,
        p: float = 0.0,
    ) -> None:
        """Rewrite the part with the result of `build_weights` for the same arguments.

        On a GPU, the update does not synchronize with the host, and CUDA graphs can capture it.

        Args:
            W: (3H, C), rows in the order reset, update, candidate.
            R: (3H, H).
            bw: (3H,), or None for zeros.
            br: (3H,), or None for zeros.
            dropped: bool (3H, H), codes of R that become 0, or None.
            p: The probability that a code is dropped.
        """
        for name, given in (("W", W), ("R", R), ("bw", bw), ("br", br)):
            # kernels take raw addresses and do not check shapes
            if given is not None and given.shape != self._shapes[name]:
                raise QuantGRUError(
                    f"Expected {name} to be of shape {self._shapes[name]}, got {tuple(given.shape)}"
                )
        device = self.part.W.device
        with self.lock, on(device):
            if device.type == "cuda":
                self._follow(device)
            self._write(W, R, bw, br, dropped, p)

    def update_again(
        self, W: Tensor | None, R: Tensor | None, bw: Tensor | None, br: Tensor | None
    ) -> Callable[[], None]:
        """Return a function that repeats `update` while the weights stay at the same addresses.

        An earlier update must have accepted these weights.

        Args:
            W: (3H, C).
            R: (3H, H).
            bw: (3H,), or None for zeros.
            br: (3H,), or None for zeros.
        """
        assert W is not None
        assert R is not None
        given = (W, R, bw, br)
        laid_out = all(w is None or (w.is_contiguous() and not w.is_neg()) for w in given)
        if laid_out and isinstance(self._writer, OnGPU) and self._writer.takes(*given):
            return partial(self._repeat, _addresses(given))
        return partial(self.update, W, R, bw, br)

    def launch_of(self, weights: Sequence[Tensor | None]) -> Prepared | None:
        """Return launches on a GPU that repeat the last update of these weights.

        They hold until `CHANGES` counts. Return None if there are no such launches.

        Args:
            weights: W, R, bw, br.
        """
        writer = self._writer
        return writer.launch_of(_addresses(weights)) if isinstance(writer, OnGPU) else None

    def native_writer(self) -> tuple[_native.Weights, dict[str, _native.Layer]] | None:
        """Return the native writer on the CPU and the layers made of the part; None without one."""
        if not isinstance(self._writer, OnCPU):
            return None
        return self._writer.native, cpu.layers_of(self.frozen, self.part)

    def _repeat(self, given: Given) -> None:
        """Run `update` with weights of known shapes, dtypes and layout, without dropped codes.

        The part's device must be the current device.

        Args:
            given: Addresses of contiguous weights. Their dtypes and device must equal those of
                weights that an earlier update accepted.
        """
        writer: Any = self._writer
        with self.lock:
            self.epoch += 1
            if self._index is not None and (
                torch._C._cuda_getCurrentRawStream(self._index) != self._raw_stream
                or torch._C._cuda_isCurrentStreamCapturing()
            ):
                self._follow(self.part.W.device)
            writer.repeat(given)

    def _follow(self, device: torch.device) -> None:
        """Wait for the previous update's stream, whose kernels may still read the numbers."""
        if capturing(device):
            self.captured = True
            return
        now = torch._C._cuda_getCurrentRawStream(device.index)
        if now != self._raw_stream:
            CHANGES.count += 1
            stream = torch.cuda.current_stream(device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._raw_stream = stream, now

    def _write(
        self,
        W: Tensor,
        R: Tensor,
        bw: Tensor | None,
        br: Tensor | None,
        dropped: Tensor | None,
        p: float,
    ) -> None:
        if self._writer is not None and self.writes(W, R, bw, br):
            self.epoch += self._writer.write((W, R), (bw, br), dropped, p)
            return
        self.epoch += 1
        if self._writer is not None:
            self._writer.forget()
        # inference mode, because both normal and inference tensors may be written in it
        with torch.inference_mode():
            new = build_weights(self.qparams, W, R, bw, br, dropped, p)
            for ours, theirs in zip(tensors_of(self.part), tensors_of(new), strict=True):
                ours.copy_(theirs)
            numbers = kept_numbers(self.part)
            if numbers is not None:
                numbers.arrays.refresh()
        cpu.repack(self.part)


def quantize_weights(
    qparams: QParams,
    frozen: FrozenPart,
    W: Tensor,
    R: Tensor,
    bw: Tensor | None,
    br: Tensor | None,
) -> WeightPart:
    """Return the result of `build_weights`, computed in native code where that is possible.

    Args:
        qparams: Quantizers, widths and granularities.
        frozen: The frozen part of the same cell.
        W: (3H, C), rows in the order reset, update, candidate.
        R: (3H, H).
        bw: (3H,), or None for zeros.
        br: (3H,), or None for zeros.
    """
    # the kernels of a captured graph must already be compiled
    if not capturing(W.device):
        live = LiveWeights(qparams, frozen, W, R)
        if live.writes(W, R, bw, br):
            live.update(W, R, bw, br)
            return live.part
    return build_weights(qparams, W, R, bw, br)


_live: weakref.WeakKeyDictionary[WeightPart, weakref.ref[LiveWeights]] = weakref.WeakKeyDictionary()


def native_update(
    live: Sequence[LiveWeights], cells: Sequence[Sequence[Tensor | None]]
) -> Callable[[], None] | None:
    """Return a function that repeats `update` of all parts in one call of native code.

    Return None if native code does not read these weights.

    Args:
        live: The live parts of a plan.
        cells: W, R, bw, br of each, which an earlier update has accepted; they must stay at their
            addresses.
    """
    rows = []
    for each, given in zip(live, cells, strict=True):
        native = each.native_writer()
        if native is None or not all(map(_is_plain, given)):
            return None
        rows.append((*native, tuple([0 if w is None else w.data_ptr() for w in given])))
    run, threads = _native.LiveUpdate(rows).run, torch.get_num_threads

    def update() -> None:
        if run(threads()):
            for each in live:
                each.epoch += 1

    return update


def launched_updates(
    live: Sequence[LiveWeights], cells: Sequence[Sequence[Tensor | None]]
) -> list[Prepared] | None:
    """Return launches that repeat the last update of each part on a GPU until `CHANGES` counts.

    Return None if there are none.

    Args:
        live: The live parts of a plan.
        cells: W, R, bw, br of each.
    """
    found = [each.launch_of(weights) for each, weights in zip(live, cells, strict=True)]
    launches = [each for each in found if each is not None]
    return launches if len(launches) == len(found) else None


def _addresses(weights: Sequence[Tensor | None]) -> Given:
    return tuple((0, None) if w is None else (w.data_ptr(), w.dtype) for w in weights)


def _is_plain(w: Tensor | None) -> bool:
    return w is None or (
        w.dtype is torch.float32 and w.is_cpu and w.is_contiguous() and not w.is_neg()
    )


def live_of(part: WeightPart) -> LiveWeights | None:
    """Return the `LiveWeights` that owns a part; None if the part is not live."""
    found = _live.get(part)
    return None if found is None else found()


def all_live(plan: GRUPlan) -> tuple[LiveWeights, ...]:
    """Return the `LiveWeights` of a plan's live parts, in the order of the cells."""
    found = [live_of(cell.weights) for cells in plan.cells for cell in cells]
    return tuple([live for live in found if live is not None])


_epoch = attrgetter("epoch")


def epochs(live: Iterable[LiveWeights]) -> int:
    """Return the number of updates of all live parts of a plan."""
    return sum(map(_epoch, live))


def settled(plan: GRUPlan) -> GRUPlan:
    """Return an immutable snapshot of the plan. Live parts are copied."""
    return GRUPlan(tuple(tuple(map(_settled, cells)) for cells in plan.cells), plan.between)


def _settled(cell: CellPlan) -> CellPlan:
    part = cell.weights
    if live_of(part) is None:
        return cell
    (Mx, kx), (Mh, kh) = (
        [each.clone() for each in (*weighted_sum.multipliers, weighted_sum.shift)]  # type: ignore[union-attr]
        for weighted_sum in (part.Wx, part.Rh)
    )
    return CellPlan(
        cell.frozen,
        dataclasses.replace(
            part,
            **{name: getattr(part, name).clone() for name in ("W", "R", "bw", "br", "Bw", "Br")},
            scales={name: scale.clone() for name, scale in part.scales.items()},
            Wx=dataclasses.replace(part.Wx, multipliers=(Mx,), shift=kx),
            Rh=dataclasses.replace(part.Rh, multipliers=(Mh,), shift=kh),
            finite=part.finite.clone(),
        ),
    )


def tensors_of(part: WeightPart) -> list[Tensor]:
    """Return all tensors of a part, in a fixed order."""
    sums = [each for s in (part.Wx, part.Rh) for each in (*s.multipliers, s.shift)]
    found = [part.W, part.R, part.bw, part.br, part.Bw, part.Br, part.finite, *sums]
    return [each for each in (*found, *part.scales.values()) if isinstance(each, Tensor)]


def _empty_part(qparams: QParams, frozen: FrozenPart, W: Tensor, R: Tensor) -> WeightPart:
    """Return a part with the right shapes and dtypes. Its numbers are undefined."""
    q, rows, device = frozen.quantizers, W.shape[0], W.device
    operators = qparams.config.operators
    bits = {name: operators[name].bitwidth or 1 for name in WEIGHTS}
    sizes = {"weight.W": tuple(W.shape), "weight.R": tuple(R.shape)}

    containers = {n: container_dtype(*code_limits(n, signed=True)) for n in {*bits.values()}}

    integers = partial(torch.zeros, rows, dtype=torch.int64, device=device)

    def product(name: str, operand: Quantizer, result: str) -> tuple[WeightedSum, int]:
        K = sizes[name][1]
        M, k = integers(), integers()
        return matmul_sum(result, bits[name], K, operand, q[result], M, k, frozen.rounding)

    Wx, bound_Wx = product("weight.W", q["input.x"], "matmul.Wx")
    Rh, bound_Rh = product("weight.R", q["output.h"], "matmul.Rh")
    W_codes, R_codes, bw, br = [
        torch.zeros(sizes.get(name, (rows,)), dtype=containers[bits[name]], device=device)
        for name in WEIGHTS
    ]
    return WeightPart(
        W_codes,
        R_codes,
        bw,
        br,
        integers(),
        integers(),
        {name: torch.ones(rows, dtype=torch.float32, device=device) for name in WEIGHTS},
        Wx,
        Rh,
        bound_Wx,
        bound_Rh,
        bits["weight.W"],
        bits["weight.R"],
        torch.ones((), dtype=torch.bool, device=device),
    )
