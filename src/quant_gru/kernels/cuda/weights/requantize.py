"""Rewrite a weight part and all data derived from it on a GPU, in two or three launches."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quant_gru.integer.call_form import FLOATS
from quant_gru.integer.plan import FrozenPart, WeightPart
from quant_gru.integer.qparams import QParams
from quant_gru.kernel_runtime.cuda.driver import Device, Prepared
from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernels import _native
from quant_gru.kernels.cpu.plan_packing import pack_update
from quant_gru.kernels.cuda import machine as machines
from quant_gru.kernels.cuda.plan.structure import KINDS
from quant_gru.kernels.cuda.plan.tensors import CHANGES, Numbers, kept_numbers
from quant_gru.kernels.cuda.planned_launches import arguments_of
from quant_gru.kernels.cuda.recurrence import planner

Given = tuple[tuple[int, torch.dtype | None], ...]
"""Address and dtype of W, R, bw and br in memory; (0, None) for a bias that is absent."""


class Writer:
    """Writes the tensors of a weight part.

    Args:
        qparams: Parameters with unpinned per-channel weight scales and matrices of up to 16 bits.
        frozen: The frozen part of the same cell.
        part: The weight part that is rewritten.
        machine: The GPU that runs the kernels; None for the part's GPU.
    """

    def __init__(
        self,
        qparams: QParams,
        frozen: FrozenPart,
        part: WeightPart,
        machine: Device | None = None,
    ) -> None:
        self._machine: Device = machine or machines.machine_of(part.W.device)
        self._part = part
        rows = part.W.shape[0]
        self._space = torch.empty((4, rows), dtype=torch.float64, device=part.W.device)
        pairs = (part.W, part.bw), (part.R, part.br)
        corrects = qparams.input_mean is not None
        self._bias = torch.empty(rows * corrects, dtype=torch.float32, device=part.W.device)
        self._launches = _native.update_launches(
            pack_update(qparams, frozen, part),
            [[KINDS[codes.dtype], KINDS[bias.dtype]] for codes, bias in pairs],
            self._space.data_ptr(),
            self._bias.data_ptr(),
        )
        self._arguments = arguments_of(self._launches[0])
        self._at = ctypes.addressof(self._arguments)
        self._seen: tuple[Numbers | None, int] = (None, 0)
        # the weights that the arguments currently point to
        self._given: Given = ((0, None),) * 4
        self._drops = False
        # whether there is derived data that the launches do not rewrite
        self._more = False
        self._launch: Prepared | None = None

    def takes(self, *values: Tensor | None) -> bool:
        """Return whether the kernels can read these weights, by their dtype and device."""
        device = self._part.W.device
        for v in values:
            if v is not None and (v.dtype not in FLOATS or v.device != device):
                return False
        return True

    def write(
        self,
        matrices: tuple[Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        dropped: Tensor | None,
        p: float,
    ) -> bool:
        """Rewrite the part on the current stream.

        Args:
            matrices: W (3H, C) and R (3H, H).
            biases: bw and br (3H,), or None for zeros.
            dropped: bool (3H, H) or None; as for `build_weights`.
            p: The probability that a code was dropped.

        Returns:
            Always True: this writer does not look for unchanged weights.
        """
        keep: list[Tensor] = []
        given: list[tuple[int, torch.dtype | None]] = []
        for w in (*matrices, *biases):
            if w is None:
                given.append((0, None))
                continue
            if w.is_neg() or not w.is_contiguous():
                w = w.detach().contiguous().resolve_neg()
                keep.append(w)
            given.append((w.data_ptr(), w.dtype))
        if dropped is not None:
            dropped = dropped.to(self._part.R.device, torch.bool).contiguous()
            _native.set_dropped(self._at, dropped.data_ptr(), 1.0 - p)
            self._drops = True
            CHANGES.count += 1
            self._write(tuple(given))
        else:
            self.repeat(tuple(given))
        return True

    def forget(self) -> None:
        """Do nothing: this writer keeps no copy of the part."""

    def repeat(self, given: Given) -> None:
        """Run `write` without dropped codes, for weights of known dtypes and layout.

        Args:
            given: Addresses of contiguous weights, of dtypes that the kernels read.
        """
        if self._drops:
            _native.set_dropped(self._at, 0, 1.0)
            self._drops = False
            CHANGES.count += 1
        self._write(given)

    def launch_of(self, given: Given) -> Prepared | None:
        """Return launches that repeat the last `repeat` until `CHANGES` counts.

        Return None if that had other arguments, or if a further one has more to do.

        Args:
            given: The arguments of `repeat`.
        """
        numbers = kept_numbers(self._part)
        seen = (numbers, 0 if numbers is None else numbers.arrays.native.count)
        if self._drops or self._more or given != self._given or seen != self._seen:
            return None
        return self._launch

    def _write(self, given: Given) -> None:
        if given is not self._given and given != self._given:
            self._given = given
            CHANGES.count += 1
            for i, (address, dtype) in enumerate(given):
                real = 0 if dtype is None else FLOATS[dtype]
                _native.set_weight(self._at, i, address, real)
        numbers = kept_numbers(self._part)
        if numbers is not None:
            native = numbers.arrays.native
            if self._seen != (numbers, native.count):
                self._seen = (numbers, native.count)
                CHANGES.count += 1
                # the arrays that kernels derive from the part
                self._more = not native.add_to(self._at)
        if self._launch is None:
            prepare, grid_of, to = self._machine.prepare, planner.grid_of, self._arguments
            self._launch = self._machine.join(
                [prepare(Kernel.of(*each[:3]), grid_of(each[3]), to) for each in self._launches]
            )
        self._launch.start(self._machine.stream())
        if numbers is not None and self._more:
            numbers.arrays.refresh()
