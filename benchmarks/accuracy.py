"""What quantization costs and what training with it wins back, on real data, over several seeds.

    python benchmarks/accuracy.py --data FOLDER --output figures [--device cuda]
    python benchmarks/accuracy.py --output figures --images docs/images

Runs the three examples (examples/common.py says what they compare) and writes a JSON for each task
and seed, with all figures, training curves and the signal over noise of every operator; then
reports all that the output folder holds. FOLDER holds spoken_digits.npz and tinyshakespeare.txt.
Without `--data` nothing runs; `--images` draws what is there (matplotlib).

`cost` is what quantization after training loses against float training of as many steps, `won
back` the share of it that training with quantization recovers, `spread` the standard deviation of
the float figure over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from torch import Tensor, nn

from quant_gru import QuantGRU, operator_sqnr

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import character_model
import common
import keyword_spotting
import sequence_regression

# task -> units, steps and widths (bits of weights / of everything else)
PROTOCOL: dict[str, dict[str, Any]] = {
    "keyword_spotting": {
        "size": 32,
        "steps": 800,
        "further": 800,
        "bits": ["8/8", "4/8", "3/8", "2/8"],
    },
    "character_model": {
        "size": 256,
        "steps": 3000,
        "further": 1500,
        "bits": ["8/8", "4/8", "3/8"],
    },
    "sequence_regression": {
        "size": 32,
        "steps": 1000,
        "further": 1000,
        "bits": ["8/16", "8/8", "4/8"],
    },
}
SQNR_SAMPLES = 64


def task_of(name: str, data: Path, device: torch.device, size: int) -> common.Task:
    """The task of an example, with a GRU of `size` units."""
    if name == "keyword_spotting":
        return keyword_spotting.KeywordSpotting(data / "spoken_digits.npz", device, size)
    if name == "character_model":
        return character_model.CharacterModel(data / "tinyshakespeare.txt", device, size, 100)
    return sequence_regression.Tanks(device, size, 200)


def sqnr_of(model: nn.Module, task: common.Task) -> dict[str, Any]:
    """Signal over noise of every operator in dB, on some training samples."""
    found: dict[str, float] = {}

    def record(gru: QuantGRU, inputs: tuple[Tensor, ...]) -> None:
        if not found:
            found.update(operator_sqnr(gru, *inputs))

    grus = [module for module in model.modules() if isinstance(module, QuantGRU)]
    hooks = [gru.register_forward_pre_hook(record) for gru in grus]
    with torch.no_grad():
        task.loss(model, torch.arange(min(SQNR_SAMPLES, task.train_size)))
    for hook in hooks:
        hook.remove()
    return {"sqnr": found} if found else {}


def verdict(results: list[common.Result], bits: list[str]) -> list[str]:
    """What the figures say, a line for each width."""
    (measure, *_) = results[0]["float"]["figures"]

    def values(row: str, which: str = measure) -> list[float]:
        return [result[row]["figures"][which] for result in results]

    best = statistics.fmean(values("float, longer"))
    spread = statistics.stdev(values("float, longer")) if len(results) > 1 else float("nan")
    lines = []
    for width in bits:
        after, trained = (
            statistics.fmean(values(f"{width} {kind}")) for kind in ("after", "trained")
        )
        text = (
            f"{width}: {measure} {best:.4g} float (spread {spread:.2g}), {after:.4g} after "
            f"({(after - best) / spread:.1f} spreads), {trained:.4g} trained "
            f"({(trained - best) / best:+.1%})"
        )
        share = common.recovered(results, width, measure)
        if share == share:
            text += f"; won back {share:.0%}"
        if "accuracy %" in results[0]["float"]["figures"]:
            points = [
                statistics.fmean(values(row, "accuracy %"))
                for row in (f"{width} trained", "float, longer")
            ]
            text += f"; accuracy {points[0] - points[1]:+.2f} points"
        lines.append(text)
    return lines


def measure(args: argparse.Namespace) -> None:
    """Run the tasks and write what they give."""
    processes = common.Processes.join(args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        for name in args.tasks:
            chosen = PROTOCOL[name]
            task = task_of(name, args.data, processes.device, args.size or chosen["size"])
            for seed in args.seeds:
                options = argparse.Namespace(
                    bits=args.bits or chosen["bits"],
                    config=[],
                    steps=max(2, round(chosen["steps"] * args.share)),
                    further=max(2, round(chosen["further"] * args.share)),
                    seeds=[seed],
                    json=args.output / f"{name}-{seed}.json",
                )
                common.run(task, options, processes, lambda model, t=task: sqnr_of(model, t))
    finally:
        processes.leave()


def read(folder: Path) -> dict[str, Any]:
    """What runs wrote: task -> document, seeds joined."""
    found: dict[str, Any] = {}
    for name in PROTOCOL:
        for file in sorted(folder.glob(f"{name}-*.json")):
            document = json.loads(file.read_text(encoding="utf-8"))
            if name in found:
                found[name]["seeds"] += document["seeds"]
                found[name]["results"] += document["results"]
            else:
                found[name] = document
    return found


def report(documents: dict[str, Any]) -> None:
    """Print a table and the verdict for each task."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    for document in documents.values():
        results = document["results"]
        title = f"{document['task']}, seeds {document['seeds']}"
        console.print(common.table(title, results, box.MARKDOWN))
        widths = [name.removesuffix(" trained") for name in results[0] if "trained" in name]
        print("\n".join(verdict(results, widths)))
        print(f"{document['machine']}; {document['command']}", end="\n\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with the data; without it, only report")
    parser.add_argument("--output", type=Path, default=Path("accuracy"), help="folder of figures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="+", choices=PROTOCOL, default=list(PROTOCOL))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bits", nargs="+", metavar="W/A", help="other widths")
    parser.add_argument("--size", type=int, help="other number of units")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, for a quick look")
    parser.add_argument("--images", type=Path, help="folder to draw into")
    args = parser.parse_args()
    if args.data is not None:
        measure(args)
    if int(os.environ.get("RANK", 0)):
        return
    documents = read(args.output)
    report(documents)
    if args.images is not None:
        from accuracy_plots import draw

        draw(documents, args.images)


if __name__ == "__main__":
    main()
