"""Bytes and bits of quantized GRUs, from their shapes and widths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from quant_gru.config import FIXED_RANGE, QuantConfig
from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer, code_limits, container_dtype
from quant_gru.integer.tables import Table
from quant_gru.interchange.c.cell import cell_bytes, matrix_bytes, table_bytes
from quant_gru.modules.gru import QuantGRU
from quant_gru.parameters.columns import packed_size
from quant_gru.parameters.document import bytes_of_table

# Widths of which several codes share a byte -> the bits that a code takes.
_SHARED = {1: 1, 2: 2, 3: 4, 4: 4}


@dataclass(frozen=True)
class Sizes:
    """What GRUs take on a target.

    Attributes:
        flash: Bytes of all constants in C source, as `CSource.flash_bytes`: weights, biases and
            multipliers of rows, and tables.
        tables: Those of tables alone.
        packed: Bytes of weights, biases and tables where codes of any width share bytes without
            gaps, as in the file of a frozen GRU.
        state: Bytes of the states of one sequence; codes of up to 4 bits share bytes.
        activations: Bytes of all codes of one step of one sequence, states included.
        numbers: Weights and biases.
        bits: The sum of their widths.
    """

    flash: int = 0
    tables: int = 0
    packed: int = 0
    state: int = 0
    activations: int = 0
    numbers: int = 0
    bits: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Sizes(*(a + b for a, b in pairs))

    @property
    def average_bits(self) -> float:
        """The mean width of weights and biases."""
        return self.bits / max(self.numbers, 1)


def code_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` codes: those of up to 4 bits share bytes, others do not."""
    if bits in _SHARED:
        return packed_size(count, _SHARED[bits])
    return count * container_dtype(*code_limits(bits, True)).itemsize


def counts(gru: QuantGRU, layer: int) -> dict[str, int]:
    """Return how many codes each operator of a layer and direction has, in one step.

    Args:
        gru: Any QuantGRU.
        layer: Index of the layer.
    """
    H = gru.hidden_size
    C = gru.input_size if layer == 0 else H * (2 if gru.bidirectional else 1)
    found = {"weight.W": 3 * H * C, "weight.R": 3 * H * H}
    found |= dict.fromkeys(("weight.bw", "weight.br"), 3 * H if gru.bias else 0)
    found |= {"input.x": C, "matmul.Wx": 3 * H, "matmul.Rh": 3 * H}
    return {name: found.get(name, H) for name in gru.config.operators}


def operator_sizes(name: str, count: int, bits: int) -> Sizes:
    """Return what the codes of an operator take, without tables and without flash.

    Args:
        name: The operator.
        count: Its codes.
        bits: Their width.
    """
    if name.startswith("weight."):
        return Sizes(packed=packed_size(count, bits), numbers=count, bits=count * bits)
    size = code_bytes(count, bits)
    return Sizes(state=size if name == "output.h" else 0, activations=size)


def matrix_sizes(name: str, plan: CellPlan) -> Sizes:
    """Return what the rows of a matrix take in flash, with their biases and multipliers.

    Args:
        name: weight.W or weight.R.
        plan: The plan of the layer and direction.
    """
    return Sizes(flash=matrix_bytes(plan)[name])


def table_sizes(table: Table, pre: Quantizer) -> Sizes:
    """Return what a table takes.

    Args:
        table: The table.
        pre: The quantizer of its input.
    """
    size = table_bytes(table, pre)
    return Sizes(flash=size, tables=size, packed=bytes_of_table(table))


def cell_sizes(gru: QuantGRU, layer: int, config: QuantConfig, plan: CellPlan) -> Sizes:
    """Return what a layer and direction takes.

    Args:
        gru: Its GRU.
        layer: Index of the layer.
        config: Its widths.
        plan: Its plan.
    """
    sizes = cell_bytes(plan)
    packed = sum(map(bytes_of_table, plan.frozen.tables.values()))
    tables = sum(sizes[out] for out in FIXED_RANGE)
    found = Sizes(flash=sum(sizes.values()), tables=tables, packed=packed)
    for name, count in counts(gru, layer).items():
        bits = config[name].bitwidth
        if bits is not None:
            found += operator_sizes(name, count, bits)
    return found


def sizes_of(grus: Iterable[QuantGRU]) -> Sizes:
    """Return what calibrated GRUs take together."""
    found = Sizes()
    for gru in grus:
        plan = gru._plan()
        for layer, cells in enumerate(gru._state.scales or ()):
            for direction, cell in enumerate(cells):
                found += cell_sizes(gru, layer, cell.config, plan.cells[layer][direction])
    return found
