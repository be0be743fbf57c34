"""Line charts as SVG that follow the colours of a page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 40
COLOURS = ("#2f6fb0", "#d9480f", "#2b8a3e", "#8a4bb0", "#b08900", "#0b7285", "#c2255c", "#5c5f66")


@dataclass(frozen=True)
class Line:
    """A line, or dots.

    Attributes:
        name: For the legend.
        x: Places.
        y: Values; those that are not finite are left out.
        dots: Whether to draw dots in place of a line.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False


def chart(lines: Sequence[Line], x_title: str, y_title: str, *, logarithmic: bool = False) -> str:
    """Return a chart as an <svg> element.

    Args:
        lines: What to draw.
        x_title: Title of the horizontal axis.
        y_title: Title of the vertical axis.
        logarithmic: Whether the horizontal axis is logarithmic; all x are then above 0.
    """
    points = [
        [(a, b) for a, b in zip(each.x, each.y, strict=True) if math.isfinite(b)] for each in lines
    ]
    every = [point for own in points for point in own] or [(1.0, 0.0)]
    low_x, high_x = _span([a for a, _ in every], logarithmic)
    low_y, high_y = _span([b for _, b in every], False)

    def across(value: float) -> float:
        a, b, c = (math.log(v) if logarithmic else v for v in (value, low_x, high_x))
        return _LEFT + (a - b) / (c - b) * (_WIDTH - _LEFT - _RIGHT)

    def down(value: float) -> float:
        return _TOP + (high_y - value) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)

    bottom = _HEIGHT - _BOTTOM
    parts = []
    legend, rows = _legend([each.name for each in lines])
    for value in _ticks(low_y, high_y):
        y = down(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-opacity=".15"/>'
            + _label(_LEFT - 6, y + 4, f"{value:g}", "end")
        )
    for value in _octaves(low_x, high_x) if logarithmic else _ticks(low_x, high_x):
        x = across(value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" '
            'stroke="currentColor"/>' + _label(x, bottom + 16, f"{value:,g}", "middle")
        )
    for i, (each, own) in enumerate(zip(lines, points, strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        at = [(across(a), down(b)) for a, b in own]
        if each.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in at]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
    parts.append(_label((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x_title, "middle"))
    parts.append(
        f'<text transform="translate(12 {(_TOP + bottom) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle" fill="currentColor">{html.escape(y_title)}</text>'
    )
    parts.append(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" '
        'stroke="currentColor"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-18 * (rows - 1)} {_WIDTH} '
        f'{_HEIGHT + 18 * (rows - 1)}" role="img" font-family="system-ui,sans-serif" '
        f'font-size="12">{"".join((*parts, legend))}</svg>'
    )


def _legend(names: Sequence[str]) -> tuple[str, int]:
    """Return the names with their colours, and in how many rows they are, the last one lowest."""
    places, x, row = [], _LEFT, 0
    for name in names:
        width = 24 + 7 * len(name)
        if x > _LEFT and x + width > _WIDTH:
            x, row = _LEFT, row + 1
        places.append((x, row))
        x += width
    parts = []
    for i, (name, (left, at)) in enumerate(zip(names, places, strict=True)):
        top = 8 - 18 * (row - at)
        colour = COLOURS[i % len(COLOURS)]
        parts.append(f'<rect x="{left}" y="{top}" width="10" height="10" fill="{colour}"/>')
        parts.append(_label(left + 14, top + 9, name, "start"))
    return "".join(parts), row + 1


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">'
        f"{html.escape(text)}</text>"
    )


def _span(values: Sequence[float], logarithmic: bool) -> tuple[float, float]:
    """Return the ends of an axis, which differ."""
    low, high = min(values), max(values)
    if logarithmic:
        return low / 1.1, high * 1.1
    room = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers in a range."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def _octaves(low: float, high: float) -> list[float]:
    """Return powers of two in a range, or round numbers in a narrow one."""
    found = [2.0**i for i in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    if len(found) < 2:
        return _ticks(low, high)
    return found[:: -(-len(found) // 8)]
