"""A page that shows where the precision of a quantized model goes."""

from __future__ import annotations

import html
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quant_gru.analysis.cell_picture import cell_picture
from quant_gru.analysis.charts import COLOURS, Line, chart
from quant_gru.analysis.figures import Plotted, shares_figure
from quant_gru.analysis.observations import BARS, Errors, Observer, Seen, observe
from quant_gru.analysis.scale_use import texts
from quant_gru.analysis.shares import Shares, shares
from quant_gru.analysis.sizes import Sizes, cell_sizes
from quant_gru.analysis.sqnr import as_json, decibels, text_of
from quant_gru.analysis.tables import text_table
from quant_gru.analysis.trials import Forward, Place
from quant_gru.calibration.batches import batches_of
from quant_gru.config import OPERATORS, WEIGHTS
from quant_gru.config.fields import to_text
from quant_gru.config.files import write_text
from quant_gru.config.operators import MEANINGS
from quant_gru.config.shown import html_table
from quant_gru.errors import CalibrationError
from quant_gru.integer.qparams import QParams
from quant_gru.interchange.plan_tensors import suffix_of
from quant_gru.modules.gru import QuantGRU

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_BARS = 24  # operators in a figure of shares
_TICKS = 64  # codes of a grid that are drawn one by one
_GATES = ("update", "reset", "candidate")


@dataclass(frozen=True)
class Row:
    """One operator.

    Attributes:
        place: The operator.
        bits: Its width.
        scale: Its scale; of a weight the smallest and the largest.
        codes: Codes that occur (where the gate is not flat) and all codes; '' for weights.
        clipped: Share of its values more than a step beyond its codes, 0..1; None for weights.
        sqnr: Its own signal over noise in dB.
        share: Its share of the error at the outputs, 0..1.
        remark: What is wrong with its scale; '' if nothing is.
    """

    place: Place
    bits: int
    scale: str
    codes: str
    clipped: float | None
    sqnr: float
    share: float
    remark: str


@dataclass(frozen=True)
class Report(Plotted):
    """What the page shows; `print` it, or let a notebook show it.

    Attributes:
        path: The page.
        sqnr: Signal over noise of the outputs in dB.
        rows: The operators, those with the largest share of the error first.
        sizes: What the GRUs take.
    """

    path: Path
    sqnr: float
    rows: tuple[Row, ...]
    sizes: Sizes = field(repr=False)

    def __str__(self) -> str:
        head = f"{self.path}: {text_of(self.sqnr)} dB at the output"
        return f"{head}\n{text_table(*self._table())}"

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    def _figure(self) -> Figure:
        """Draw the shares of the error of up to 24 operators, the largest first."""
        shown = self.rows[:_BARS]
        return shares_figure([str(row.place) for row in shown], [r.share for r in shown])

    def to_json(self) -> str:
        """Return all figures as JSON; decibels that are not finite are text."""
        rows = [
            {**vars(row), "place": str(row.place), "sqnr": as_json(row.sqnr)} for row in self.rows
        ]
        sizes = {**vars(self.sizes), "average_bits": self.sizes.average_bits}
        found = {"sqnr": as_json(self.sqnr), "sizes": sizes, "operators": rows}
        return json.dumps(found, indent=2)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        titles = ["operator", "bits", "codes", "clipped", "own dB", "of the error"]
        return titles, [
            [
                str(row.place),
                str(row.bits),
                row.codes,
                _percent(row.clipped),
                text_of(row.sqnr),
                _percent(row.share),
            ]
            for row in self.rows
        ]


def report(
    model: torch.nn.Module,
    data: Any,
    path: str | os.PathLike[str] = "report.html",
    reference: torch.nn.Module | None = None,
    *,
    forward_fn: Forward | None = None,
    progress: bool = True,
) -> Report:
    """Write a page that shows where the precision of a quantized model goes.

    The page is one file without any other: histograms of all operators with their codes, clipped
    values, errors over time and units, what each operator causes at the outputs, weights, sizes and
    configurations.

    Args:
        model: A model with calibrated QuantGRUs, or a QuantGRU. It does not change.
        data: Batches as for `calibrate_model`; a tensor is one batch. They are kept in a list.
        path: The page.
        reference: The float model to compare outputs with, for a model that was trained after
            quantization. None for the same weights in floating point.
        forward_fn: `forward_fn(model, batch)` runs a batch and returns the outputs.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        The figures of the page; `print` it.

    Raises:
        CalibrationError: There is no calibrated QuantGRU, or no batch.
        ConfigError: The page cannot be written.
        QuantGRUError: The outputs of the reference have other shapes.

    Example:
        >>> print(report(quantized, batches, "page.html"))  # doctest: +ELLIPSIS
        page.html: ... dB at the output
        ...
    """
    grus = {
        name: gru
        for name, gru in model.named_modules()
        if isinstance(gru, QuantGRU) and gru.is_calibrated()
    }
    if not grus:
        raise CalibrationError(
            f"Expected a model with a calibrated QuantGRU, got none in "
            f"{type(model).__name__}; call convert_model and calibrate_model first"
        )
    batches = batches_of(data)
    found = shares(model, grus, reference, batches, forward_fn, progress)
    observers = observe(model, grus, batches, forward_fn, progress)
    reached = {name: each for name, each in observers.items() if each.seen}
    cells = [cell for name in reached for cell in _cells(name, grus[name], reached[name], found)]
    rows = sorted((row for cell in cells for row in cell.rows), key=lambda row: -row.share)
    sizes = sum((cell.sizes for cell in cells), Sizes())
    made = Report(Path(path), decibels(found.signal, found.noise), tuple(rows), sizes)
    write_text(path, _page(made, cells, grus, type(model).__name__, reference is not None))
    return made


@dataclass(frozen=True)
class _Cell:
    """One layer and direction of a GRU on the page."""

    name: str
    anchor: str
    gru: QuantGRU
    qparams: QParams
    rows: list[Row]
    seen: dict[Place, Seen]
    errors: Errors
    sizes: Sizes
    weights: dict[str, Tensor]  # signal and noise of each row of a weight


def _cells(name: str, gru: QuantGRU, observer: Observer, found: Shares) -> list[_Cell]:
    remarks = texts(observer.use.remarks())
    plan = gru._plan()
    cells = []
    for (layer, direction), own in observer.errors.items():
        scales = gru._state.scales
        assert scales is not None
        qparams = scales[layer][direction]
        part = plan.cells[layer][direction].weights
        suffix = suffix_of(layer, direction)
        rows, seen = [], {}
        for operator in OPERATORS:
            place = Place(name, layer, direction == 1, operator)
            bits = qparams.config[operator].bitwidth
            if place not in observer.seen or bits is None:
                continue
            each = seen[place] = observer.seen[place]
            weight = operator in WEIGHTS
            if weight:
                ends = part.scales[operator].aminmax()
                scale, codes = f"{ends.min:.3g} .. {ends.max:.3g}", ""
            else:
                quantizer = qparams.quantizers[operator]
                scale = f"{quantizer.scale:.3g}"
                codes = f"{len(each.used):,} of {quantizer.hi - quantizer.lo + 1:,}"
            clipped = None if weight else each.clipped / max(each.count, 1)
            share = found.share.get(place, 0.0)
            remark = remarks.get(operator + suffix, "")
            rows.append(Row(place, bits, scale, codes, clipped, each.sqnr, share, remark))
        title = " ".join(
            (name or type(gru).__name__, f"layer {layer}", *["reverse"] * (direction == 1))
        )
        weights = {operator: _rows_of(gru, layer, direction, operator) for operator in WEIGHTS[:2]}
        cells.append(
            _Cell(
                title,
                _anchor(f"{name}{suffix}"),
                gru,
                qparams,
                rows,
                seen,
                own,
                cell_sizes(gru, layer, qparams.config, plan.cells[layer][direction]),
                weights,
            )
        )
    return cells


def _rows_of(gru: QuantGRU, layer: int, direction: int, operator: str) -> Tensor:
    """Return signal and noise of each row of a weight matrix, (3H, 2); update gate first."""
    part = gru._plan().cells[layer][direction].weights
    cell = gru._float_weights()[layer][direction]
    real = (cell.W if operator == "weight.W" else cell.R).detach().double()
    reset, update, candidate = real.chunk(3)
    real = torch.cat((update, reset, candidate))
    codes = part.W if operator == "weight.W" else part.R
    found = codes.double() * part.scales[operator].double()[:, None]
    return torch.stack((real.square().sum(1), (real - found).square().sum(1)), dim=1).cpu()


# --- the page


def _page(
    made: Report, cells: Sequence[_Cell], grus: dict[str, QuantGRU], model: str, reference: bool
) -> str:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        model=model,
        sqnr=text_of(made.sqnr),
        against="the reference" if reference else "the same weights in floating point",
        sizes=made.sizes,
        rows=[_row(row) for row in made.rows],
        cells=[_section(cell) for cell in cells],
        layers=_error_by_layer(cells),
        configurations={
            name or type(gru).__name__: to_text(gru.config.to_dict()) for name, gru in grus.items()
        },
        facts=_facts(),
    )


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": str(row.place),
        "operator": row.place.operator,
        "meaning": MEANINGS[row.place.operator],
        "anchor": _anchor(str(row.place)),
        "bits": row.bits,
        "scale": row.scale,
        "codes": row.codes,
        "used": row.codes.split(" ")[0].replace(",", "") or "-1",
        "clipped": _percent(row.clipped),
        "clipped_value": -1 if row.clipped is None else row.clipped,
        "sqnr": text_of(row.sqnr),
        "sqnr_value": row.sqnr if math.isfinite(row.sqnr) else 1e9,
        "share": _percent(row.share),
        "share_value": row.share,
        "remark": row.remark,
    }


def _section(cell: _Cell) -> dict[str, Any]:
    shares_of = {row.place.operator: row.share for row in cell.rows}
    bits = {name: cell.qparams.config[name].bitwidth for name in OPERATORS}
    links = {row.place.operator: f"#{_anchor(str(row.place))}" for row in cell.rows}
    over = [decibels(*pair) for pair in cell.errors.over_time.tolist()]
    units = sorted(decibels(*pair) for pair in cell.errors.of_units.tolist())
    time = ""
    if len(over) > 1:
        time = chart([Line("h", range(len(over)), over)], "step", "dB of h")
    return {
        "name": cell.name,
        "anchor": cell.anchor,
        "picture": cell_picture(shares_of, bits, links),
        "sizes": cell.sizes,
        "time": time,
        "units": chart([Line("h", range(len(units)), units)], "units, worst first", "dB of h"),
        "weights": _weights(cell),
        "operators": [{**_row(row), "histogram": _histogram(cell, row.place)} for row in cell.rows],
    }


def _weights(cell: _Cell) -> str:
    """Return a chart of the decibels of each row of both matrices, gate by gate."""
    lines = []
    for operator, values in cell.weights.items():
        for gate, part in zip(_GATES, values.chunk(3), strict=True):
            dB = sorted(decibels(*pair) for pair in part.tolist())
            lines.append(Line(f"{operator[-1]} {gate}", range(len(dB)), dB))
    return chart(lines, "channels of a gate, worst first", "dB of weights")


def _histogram(cell: _Cell, place: Place) -> str:
    """Return the values of an operator over the range of its codes."""
    seen = cell.seen[place]
    if not math.isfinite(seen.low):
        return ""
    low, high = seen.low, seen.high
    quantizer = cell.qparams.quantizers.get(place.operator)
    ends = (low, high)
    if quantizer is not None:
        least, most = (
            quantizer.scale * (code - quantizer.zero_point) for code in (quantizer.lo, quantizer.hi)
        )
        # a range much wider than the values would hide them
        room = 0.25 * (high - low) or abs(high) or 1.0
        ends = (max(least, low - room), min(most, high + room))
        low, high = min(low, ends[0]), max(high, ends[1])
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = seen.histogram(low, high)
    most_often = max(counts) or 1
    width, height = 320.0, 80.0

    def across(value: float) -> float:
        return (value - low) / (high - low) * width

    bar = width / BARS
    path = "".join(
        f"M{i * bar:.1f} {height}v-{height * (count / most_often) ** 0.5:.1f}h{bar - 0.6:.1f}"
        f"V{height}z"
        for i, count in enumerate(counts)
        if count
    )
    parts = [f'<path d="{path}" fill="{COLOURS[0]}"/>']
    for x, end in ((0.0, across(ends[0])), (across(ends[1]), width)):
        if end - x > 0.5:
            parts.append(
                f'<rect x="{x:.1f}" y="0" width="{end - x:.1f}" height="{height}" '
                'fill="#d9480f" fill-opacity=".25"><title>beyond the codes</title></rect>'
            )
    if quantizer is not None:
        first = math.ceil(ends[0] / quantizer.scale - 1e-9)
        last = math.floor(ends[1] / quantizer.scale + 1e-9)
        if last - first <= _TICKS:
            grid = "".join(
                f"M{across(code * quantizer.scale):.1f} {height}v5"
                for code in range(first, last + 1)
            )
            parts.append(f'<path d="{grid}" stroke="currentColor" stroke-opacity=".6"/>')
    labels = (
        f'<text x="0" y="98" font-size="11" fill="currentColor">{low:.3g}</text>'
        f'<text x="{width}" y="98" font-size="11" text-anchor="end" fill="currentColor">'
        f"{high:.3g}</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} 102" role="img" '
        f'font-family="system-ui,sans-serif">{"".join(parts)}{labels}</svg>'
    )


def _error_by_layer(cells: Sequence[_Cell]) -> str:
    """Return a chart of the error of the states over time, a line for each of the first cells."""
    lines = [
        Line(cell.name, range(len(over)), over)
        for cell in cells
        if len(over := [decibels(*pair) for pair in cell.errors.over_time.tolist()]) > 1
    ]
    return chart(lines[: len(COLOURS)], "step", "dB of h") if len(lines) > 1 else ""


def _facts() -> dict[str, str]:
    return {
        "quant-gru": importlib.metadata.version("quant-gru"),
        "torch": torch.__version__,
        "python": f"{platform.python_version()} on {platform.machine()}",
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _anchor(text: str) -> str:
    return html.escape("".join(c if c.isalnum() else "-" for c in text))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2g} %"
