"""What quantization costs published models: float against every preset.

    python benchmarks/real_models.py [--models NAME ..] [--presets NAME ..] [--method NAME ..]
        [--output FILE] [--against FILE] [--markdown]

Measures the models of examples/real_*.py: the figures of each task, and the signal over noise of
each GRU's output on inputs that calibration did not see. Every GRU gets the inputs and states of
the float model. `--output` writes the figures, `--against` also prints what changed since a file
of them was written, `--markdown` prints the table of docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from real_common import PRESETS, measure, table
from real_denoiser import Denoiser
from real_phonemes import Phonemes
from real_quality import Quality
from real_streaming_denoiser import StreamingDenoiser

MODELS = {
    "phonemes": Phonemes,
    "denoiser": Denoiser,
    "quality": Quality,
    "streaming": StreamingDenoiser,
}
Found = dict[str, dict[str, dict[str, dict[str, float]]]]  # method, model, row, preset


def changes(before: Found, after: Found, least: float = 0.05) -> list[str]:
    """Lines of the figures that differ by at least `least` of their unit, or by 5 percent."""
    lines = []
    for method, models in after.items():
        # a method that is new is compared with the default of before
        old = before.get(method, before["histogram"])
        for model, rows in models.items():
            for row, values in rows.items():
                for preset, value in values.items():
                    was: Any = old.get(model, {}).get(row, {}).get(preset)
                    if was is not None and abs(value - was) >= min(least, 0.05 * abs(was)):
                        place = f"{method:>10} {model:>10} {row:>30} {preset:>10}"
                        lines.append(f"{place} {was:8.4g} -> {value:8.4g} ({value - was:+.3g})")
    return lines


def markdown(models: dict[str, dict[str, dict[str, float]]], presets: list[str]) -> list[str]:
    """A table of all models; of more than three GRUs it has the worst one."""
    columns = ["float", *presets]
    lines = [
        f"| model | figure | {' | '.join(columns)} |",
        f"|---|---|{'---:|' * len(columns)}",
    ]
    for model, rows in models.items():
        grus = {name: values for name, values in rows.items() if name.startswith("state of ")}
        shown = {name: values for name, values in rows.items() if name not in grus}
        if len(grus) > 3:
            worst = {each: min(values[each] for values in grus.values()) for each in presets}
            shown[f"worst of {len(grus)} GRUs, dB"] = worst
        else:
            shown |= grus
        for i, (name, values) in enumerate(shown.items()):
            cells = [f"{values[each]:.3g}" if each in values else "" for each in columns]
            lines.append(f"| {'' if i else model} | {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    parser.add_argument("--method", nargs="+", default=["histogram"], help="of calibration")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--against", type=Path, metavar="FILE", help="figures of before")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console, found = Console(width=100), {}
    models = {name: MODELS[name]() for name in options.models}
    for method in options.method:
        for name, published in models.items():
            started = time.perf_counter()
            rows = measure(published, options.presets, method)
            title = f"{published.name}, calibration {method}"
            console.print(table(title, rows, options.presets))
            console.print(f"{time.perf_counter() - started:.0f} s", highlight=False)
            found.setdefault(method, {})[name] = rows
            if options.output is not None:
                options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        for rows in found.values():
            print(*markdown(rows, options.presets), sep="\n")
    if options.against is not None:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        print(*changes(before, found), sep="\n")


if __name__ == "__main__":
    main()
