"""Describes configurations and parameters: a line each, and tables of their operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quant_gru.cli.files import STDIN, Found
from quant_gru.config import ACTIVATIONS, OperatorConfig, QuantConfig

if TYPE_CHECKING:
    from quant_gru.integer.qparams import QParams


def describe(file: str, found: Found) -> str:
    """Return one line about a document of a file."""
    place = "standard input" if file == STDIN else file
    if found.name:
        place += f": {found.name}"
    if isinstance(found.content, QuantConfig):
        return f"{place}: {found.kind}, {_summary(found.config)}"
    shape = found.content.shape
    sizes = f"GRU({shape.input_size}, {shape.hidden_size}, num_layers={shape.num_layers}"
    options = f", bias={shape.bias}, bidirectional={shape.bidirectional})"
    return f"{place}: {found.kind} of a {sizes}{options}, {_summary(found.config)}"


def operator_tables(found: Found) -> Iterator[str]:
    """Yield the table of a configuration, or of each layer and direction of parameters."""
    if isinstance(found.content, QuantConfig):
        rows = [
            (name, *_codes(op), "yes" if op.is_symmetric else "no", op.granularity or "-")
            for name, op in found.config.operators.items()
        ]
        yield columns([("operator", "bits", "codes", "symmetric", "granularity"), *rows])
        return
    for layer, cells in enumerate(found.content.cells):
        for direction, cell in enumerate(cells):
            head = ("operator", "bits", "codes", "zero point", "scale")
            table = columns([head, *(_row(name, cell) for name in cell.config.operators)])
            yield f"layer {layer}{', reverse' if direction else ''}\n{table}"


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Return rows of text in aligned columns, two spaces apart."""
    text = [[str(each) for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return "\n".join(
        "  ".join(each.ljust(width) for each, width in zip(row, widths, strict=True)).rstrip()
        for row in text
    )


def scale_text(scale: float) -> str:
    """Return a scale as a power of two where it is one."""
    from quant_gru.parameters.checks import exponent_of

    exponent = exponent_of(scale)
    return f"{scale:.9g}" if exponent is None else f"2^{-exponent}"


def _codes(operator: OperatorConfig) -> tuple[str, str]:
    """Return width and signedness."""
    if operator.bitwidth is None:
        return "fused", "-"
    return str(operator.bitwidth), "unsigned" if operator.is_unsigned else "signed"


def _row(name: str, cell: QParams) -> tuple[str, ...]:
    operator = cell.config[name]
    row = (name, *_codes(operator))
    if name in ACTIVATIONS:
        quantizer = cell.quantizers.get(name)
        if quantizer is None:
            return *row, "-", "-"
        return *row, str(quantizer.zero_point), scale_text(quantizer.scale)
    pinned = cell.pinned.get(name)
    if pinned is not None and len({*pinned}) == 1:
        return *row, "0", scale_text(pinned[0])
    source = "from the weights" if pinned is None else "set by hand"
    return *row, "0", f"per {operator.granularity}, {source}"


def _summary(config: QuantConfig) -> str:
    widths = sorted({op.bitwidth for op in config.operators.values() if op.bitwidth})
    return (
        f"{' and '.join(map(str, widths))} bits, {config.scale_kind} scales, "
        f"{config.activation} activations"
    )
