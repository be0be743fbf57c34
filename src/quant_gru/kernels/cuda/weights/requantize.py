"""Rewrite a weight part and all data derived from it on a GPU, in two or three launches."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.call_form import FLOATS
from quant_gru.integer.plan import FrozenPart, WeightPart
from quant_gru.integer.qparams import QParams
from quant_gru.integer.quantizer import code_limits
from quant_gru.kernel_runtime.cuda.driver import Device, Prepared
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernels.cpu.plan_packing import pack_target
from quant_gru.kernels.cuda import machine as machines
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.plan.tensors import CHANGES, Numbers, kept_numbers
from quant_gru.kernels.cuda.structs import KINDS, WeightsC

Given = tuple[tuple[int, torch.dtype | None], ...]
"""Address and dtype of W, R, bw and br in memory; (0, None) for a bias that is absent."""

_THREADS = 256
# what the arguments share with those of an update on a CPU
_TARGET = (
    "bits b_bits codes b_codes scales b_scales B M k operand_scale result_scale b_unit".split()
)
_TARGET += "limit significant factors term_limit unit_exponent".split()
_ROW_SCALES = Kernel.of("weights/row_scales", "row_scales", PLAIN)
_CORRECT = Kernel.of("weights/correct_bias", "correct_bias", PLAIN)
_REQUANTIZE = Kernel.of("weights/requantize", "requantize_weights", PLAIN)


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
        self._arguments: Any = WeightsC()
        self._arguments.H = rows // 3
        self._arguments.finite = part.finite.data_ptr()
        self._arguments.free = qparams.config.scale_kind == "free"
        for which in range(2):
            self._fill(which, qparams, frozen)
        self._corrects = qparams.input_mean is not None
        self._seen: tuple[Numbers | None, int] = (None, 0)
        # the weights that the arguments currently point to
        self._given: Given = ((0, None),) * 4
        self._drops = False
        # whether there is derived data that the launches do not rewrite
        self._more = False
        self._launch: Prepared | None = None

    def _fill(self, which: int, qparams: QParams, frozen: FrozenPart) -> None:
        c, part = self._arguments.operands[which], self._part
        target = pack_target(which, qparams, frozen, part)
        for name in _TARGET:
            setattr(c, name, target[name])
        c.K = target["n"]
        c.w_scale, c.b_scale = (self._space[2 * which + i].data_ptr() for i in range(2))
        codes = ((part.W, part.bw), (part.R, part.br))[which]
        c.kind, c.b_kind = (KINDS[each.dtype] for each in codes)
        c.lo, c.hi = code_limits(c.bits, signed=True)
        c.b_lo, c.b_hi = code_limits(c.b_bits, signed=True)
        if target["factors"]:
            self._bias = torch.empty(len(codes[0]), dtype=torch.float32, device=part.W.device)
            c.corrected = self._bias.data_ptr()

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
        arguments = self._arguments
        if dropped is not None:
            dropped = dropped.to(self._part.R.device, torch.bool).contiguous()
            arguments.operands[1].dropped = dropped.data_ptr()
            arguments.keep = 1.0 - p
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
            self._arguments.operands[1].dropped = None
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
            for i, each in enumerate(given):
                self._set(i, *each)
        numbers = kept_numbers(self._part)
        if numbers is not None:
            native = numbers.arrays.native
            if self._seen != (numbers, native.count):
                self._seen = (numbers, native.count)
                CHANGES.count += 1
                # the arrays that kernels derive from the part
                self._more = not native.add_to(ctypes.addressof(self._arguments))
        if self._launch is None:
            blocks = -(-3 * self._arguments.H // (_THREADS // 32))
            kernels = [(_ROW_SCALES, 2), (_REQUANTIZE, 2)]
            if self._corrects:
                kernels.insert(1, (_CORRECT, 1))
            self._launch = self._machine.join(
                [
                    self._machine.prepare(each, Grid((blocks, both), _THREADS), self._arguments)
                    for each, both in kernels
                ]
            )
        self._launch.start(self._machine.stream())
        if numbers is not None and self._more:
            numbers.arrays.refresh()

    def _set(self, index: int, address: int, dtype: torch.dtype | None) -> None:
        """Point the arguments to W, R, bw or br, by index."""
        c, real = self._arguments.operands[index % 2], 0 if dtype is None else FLOATS[dtype]
        if index < 2:
            c.w, c.w_real = address, real
        else:
            c.b, c.b_real = address, real
