"""Inputs of layers: real values of a call, and the launches that quantize them for projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_runtime.cuda.launch import Grid, Kernel
from kernel_runtime.cuda.workspace import Memory
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.cuda.forward.layer import Cell, LayerOutput, padded_steps, scale_of
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.projection.from_reals import divides_without_branch, fill_division
from quant_gru.kernels.cuda.projection.int_mm import multiply_bytes
from quant_gru.kernels.cuda.structs import KINDS, QuantizeInputC, RequantizeLayersC

_THREADS = 256
_REQUANTIZED_ROWS = _THREADS // 32  # rows per block
_QUANTIZED_ROWS = 2 * _REQUANTIZED_ROWS
_QUANTIZE = Kernel.of("boundary/quantize_input", "quantize_input", PLAIN)
_REQUANTIZE = Kernel.of("boundary/requantize_layers", "requantize_layers", PLAIN)


class ByteRows:
    """Codes of an input as bytes, (planes * T * N, padded features).

    Attributes:
        start: Offset of the codes in the workspace.
        records: Arguments whose field `bytes` points to the codes.
        multiplied: Whether a GEMM of torch reads the codes.
        tensor: The codes as a tensor, during a call that runs such a GEMM.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.start = 0
        self.records: list[Any] = []
        self.multiplied = False
        self.tensor: Any = None


class Gemm:
    """A GEMM of torch between launches: codes of an input times the weights of a direction.

    Attributes:
        memory: The argument fields that point to the result.
        result: int32 (planes * T * N, columns), during a call.
    """

    def __init__(self, rows: ByteRows, weights: Tensor) -> None:
        self.rows, self.weights = rows, weights
        self.memory = Memory()
        self.result: Any = None

        rows.multiplied = True

    def start(self, stream: int) -> None:
        """Run the GEMM."""
        multiply_bytes(self.rows.tensor, self.weights, self.result)


class LayerInput:
    """The input of a layer's projections: real values, or codes as bytes or in their container.

    Attributes:
        nan: Offset of the NaN flags that a projection writes if it reads real values, or None.
        rows: Codes as bytes, or None.
        codes: Offset of codes in their container.
        target: `TargetC` of the launch that writes the codes: their location and layout.
    """

    def __init__(self, nan: int | None = None) -> None:
        self.nan = nan
        self.rows: ByteRows | None = None
        self.codes = 0
        self.target: Any = None


class RealInput:
    """Real values of a call, and the arguments that read them.

    Attributes:
        memory: The argument fields that point to the values.
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self._records: list[tuple[Any, bool]] = []
        self._layout: tuple[tuple[int, ...], int] | None = None

    def add(self, record: Any, fours: bool) -> None:
        """Add arguments.

        Args:
            record: The arguments, with fields `real`, `step`, `next` and `fours`.
            fours: Whether the kernel may load four values at once. If so, `move` sets the field
                `fours`.
        """
        self.memory.point(record, "real")
        self._records.append((record, fours))

    @property
    def records(self) -> list[tuple[Any, bool]]:
        """All arguments, each with whether its field `fours` may be set."""
        return self._records

    def move(self, x: Tensor) -> None:
        """Make all arguments read the input of a call (T, N, C)."""
        address, strides = x.data_ptr(), x.stride()
        self.memory.move(address)
        if (strides, address % 16) != self._layout:
            self._layout = strides, address % 16
            aligned = not (address % 16 or strides[0] % 4 or strides[1] % 4 or x.shape[2] % 4)
            for record, fours in self._records:
                record.step, record.next = strides[:2]
                if fours:
                    record.fours = aligned


def quantize_input(cell: Cell, T: int, N: int) -> tuple[Kernel, Grid, Any]:
    """Return the launch that quantizes real values.

    Args:
        cell: The cell whose input the values are.
        T: Steps.
        N: Rows.

    Returns:
        The kernel, its grid, and its arguments without those for the real values and for the
        location of the codes.
    """
    record: Any = QuantizeInputC()
    _fill_target(record.to, cell, T, N)
    record.zero = cell.x.zero_point
    record.scale, record.lo, record.hi = scale_of(cell.x)
    if divides_without_branch(cell.x):
        fill_division(record.division, cell.x)
    return _QUANTIZE, Grid((-(-T * N // _QUANTIZED_ROWS), 1), _THREADS), record


def may_load_fours(record: Any) -> bool:
    """Return whether the launch of `quantize_input` may load four values at once."""
    return bool(record.to.planes > 0 and record.division.scale)


def requantize_layers(
    cell: Cell, below: LayerOutput, memory: Memory, codes: Memory, T: int, N: int
) -> tuple[Kernel, Grid, Any]:
    """Return the launch that requantizes codes of the lower layer to codes of an input.

    Args:
        cell: The cell whose input the codes are.
        below: The lower layer.
        memory: The memory of its NaN flags.
        codes: The memory of its codes.
        T: Steps.
        N: Rows.

    Returns:
        The kernel, its grid, and its arguments without the location of the codes.
    """
    record: Any = RequantizeLayersC()
    _fill_target(record.to, cell, T, N)
    below.fill_flags(record.below, memory, T)
    for d, (under, each) in enumerate(zip(below.cells, cell.between, strict=True)):
        codes.point(record, "codes", below.out[d], d)
        record.kind[d], record.zero[d] = KINDS[under.h.container], under.h.zero_point
        record.M[d], record.k[d] = int(each.multipliers[0]), int(each.shift)
    x: Quantizer = cell.x
    record.H, record.directions = below.cells[0].numbers.H, len(below.cells)
    record.lo, record.hi = x.lo - x.zero_point, x.hi - x.zero_point
    record.out_zero = x.zero_point
    return _REQUANTIZE, Grid((-(-T * N // _REQUANTIZED_ROWS), 1), _THREADS), record


def _fill_target(to: Any, cell: Cell, T: int, N: int) -> None:
    to.kind, to.T, to.N = KINDS[cell.x.container], T, N
    to.features, to.nan_stride = cell.numbers.C, padded_steps(T)
