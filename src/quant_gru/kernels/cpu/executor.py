"""Runs a plan on the native kernels: a plan is packed once, a call passes only addresses."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.backward import Kept
from quant_gru.integer.call_form import FLOATS, Packing
from quant_gru.integer.plan import CellPlan, FrozenPart, GRUPlan, WeightPart
from quant_gru.integer.quantizer import CONTAINERS
from quant_gru.integer.random import chance
from quant_gru.kernel_runtime.allocators import maker
from quant_gru.kernels import _native
from quant_gru.kernels.cpu.plan_packing import pack, pack_requantizer, pack_weights
from quant_gru.kernels.shapes import check_run

VARIABLE = "QUANT_GRU_CPU"
REFERENCE = "reference"
_MAKER = functools.partial(maker, device=torch.device("cpu"))
_logger = logging.getLogger(__name__)

# A native layer is kept as long as the weight part from which it was made.
_packed: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, _native.Layer]]] = (
    weakref.WeakKeyDictionary()
)
# A stack is kept as long as the first cell's weight part.
_stacks: weakref.WeakKeyDictionary[Any, tuple[Any, Stack | None]] = weakref.WeakKeyDictionary()
_AVAILABLE = [*_native.variants(True), REFERENCE]


def choices() -> list[str]:
    """Return the values of `QUANT_GRU_CPU` that work on this machine, fastest first."""
    return list(_AVAILABLE)


def left_out() -> list[str]:
    """Return the instruction sets that this build lacks, because its compiler lacks their flags."""
    return _native.left_out()


def chosen() -> str:
    """Return the instruction set in use, or 'reference'.

    Raises:
        QuantGRUError: This machine does not support the value of `QUANT_GRU_CPU`.
    """
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return _AVAILABLE[0]
    if wanted not in _AVAILABLE:
        known = ", which the compiler of this build did not know" if wanted in left_out() else ""
        raise QuantGRUError(
            f"Expected {VARIABLE} to be one of {', '.join(_AVAILABLE)}, got {wanted!r}{known}"
        )
    return wanted


def run(
    plan: CellPlan,
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    reverse: bool,
    variant: str,
    threads: int | None = None,
    held: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one layer and direction, like `quant_gru.integer.cell.run`.

    Args:
        plan: The plan, on the CPU.
        x: Codes of input.x (T, N, C), any integer dtype.
        h0: Codes of output.h (N, H), any integer dtype.
        lengths: int64 (N,) or None.
        reverse: Whether to run from the last step to the first.
        variant: One of `choices()` except 'reference'.
        threads: Maximum number of threads; None for torch.get_num_threads().
        held: bool (T, N, H), true where a unit keeps its state in a step, or None.

    Returns:
        Codes of output.h of all steps (T, N, H) and of the last step (N, H).

    Raises:
        QuantGRUError: A shape does not match the plan.
    """
    check_run(plan, x, h0, lengths, held)
    (T, N, _), H = x.shape, plan.hidden_size
    held = None if held is None else held.to("cpu", torch.bool).contiguous()
    x = x.to("cpu", plan.x.container).contiguous()
    h0 = h0.to("cpu", plan.h.container).contiguous()
    out = torch.empty((T, N, H), dtype=plan.h.container, device="cpu")
    last = torch.empty((N, H), dtype=plan.h.container, device="cpu")
    if N:
        lengths = None if lengths is None else lengths.to("cpu", torch.int64).contiguous()
        layer_of(plan, variant).run(
            x.data_ptr(),
            h0.data_ptr(),
            out.data_ptr(),
            last.data_ptr(),
            T,
            N,
            0 if lengths is None else lengths.data_ptr(),
            0 if held is None else held.data_ptr(),
            reverse,
            torch.get_num_threads() if threads is None else threads,
        )
    return out, last


def events(seed: Tensor, p: float, shape: tuple[int, int, int], stream: int) -> Tensor:
    """Compute `quant_gru.integer.random.events` in native code, on the CPU."""
    found = torch.empty(shape, dtype=torch.bool, device="cpu")
    key = int(seed) & ((1 << 64) - 1)
    _native.events(found.data_ptr(), *shape, key, stream, chance(p))
    return found


def is_narrow(plan: CellPlan, variant: str) -> bool:
    """Whether the fast kernels run a plan: at most 16 bits, and float64 is exact for its sums."""
    return layer_of(plan, variant).kind != "wide"


def layers_of(frozen: FrozenPart, part: WeightPart) -> dict[str, _native.Layer]:
    """Return the native layers that were made of a weight part, by instruction set.

    Args:
        frozen: The frozen part of the same plan.
        part: The weight part.
    """
    kept = _packed.get(part)
    if kept is None or kept[0]() is not frozen:
        kept = _packed[part] = (weakref.ref(frozen), {})
    return kept[1]


def layer_of(plan: CellPlan, variant: str) -> _native.Layer:
    """Return the native layer of a plan; it is made at the first use."""
    layers = layers_of(plan.frozen, plan.weights)
    if variant not in layers:
        layers[variant] = _native.Layer(pack(plan), variant)
    return layers[variant]


def repack(part: WeightPart) -> None:
    """Update the native layers of a weight part whose tensors changed in place."""
    kept = _packed.get(part)
    for layer in () if kept is None else kept[1].values():
        layer.repack()


def stack_of(plan: GRUPlan, variant: str | None = None) -> Stack | None:
    """Return the native stack of a plan; it is made at the first use.

    Args:
        plan: The plan, on the CPU.
        variant: One of `choices()`; None for the one in use.

    Returns:
        The stack; None if the reference executor is in use, if the fast kernels cannot run a cell
        (`is_narrow`), or if the input has a zero point outside of its codes.
    """
    weights, parts = plan.cells[0][0].weights, plan.parts
    made_of, stack = _stacks.get(weights, ((), None))
    if variant is None:
        if stack is not None and made_of[1:] == parts and stack.calls.is_chosen():
            return stack
        variant = chosen()
    if variant == REFERENCE or plan.is_far:
        why = "a zero point of the input is outside of its codes" if plan.is_far else VARIABLE
        _logger.debug("plan on the CPU: the reference executor, because of %s", why)
        return None
    if made_of != (variant, *parts):
        cells = [cell for layer in plan.cells for cell in layer]
        narrow = all(is_narrow(cell, variant) for cell in cells)
        stack = Stack(plan, variant) if narrow else None
        how = "whole calls" if narrow else "each layer by itself, as operators have over 16 bits"
        _logger.debug("plan of %d cells on the CPU: %s kernels, %s", len(cells), variant, how)
        _stacks[weights] = (variant, *parts), stack
    return stack


class Stack:
    """All layers and directions of a GRU in native code: real values in, real values out.

    Args:
        plan: The plan, on the CPU, with operators of up to 16 bits.
        variant: One of `choices()` except 'reference'.

    Attributes:
        calls: Runs calls.
    """

    def __init__(self, plan: GRUPlan, variant: str) -> None:
        layers = [[layer_of(cell, variant) for cell in cells] for cells in plan.cells]
        # Live weights rewrite these flags in place, so native code reads them in each call.
        finite = [cell.weights.finite for cells in plan.cells for cell in cells]
        native = _native.Stack(layers, _between(plan), [flag.data_ptr() for flag in finite], finite)
        functions = (Tensor, torch.get_num_threads)
        self.calls = _native.CPUCalls(native, VARIABLE, functions, (*FLOATS, *CONTAINERS), _MAKER)

    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None = None,
        kept: Kept | None = None,
        packing: Packing | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Run all steps.

        Args:
            x: (T, N, C), or (rows, C) if rows are packed, on the CPU. Its dtype is in `FLOATS`.
            h0: (states, N, H), also on the CPU with a dtype in `FLOATS`; None for zeros.
            lengths: int64 (N,) or None.
            kept: Receives the codes that a backward needs, or None.
            packing: The layout of packed rows; None if rows are not packed.
            dtype: The dtype of the results.

        Returns:
            Output (T, N, D*H), or (rows, D*H) if rows are packed, and last states
            (states, N, H).
        """
        lengths = None if lengths is None else lengths.contiguous()
        found = self.calls.run(x, h0, lengths, packing, dtype, kept is not None)
        if found is NotImplemented:
            x, h0 = x.resolve_neg(), None if h0 is None else h0.resolve_neg()
            found = self.calls.run(x, h0, lengths, packing, dtype, kept is not None)
        if kept is None:
            return found  # type: ignore[no-any-return]
        y, last, kept.nan, codes = found
        kept.out += codes
        return y, last

    def prepared(
        self, guard: _native.WeightGuard, dtype: torch.dtype | None
    ) -> _native.PreparedCall:
        """Return an object that runs whole calls in native code.

        Args:
            guard: The guard of all weights of the module.
            dtype: The dtype of the results; None for the dtype of the input.
        """
        functions = (Tensor, torch.is_grad_enabled)
        return _native.PreparedCallCPU(self.calls, guard, functions, dtype)

    def prepared_step(
        self,
        guard: _native.WeightGuard,
        dtype: torch.dtype | None,
        update: Callable[[], None],
    ) -> _native.PreparedStepCPU:
        """Return an object that runs calls in native code after an update of the weights.

        Args:
            guard: The guard of all weights of the module, which the plan follows.
            dtype: The dtype of the results; None for the dtype of the input.
            update: Updates the numbers that follow the weights.
        """
        functions = (Tensor, torch.is_grad_enabled)
        return _native.PreparedStepCPU(self.calls, guard, functions, dtype, update)

    def prepare(self, call: Any, *given: Any) -> None:
        """Do nothing: only a GPU prepares the calls that `run` has run."""

    def backward(self, plan: GRUPlan) -> _native.CPUBackward:
        """Return an object that runs backwards of calls that kept their codes.

        Args:
            plan: The plan of this stack, made of real weights.
        """
        keep: list[Tensor] = []
        weights = [pack_weights(cell, keep) for cells in plan.cells for cell in cells]
        return _native.CPUBackward(self.calls, weights, keep)


def _between(plan: GRUPlan) -> list[list[list[Any]]]:
    """Return the conversions between layers: [layer - 1][direction][direction below]."""
    return [
        [
            [
                pack_requantizer(each, below.h, cell.x)
                for each, below in zip(sums, lower, strict=True)
            ]
            for sums, cell in zip(upper, plan.cells[layer], strict=True)
        ]
        for layer, (upper, lower) in enumerate(zip(plan.between, plan.cells, strict=False), 1)
    ]
