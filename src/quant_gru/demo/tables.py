"""The printed comparison: a table of results, and a table of SQNR by operator."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from quant_gru.demo.comparison import Row


def results_table(rows: Sequence[Row]) -> Table:
    """Return accuracy, agreement with float, weight size and SQNR of h, one row per version."""
    table = Table(box=box.SIMPLE_HEAD, title="Test set", title_justify="left")
    table.add_column("GRU", no_wrap=True)
    for title in ("accuracy", "agreement", "GRU weights", "SQNR of h"):
        table.add_column(title, justify="right")
    whole = rows[0].weight_bytes
    for row in rows:
        share = f"{100 * row.weight_bytes / whole:.1f} %"
        table.add_row(
            row.name,
            f"{100 * row.accuracy:.1f} %",
            f"{100 * row.agreement:.1f} %",
            f"{row.weight_bytes:,} B  {share:>7}",
            f"{_decibel(row.sqnr.get('output.h'))} dB" if row.sqnr else "",
        )
    return table


def sqnr_table(rows: Sequence[Row]) -> Table:
    """Return the SQNR of every operator in dB, one column per quantized version."""
    quantized = [row for row in rows if row.sqnr]
    table = Table(box=box.SIMPLE_HEAD, title="SQNR of each operator, dB", title_justify="left")
    table.add_column("operator", no_wrap=True)
    for row in quantized:
        table.add_column(row.name, justify="right")
    # A dict instead of a set keeps the order of the cell's equations.
    operators = dict.fromkeys(name for row in quantized for name in row.sqnr)
    for operator in operators:
        table.add_row(operator, *(_decibel(row.sqnr.get(operator)) for row in quantized))
    return table


def _decibel(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return "exact" if value == math.inf else f"{value:.1f}"
