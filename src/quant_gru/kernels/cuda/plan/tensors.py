"""A plan's numbers on its device, in the arrays that kernels read.

Native code decides on the arrays (host/derived_arrays.hpp), and a kernel derives them from the
plan's tensors, without a device sync (weights/derive.cu).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan, WeightPart
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernel_runtime.cuda.streams import made_on
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.plan.structure import KINDS, form_of, frozen_numbers, planes_of
from quant_gru.kernels.cuda.planned_launches import start

CHANGES = _native.UpdateChanges()
"""Counts changes of what updates in place write, of all plans; prepared updates hold until then."""

# Numbers are kept as long as the weight part that they were derived from.
_packed: weakref.WeakKeyDictionary[Any, tuple[Any, Numbers]] = weakref.WeakKeyDictionary()


class Arrays:
    """The arrays of a cell. They exist since native code first asked for them.

    Args:
        device: The device of the arrays.
        make: Makes them in native code, of a function that allocates.
        tensors: Arrays that exist already, by address.

    Attributes:
        native: The arrays in native code.
    """

    def __init__(
        self,
        device: torch.device,
        make: Callable[[Callable[[int], int]], _native.CellArrays],
        tensors: dict[int, Tensor],
    ) -> None:
        self._device, self._tensors = device, tensors
        self._machine: Device | None = None
        # a function that does not refer to this object, so that there is no circle
        self.native = make(partial(_allocate, tensors, device))

    def copy(self) -> Arrays:
        """Return the same arrays, for a captured graph: later ones are only in the copy."""
        make = partial(_native.CellArrays, self.native)
        return Arrays(self._device, make, dict(self._tensors))

    def tensor(self, address: int, dtype: torch.dtype) -> Tensor:
        """Return an array."""
        return self._tensors[address].view(dtype)

    def weights(self, which: int, padded: int, columns: int) -> Tensor:
        """Return the operand of byte products for W (0) or R (1), int8 (padded, columns)."""
        address, _ = self.native.gemm(which)
        return self.tensor(address, torch.int8).as_strided((padded, columns), (1, padded))

    def fill(self, machine: Device) -> None:
        """Write the arrays that native code has asked for since the last call."""
        self._machine = machine
        launches = self.native.take_new()
        for each in launches:
            start(machine, each)
        if launches:
            CHANGES.count += 1
            made_on(self._device)

    def refresh(self) -> None:
        """Rewrite the arrays after the plan's tensors changed in place."""
        if self._machine is not None:
            for each in self.native.launches():
                start(self._machine, each)


def _allocate(tensors: dict[int, Tensor], device: torch.device, size: int) -> int:
    # kernels leave padding out
    made = torch.zeros(max(size, 1), dtype=torch.int8, device=device)
    tensors[made.data_ptr()] = made
    return made.data_ptr()


class Numbers:
    """The numbers of one plan on its device.

    Attributes:
        form: The form of the plan.
        device: The device.
        H: Units.
        C: Features.
        x: The quantizer of x.
        x_planes: Bytes of a code of x inside a kernel.
        bits: Widths of codes of W and R.
        frozen: The numbers that do not depend on weights.
        arrays: The arrays.
    """

    def __init__(self, plan: CellPlan) -> None:
        # no reference to the plan: a weak dictionary keyed by its weight part holds this object
        self.form = form_of(plan)
        self.device = plan.weights.W.device
        self.H, self.C = plan.hidden_size, plan.input_size
        self.x, self.x_planes = plan.x, planes_of(plan.x.bits)
        self.frozen = frozen_numbers(plan.frozen)
        w = plan.weights
        self._keep: list[Tensor] = []
        stored = [self._stored(*each) for each in ((w.W, w.Bw, w.Wx), (w.R, w.Br, w.Rh))]
        self.bits = (w.bits_W, w.bits_R)
        given = (
            self.frozen.native,
            self.form,
            (self.C, self.H),
            self.bits,
            self.frozen.places,
            stored,
        )
        self.arrays = Arrays(self.device, partial(_native.CellArrays, *given), {})
        made_on(self.device)

    def _stored(self, codes: Tensor, bias: Tensor, each: WeightedSum) -> tuple[int, ...]:
        """Return the addresses of codes, bias, M and k of W or R, and the codes' container."""
        (M,), k = each.multipliers, each.shift
        assert isinstance(M, Tensor)
        assert isinstance(k, Tensor)
        # a frozen GRU keeps its integers in smaller dtypes
        rows = [n.to(torch.int64) for n in (bias, M, k)]
        tensors = [n.contiguous() for n in (codes, *rows)]
        self._keep += tensors
        return (*(n.data_ptr() for n in tensors), KINDS[codes.dtype])


def numbers_of(plan: CellPlan) -> Numbers:
    """Return the numbers of a plan, which are created at their first use."""
    kept = _packed.get(plan.weights)
    if kept is not None and kept[0]() is plan.frozen:
        return kept[1]
    numbers = Numbers(plan)
    if not capturing(plan.weights.W.device):
        # a captured graph computes nothing before its replay
        _packed[plan.weights] = (weakref.ref(plan.frozen), numbers)
    return numbers


def kept_numbers(part: WeightPart) -> Numbers | None:
    """Return the cached numbers of a weight part, or None."""
    kept = _packed.get(part)
    return None if kept is None else kept[1]
