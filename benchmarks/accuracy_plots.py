"""The pictures of docs/accuracy.md, from the JSON files of accuracy.py."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from both_themes import save

POINTS = 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def smooth(curve: list[float]) -> tuple[list[int], list[float]]:
    """Means of at most `POINTS` pieces of a curve, and where they end."""
    count = min(POINTS, len(curve))
    bounds = [i * len(curve) // count for i in range(count + 1)]
    return bounds[1:], [statistics.fmean(curve[a:b]) for a, b in pairwise(bounds)]


def mean_curve(results: list[dict[str, Any]], name: str) -> list[float]:
    """The mean of all seeds."""
    return [
        statistics.fmean(step) for step in zip(*(r[name]["curve"] for r in results), strict=True)
    ]


def curves(documents: dict[str, Any], file: Path) -> None:
    """Training loss over steps: float, then float and quantized from there on."""
    figure, axes = plt.subplots(1, len(documents), figsize=(4 * len(documents), 3.2), squeeze=False)
    for axis, document in zip(axes[0], documents.values(), strict=True):
        results = document["results"]
        first = mean_curve(results, "float")
        steps, values = smooth(first)
        axis.plot(steps, values, color="#808080", label="float")
        names = [name for name in results[0] if name == "float, longer" or "trained" in name]
        for colour, name in zip(COLOURS, names, strict=False):
            more, values = smooth(mean_curve(results, name))
            axis.plot([len(first) + i for i in more], values, color=colour, label=name, lw=1.2)
        axis.set(title=document["task"], xlabel="step", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("training loss")
    figure.tight_layout()
    save(figure, file)
    plt.close(figure)


def noise(documents: dict[str, Any], file: Path) -> None:
    """Signal over noise of every operator: at the finest width, and at the coarsest twice."""
    figure, axes = plt.subplots(
        1, len(documents), figsize=(4 * len(documents), 5), sharey=True, squeeze=False
    )
    for axis, document in zip(axes[0], documents.values(), strict=True):
        results = document["results"]
        names = [name for name in results[0] if name.endswith((" after", " trained"))]
        shown = dict.fromkeys((names[0], *names[-2:]))
        operators = list(results[0][names[0]]["sqnr"])
        height = 0.8 / len(shown)
        for i, (name, colour) in enumerate(zip(shown, COLOURS, strict=False)):
            found = [result[name]["sqnr"] for result in results]
            means = [statistics.fmean(each[operator] for each in found) for operator in operators]
            places = [j + (i - (len(shown) - 1) / 2) * height for j in range(len(operators))]
            axis.barh(places, means, height=height, color=colour, label=name)
        axis.set_yticks(
            range(len(operators)), [name.removesuffix("_l0") for name in operators], fontsize=8
        )
        axis.set(title=document["task"], xlabel="signal over noise, dB", xlim=(0, None))
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    save(figure, file)
    plt.close(figure)


def draw(documents: dict[str, Any], folder: Path) -> None:
    """Draw everything into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    curves(documents, folder / "training_curves.svg")
    noise(documents, folder / "operator_sqnr.svg")
