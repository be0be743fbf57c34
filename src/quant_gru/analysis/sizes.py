"""Bytes and bits of quantized GRUs, from their shapes and widths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

from quant_gru.config import QuantConfig
from quant_gru.integer.quantizer import code_limits, container_dtype
from quant_gru.integer.tables import Table
from quant_gru.modules.gru import QuantGRU
from quant_gru.parameters.columns import packed_size
from quant_gru.parameters.document import bytes_of_table

# Widths of which several codes share a byte in C source -> the bits that a code takes there.
_SHARED = {1: 1, 2: 2, 3: 4, 4: 4}


@dataclass(frozen=True)
class Sizes:
    """What GRUs take on a target.

    Attributes:
        flash: Bytes of weights, biases and tables. Codes of up to 4 bits share bytes, as in C
            source: those of 3 bits take 4.
        packed: The same where codes of any width share bytes without gaps, as in the file of a
            frozen GRU.
        state: Bytes of the states of one sequence.
        activations: Bytes of all codes of one step of one sequence, states included.
        numbers: Weights and biases.
        bits: The sum of their widths.
    """

    flash: int = 0
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
    """Return what the codes of an operator take, without tables.

    Args:
        name: The operator.
        count: Its codes.
        bits: Their width.
    """
    size = code_bytes(count, bits)
    if name.startswith("weight."):
        packed = packed_size(count, bits)
        return Sizes(flash=size, packed=packed, numbers=count, bits=count * bits)
    return Sizes(state=size if name == "output.h" else 0, activations=size)


def table_sizes(table: Table) -> Sizes:
    """Return what a table takes: as much in C source as in a file."""
    size = bytes_of_table(table)
    return Sizes(flash=size, packed=size)


def cell_sizes(
    gru: QuantGRU, layer: int, config: QuantConfig, tables: Mapping[str, Table]
) -> Sizes:
    """Return what a layer and direction takes.

    Args:
        gru: Its GRU.
        layer: Index of the layer.
        config: Its widths.
        tables: Its tables.
    """
    found = sum(map(table_sizes, tables.values()), Sizes())
    for name, count in counts(gru, layer).items():
        bits = config[name].bitwidth
        if bits is not None:
            found += operator_sizes(name, count, bits)
    return found


def sizes_of(grus: Iterable[QuantGRU]) -> Sizes:
    """Return what calibrated GRUs take together."""
    found = Sizes()
    for gru in grus:
        for layer, cells in enumerate(gru._state.scales or ()):
            for cell in cells:
                found += cell_sizes(gru, layer, cell.config, cell.tables)
    return found
