"""The pictures of docs/accuracy.md, from the JSON files of accuracy.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

POINTS = 120
COLOURS = ("#0072b2", "#d55e00", "#009e73")


def smooth(curve: list[float]) -> tuple[list[int], list[float]]:
    """Means of at most `POINTS` pieces of a curve, and where they end."""
    size = -(-len(curve) // POINTS)
    pieces = [curve[i : i + size] for i in range(0, len(curve), size)]
    ends = [min((i + 1) * size, len(curve)) for i in range(len(pieces))]
    return ends, [statistics.fmean(piece) for piece in pieces]


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
        axis.plot(steps, values, color="#555555", label="float")
        names = [name for name in results[0] if name == "float, longer" or "trained" in name]
        for colour, name in zip(COLOURS, names, strict=False):
            more, values = smooth(mean_curve(results, name))
            axis.plot([len(first) + i for i in more], values, color=colour, label=name, lw=1.2)
        axis.set(title=document["task"], xlabel="step", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("training loss")
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def noise(document: dict[str, Any], file: Path) -> None:
    """Signal over noise of every operator, after training and trained, one panel per width."""
    results = document["results"]
    widths = [name.removesuffix(" trained") for name in results[0] if name.endswith(" trained")]
    figure, axes = plt.subplots(
        1, len(widths), figsize=(4.4 * len(widths), 4.2), sharey=True, squeeze=False
    )
    for axis, width in zip(axes[0], widths, strict=True):
        for offset, colour, kind in ((0.2, COLOURS[0], "after"), (-0.2, COLOURS[1], "trained")):
            found = [result[f"{width} {kind}"]["sqnr"] for result in results]
            operators = list(found[0])
            means = [statistics.fmean(each[name] for each in found) for name in operators]
            places = [len(operators) - i + offset for i in range(len(operators))]
            axis.barh(places, means, height=0.38, color=colour, label=f"{width} {kind}")
        axis.set_yticks(
            [len(operators) - i for i in range(len(operators))],
            [name.removesuffix("_l0") for name in operators],
            fontsize=8,
        )
        axis.set(xlabel="signal over noise, dB")
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    figure.suptitle(document["task"])
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def draw(documents: dict[str, Any], folder: Path) -> None:
    """Draw everything into a folder."""
    matplotlib.rcParams["svg.hashsalt"] = "quant-gru"  # the same file from the same figures
    matplotlib.rcParams["svg.fonttype"] = "none"
    folder.mkdir(parents=True, exist_ok=True)
    curves(documents, folder / "training_curves.svg")
    for name, document in documents.items():
        noise(document, folder / f"sqnr_{name}.svg")
