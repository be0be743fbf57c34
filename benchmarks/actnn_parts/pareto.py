"""The picture of peak memory against speed, from rows that benchmarks/actnn.py speed wrote.

    python benchmarks/actnn.py speed --json actnn.json
    python benchmarks/actnn.py pareto actnn.json [--out docs/images/actnn_pareto.svg]

Up and to the left is better. A line joins the points of `fit`.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from both_themes import save
from matplotlib import pyplot
from matplotlib.transforms import Bbox

TITLES = {
    "resnet_tf32": "ResNet-50, TF32",
    "resnet_bf16": "ResNet-50, bfloat16",
    "gpt": "12 GPT blocks, bfloat16",
    "gru": "GRU, 3 layers, 2 directions",
}
MARKER, FONT = 6, 7  # pixels around a point, points of text
DISTANCES = (6, 12, 20, 30, 42, 56, 72)  # points from a point to its text
AMBIGUOUS = 10  # pixels by which another point is farther from a text than its own
Point = tuple[float, float]
PEERS = ("exact", "checkpoint", "compile", "compile 0.5", "compile 0.2")


class Labels:
    """Texts beside points: each at the nearest place where it covers no text, point or line.

    Args:
        axes: The axes, with their limits set.
        points: All points that are drawn, in data coordinates.
        lines: Points of lines, likewise.
    """

    def __init__(self, axes: Any, points: list[Point], lines: list[list[Point]]) -> None:
        self._axes, self._renderer = axes, axes.figure.canvas.get_renderer()
        self._points = [(float(x), float(y)) for x, y in axes.transData.transform(points)]
        self._taken = [_square(point, MARKER) for point in self._points]
        for line in lines:
            ends = axes.transData.transform(line)
            for a, b in pairwise(ends):
                steps = int(max(abs(b - a)) // 4) + 1
                self._taken += [_square(a + (b - a) * k / steps, 3) for k in range(steps)]

    def add(self, text: str, at: Point) -> None:
        """Write a text, and a thin line to its point if another one is as near."""
        label = self._axes.annotate(
            text, at, xytext=(0, 0), textcoords="offset points", fontsize=FONT
        )
        x, y = self._axes.transData.transform(at)
        box = self._place(label, (float(x), float(y)))
        self._taken.append(box.padded(4))
        near = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
        own = math.dist(near, (x, y))
        others = sum(_distance(box, point) < own + AMBIGUOUS for point in self._points)
        if others > 1:
            line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
            end = self._axes.transData.inverted().transform(near)
            self._axes.annotate("", at, xytext=tuple(end), arrowprops=line, zorder=3)

    def _place(self, label: Any, at: Point) -> Bbox:
        """Move a text to the first free place, and return its box; the last if none is free."""
        inside = self._axes.get_window_extent(self._renderer)
        box = label.get_window_extent(self._renderer)
        for distance, degrees in product(DISTANCES, range(0, 360, 15)):
            x = distance * math.cos(math.radians(degrees))
            y = distance * math.sin(math.radians(degrees))
            label.set_position((x, y))
            label.set(
                ha="left" if x > 1 else "right" if x < -1 else "center",
                va="bottom" if y > 1 else "top" if y < -1 else "center",
            )
            box = label.get_window_extent(self._renderer)
            within = inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0
            if within and box.y1 < inside.y1 and not box.count_overlaps(self._taken):
                break
        return box


def _square(at: Any, size: float) -> Bbox:
    return Bbox.from_bounds(at[0] - size, at[1] - size, 2 * size, 2 * size)


def _distance(box: Bbox, at: Point) -> float:
    """Return how far a point is from a box."""
    x, y = at
    return math.dist(at, (min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)))


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the rows of one model."""
    places = [(row["peak"] / 1024, row["samples"]) for row in rows]
    speeds = [row["samples"] for row in rows]
    room = 0.15 * (max(speeds) - min(speeds)) + 0.02 * max(speeds)
    axes.set(xlabel="peak / GiB", ylabel="samples / s")
    axes.set_xlim(0, 1.2 * max(x for x, _ in places))
    axes.set_ylim(max(0, min(speeds) - room), max(speeds) + room)
    lines = []
    for kind, color in (("fit ", "tab:orange"), ("fit compiled ", "tab:red")):
        points = sorted(
            at
            for row, at in zip(rows, places, strict=True)
            if row["row"].startswith(kind) and row["row"][len(kind)].isdigit()
        )
        if points:
            axes.plot(*zip(*points, strict=True), "s-", color=color, label=kind.strip(), zorder=1)
            lines.append(points)
    if lines:
        axes.legend(loc="lower right")
    axes.figure.canvas.draw()  # labels are placed in the final layout
    labels = Labels(axes, places, lines)
    others = [(at, row["row"]) for row, at in zip(rows, places, strict=True)]
    for at, name in sorted(each for each in others if not each[1].startswith("fit")):
        axes.plot(*at, "o", color="tab:gray" if name in PEERS else "tab:blue")
        labels.add(name, at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", type=Path, help="files of speed --json")
    parser.add_argument("--out", type=Path, default=Path("docs/images/actnn_pareto.svg"))
    options = parser.parse_args()
    files = [json.loads(path.read_text(encoding="utf-8")) for path in options.rows]
    rows = [row for file in files for row in file["rows"] if row["samples"]]
    models = [name for name in TITLES if any(row["model"] == name for row in rows)]
    columns = min(2, len(models))
    lines = -(-len(models) // columns)
    figure, all_axes = pyplot.subplots(
        lines, columns, figsize=(5.5 * columns, 4.2 * lines), layout="constrained", squeeze=False
    )
    for axes in all_axes.flat[len(models) :]:
        axes.set_axis_off()
    for name, axes in zip(models, all_axes.flat, strict=False):
        axes.set_title(TITLES[name])
    figure.suptitle(f"Memory and speed of training, {files[0]['device']}")
    for name, axes in zip(models, all_axes.flat, strict=False):
        draw(axes, [row for row in rows if row["model"] == name])
    save(figure, options.out)
