"""The picture of peak memory against speed, from rows that benchmarks/actnn.py wrote.

    python benchmarks/actnn.py --json actnn.json
    python benchmarks/actnn_pareto.py actnn.json [--out docs/images/actnn_pareto.svg]

Up and to the left is better. A line joins the points of `fit`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

TITLES = {
    "resnet_tf32": "ResNet-50, TF32",
    "resnet_bf16": "ResNet-50, bfloat16",
    "gpt": "12 GPT blocks, bfloat16",
    "gru": "GRU, 3 layers, 2 directions",
}
PEERS = ("exact", "checkpoint", "compile", "compile 0.5", "compile 0.2")


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    others = [row for row in rows if not row["row"].startswith("fit")]
    for index, row in enumerate(sorted(others, key=lambda row: -row["samples"])):
        at = (row["peak"] / 1024, row["samples"])
        axes.plot(*at, "o", color="tab:gray" if row["row"] in PEERS else "tab:blue")
        # neighbours write above and below their points in turn
        offset = (4, (4, -10)[index % 2])
        axes.annotate(row["row"], at, textcoords="offset points", xytext=offset, fontsize=7)
    for kind, color in (("fit ", "tab:orange"), ("fit compiled ", "tab:red")):
        points = sorted(
            (row["peak"] / 1024, row["samples"])
            for row in rows
            if row["row"].startswith(kind) and row["row"][len(kind)].isdigit()
        )
        if points:
            axes.plot(*zip(*points, strict=True), "s-", color=color, label=kind.strip())
    axes.set(xlabel="peak / GiB", ylabel="samples / s")
    axes.set_xlim(0, 1.2 * max(row["peak"] for row in rows) / 1024)
    axes.set_ylim(0, 1.1 * max(row["samples"] for row in rows))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", type=Path, help="files of benchmarks/actnn.py --json")
    parser.add_argument("--out", type=Path, default=Path("docs/images/actnn_pareto.svg"))
    options = parser.parse_args()
    files = [json.loads(path.read_text(encoding="utf-8")) for path in options.rows]
    rows = [row for file in files for row in file["rows"] if row["samples"]]
    models = [name for name in TITLES if any(row["model"] == name for row in rows)]
    figure, all_axes = pyplot.subplots(
        1, len(models), figsize=(5 * len(models), 4.5), layout="constrained", squeeze=False
    )
    for name, axes in zip(models, all_axes[0], strict=True):
        draw(axes, [row for row in rows if row["model"] == name])
        axes.set_title(TITLES[name])
    figure.suptitle(f"Memory and speed of training, {files[0]['device']}")
    figure.savefig(options.out)


if __name__ == "__main__":
    main()
