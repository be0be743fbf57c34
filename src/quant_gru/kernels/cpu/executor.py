"""Runs a plan on the native kernels: a plan is packed once, a call passes only addresses."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.allocators import maker, parts
from quant_gru.errors import QuantGRUError
from quant_gru.integer.backward import Kept
from quant_gru.integer.call_form import Packing, inward, outward
from quant_gru.integer.plan import CellPlan, GRUPlan, WeightPart
from quant_gru.integer.random import chance
from quant_gru.kernels import _native
from quant_gru.kernels.cpu.plan_packing import pack, pack_requantizer

VARIABLE = "QUANT_GRU_CPU"
REFERENCE = "reference"
_CPU = torch.device("cpu")

# A native layer is kept as long as the weight part from which it was made.
_packed: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, _native.Layer]]] = (
    weakref.WeakKeyDictionary()
)
_stacks: weakref.WeakKeyDictionary[Any, tuple[list[Any], str, Stack | None]] = (
    weakref.WeakKeyDictionary()
)
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
    """Run one layer and direction, like `quant_gru.integer.reference.run`.

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
    T, N, C = x.shape
    H = plan.hidden_size
    count = N if lengths is None else lengths.numel()
    if plan.input_size != C or h0.shape != (N, H) or count != N:
        raise QuantGRUError(
            f"Expected x of {plan.input_size} features, h0 of shape ({N}, {H}) and {N} lengths, "
            f"got x of {C}, h0 of shape {tuple(h0.shape)} and {count} lengths"
        )
    if held is not None:
        if held.shape != (T, N, H):
            raise QuantGRUError(
                f"Expected held to be of shape {(T, N, H)}, got {tuple(held.shape)}"
            )
        held = held.to("cpu", torch.bool).contiguous()
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


def layer_of(plan: CellPlan, variant: str) -> _native.Layer:
    """Return the native layer of a plan; it is made at the first use."""
    kept = _packed.get(plan.weights)
    if kept is None or kept[0]() is not plan.frozen:
        kept = (weakref.ref(plan.frozen), {})
        _packed[plan.weights] = kept
    layers = kept[1]
    if variant not in layers:
        layers[variant] = _native.Layer(pack(plan), variant)
    return layers[variant]


def repack(part: WeightPart) -> None:
    """Update the native layers of a weight part whose tensors changed in place."""
    kept = _packed.get(part)
    if kept is None:
        return
    for variant, layer in list(kept[1].items()):
        if layer.kind == "wide":
            # A wide layer has copies of the weights; it is made again at its next use.
            del kept[1][variant]
        else:
            layer.repack()


def stack_of(plan: GRUPlan, variant: str) -> Stack | None:
    """Return the native stack of a plan; it is made at the first use.

    Args:
        plan: The plan, on the CPU.
        variant: One of `choices()` except 'reference'.

    Returns:
        The stack; None if the fast kernels cannot run a cell (`is_narrow`).
    """
    cells = [cell for layer in plan.cells for cell in layer]
    parts = [part for cell in cells for part in (cell.frozen, cell.weights)]
    kept = _stacks.get(cells[0].weights)
    if (
        kept is None
        or kept[1] != variant
        or len(kept[0]) != len(parts)
        or any(ref() is not part for ref, part in zip(kept[0], parts, strict=True))
    ):
        narrow = all(is_narrow(cell, variant) for cell in cells)
        stack = Stack(plan, variant) if narrow else None
        kept = ([weakref.ref(part) for part in parts], variant, stack)
        _stacks[cells[0].weights] = kept
    return kept[2]


class Stack:
    """All layers and directions of a GRU in native code: real values in, real values out.

    Args:
        plan: The plan, on the CPU, with operators of up to 16 bits.
        variant: One of `choices()` except 'reference'.
    """

    def __init__(self, plan: GRUPlan, variant: str) -> None:
        layers = [[layer_of(cell, variant) for cell in cells] for cells in plan.cells]
        # Live weights rewrite these flags in place, so native code reads them in each call.
        finite = [cell.weights.finite for cells in plan.cells for cell in cells]
        self.native = _native.Stack(
            layers,
            _between(plan),
            [flag.data_ptr() for flag in finite],
            finite,
        )
        cell = plan.cells[0][0]
        self.input_size, self.hidden_size = cell.input_size, cell.hidden_size
        self.directions = len(plan.cells[0])
        self.states = len(plan.cells) * self.directions
        self.containers = [cell.h.container for cells in plan.cells for cell in cells]

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
        rows = x.shape[0]
        x, h0 = inward(x, h0, packing)
        y, last = self._run(x, h0, lengths if packing is None else packing.lengths, kept)
        y, last = outward(y, last, packing, rows)
        return (y, last) if dtype is y.dtype else (y.to(dtype), last.to(dtype))

    def _run(
        self, x: Tensor, h0: Tensor | None, lengths: Tensor | None, kept: Kept | None
    ) -> tuple[Tensor, Tensor]:
        if x.stride(2) != 1 or x.is_neg():
            x = x.contiguous().resolve_neg()
        T, N, _ = x.shape
        x_step, x_row, _ = x.stride()
        H, width = self.hidden_size, self.directions * self.hidden_size
        y = x.new_empty((T, N, width))
        last = x.new_empty((self.states, N, H))
        h0 = None if h0 is None else h0.contiguous().resolve_neg()
        lengths = None if lengths is None else lengths.contiguous()
        codes: list[Tensor] = []
        if kept is not None:
            codes = [torch.empty((T, N, H), dtype=each, device="cpu") for each in self.containers]
        if N:
            self.native.run(
                x.data_ptr(),
                x_step,
                x_row,
                0 if h0 is None else h0.data_ptr(),
                y.data_ptr(),
                N * width,
                width,
                last.data_ptr(),
                [each.data_ptr() for each in codes],
                0 if lengths is None else lengths.data_ptr(),
                T,
                N,
                torch.get_num_threads(),
            )
        if kept is not None:
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
        is_real = dtype in (None, torch.float32)
        functions = (Tensor, torch.is_grad_enabled, torch.get_num_threads)
        return _native.PreparedCallCPU(self.native, guard, VARIABLE, functions, _parts, is_real)

    def prepare(self, call: Any, *given: Any) -> None:
        """Do nothing: only a GPU prepares the calls that `run` has run."""


def _parts(shape: tuple[int, ...]) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Return the function, and its arguments, that native code calls to make a tensor."""
    return parts(maker(shape, _CPU))


class Stream:
    """A native stack that receives its input step by step.

    Args:
        stack: A stack with one direction.
        states: Codes of output.h of each layer (N, H), contiguous. Every step reads and writes
            them.
    """

    def __init__(self, stack: Stack, states: list[Tensor]) -> None:
        self._kept = states
        addresses = [state.data_ptr() for state in states]
        self.step = _native.Stream(stack.native, states[0].shape[0], addresses).step
        """step(address of x (N, C), address of y (N, H)), float32 -> whether x has a NaN."""


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
