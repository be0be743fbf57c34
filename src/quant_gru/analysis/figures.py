"""Figures for papers. They need matplotlib: the extra `viz`."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quant_gru.analysis.charts import COLOURS, Line
from quant_gru.errors import QuantGRUError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW = 0.2  # inches
_DARK = 30.0  # dB up to which text on the heat map is white


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure of so many inches that no window shows, and its axes."""
    try:
        from matplotlib.figure import Figure as Made
    except ImportError as error:
        raise QuantGRUError(
            "Expected matplotlib to be installed for a plot; run pip install quant-gru[viz]"
        ) from error
    figure = Made(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


class Plotted(ABC):
    """A result that matplotlib draws."""

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the result as a figure for papers. Needs matplotlib, the extra `viz`.

        Args:
            path: File to write; its suffix decides the format, such as .pdf. None to write none.

        Returns:
            The matplotlib figure, to change or to show.

        Raises:
            QuantGRUError: matplotlib is missing, or the file cannot be written.
        """
        figure = self._figure()
        if path is not None:
            try:
                figure.savefig(path)
            except (OSError, ValueError) as error:  # ValueError: a format that there is not
                raise QuantGRUError(f"Expected a file that can be written, got {error}") from None
        return figure

    @abstractmethod
    def _figure(self) -> Figure:
        """Return the figure."""


def lines_figure(lines: Sequence[Line], x_title: str, y_title: str) -> Figure:
    """Draw lines and dots over a logarithmic axis.

    Args:
        lines: What to draw.
        x_title: Title of the horizontal axis.
        y_title: Title of the vertical axis.

    Raises:
        QuantGRUError: matplotlib is missing.
    """
    figure, axes = _figure(5.0, 3.2)
    for colour, each in zip(COLOURS, lines, strict=False):
        style = {"linestyle": "none", "marker": "o"} if each.dots else {}
        axes.plot(each.x, each.y, color=colour, label=each.name, **style)
    axes.set(xlabel=x_title, ylabel=y_title, xscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def heat_figure(
    rows: Sequence[str],
    columns: Sequence[str],
    dB: Sequence[Sequence[float]],
) -> Figure:
    """Draw a table of decibels as a heat map from 10 to 60 dB, with the figures.

    Args:
        rows: Names of the rows.
        columns: Names of the columns.
        dB: A row of decibels for each name; infinite where nothing is lost.

    Raises:
        QuantGRUError: As in `lines_figure`.
    """
    figure, axes = _figure(2.2 + 0.6 * len(columns), 0.6 + _ROW * len(rows))
    axes.imshow(
        [[min(each, 60.0) for each in row] for row in dB],
        aspect="auto",
        cmap="inferno",
        vmin=10,
        vmax=60,
    )
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    for y, row in enumerate(dB):
        for x, each in enumerate(row):
            text = f"{each:.1f}" if math.isfinite(each) else "equal"
            colour = "white" if each < _DARK else "black"
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
    return figure


def shares_figure(names: Sequence[str], shares: Sequence[float]) -> Figure:
    """Draw shares as bars, the first one on top.

    Args:
        names: What has a share.
        shares: From 0 to 1.

    Raises:
        QuantGRUError: As in `lines_figure`.
    """
    figure, axes = _figure(5.0, 0.7 + _ROW * len(names))
    axes.barh(range(len(names)), [100 * each for each in shares], color=COLOURS[0])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="share of the error at the outputs, %")
    return figure
