"""Widths chosen by `allocate_bits` against uniform widths, on tasks, published and random models.

    python benchmarks/allocation.py --data FOLDER [--cases NAME ..] [--fit-weights] [--widths ..]
    python benchmarks/allocation.py --only-fit 4/8 4/16 [--cases NAME ..]
    python benchmarks/allocation.py --bound [--fit-weights] [--widths ..] [--cases NAME ..]

For each model: the bytes of weights and tables and the decibels at the outputs with 8 bits (and
with 4, or with --bits) everywhere; the decibels that `allocate_bits` reaches with as many bytes,
predicted and measured; and the bytes that it needs for as many decibels: those of C source, and
those of a file, where weights of any width have no gaps (`packed`). Widths are 4, 8 and 16, of
gates 4 to 8 and 16, of weights 2 to 8 and 16. `on other data` is data that neither calibration nor
the choice has seen. `--bound` prints how many bytes any widths need at least for as many decibels
as 8 bits, without adding errors up. `--only-fit` has the decibels of published models with weights
of W bits and others of A bits; of tasks their loss, and the share that fitted codes win back.

FOLDER holds spoken_digits.npz and tinyshakespeare.txt; `--share 0.1` trains a tenth of the steps.
`--models FOLDER` keeps what is trained for a further call.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import character_model
import common
import keyword_spotting
import sequence_regression
from real_common import calls_of_grus
from real_denoiser import Denoiser
from real_phonemes import Phonemes
from real_quality import Quality
from real_streaming_denoiser import StreamingDenoiser

from quant_gru import QuantConfig, allocate_bits, calibrate_model, convert_model
from quant_gru.analysis.outputs import named_tensors
from quant_gru.analysis.sizes import Sizes, sizes_of
from quant_gru.analysis.sqnr import decibels, energies
from quant_gru.calibration.batches import run_batch
from quant_gru.whole_models.convert import find_grus

WIDTHS = ["gate.*=4,5,6,7,8,16", "weight.*=2,3,4,5,6,7,8,16", "*=4,8,16"]
KEPT: Path | None = None
Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Case:
    """A float model with data to choose by and data to measure on."""

    model: nn.Module
    data: list[Any]
    test: list[Any]
    forward: Forward | None = None
    task: common.Task | None = None


def several(model: nn.Module, batch: Any) -> Any:
    """Run a model of several inputs."""
    return model(*batch)


def task_case(task: common.Task, steps: int, batch: Callable[[slice], Any]) -> Case:
    """A model that is trained here."""
    torch.manual_seed(0)
    model = task.model()
    file = None if KEPT is None else KEPT / f"{task.name} {steps}.pt"
    if file is not None and file.exists():
        model.load_state_dict(torch.load(file))
    else:
        common.fit(model, task, common.Processes(), steps, task.learning_rate, 0)
        if file is not None:
            torch.save(model.state_dict(), file)
    model.eval()
    return Case(model, [batch(slice(0, 128))], [batch(slice(128, 256))], several, task)


def digits(folder: Path, share: float) -> Case:
    """Spoken digits."""
    task = keyword_spotting.KeywordSpotting(folder / "spoken_digits.npz", torch.device("cpu"), 32)

    def batch(which: slice) -> Any:
        part = task.test.select(torch.arange(task.test_size)[which])
        return part.features[:, : int(part.lengths.max())], part.lengths

    return task_case(task, round(800 * share), batch)


def characters(folder: Path, share: float) -> Case:
    """Characters."""
    text = folder / "tinyshakespeare.txt"
    task = character_model.CharacterModel(text, torch.device("cpu"), 256, 100)
    task.test = tuple(each[:, :256] for each in task.test)

    def batch(which: slice) -> Any:
        windows = task.train[torch.arange(256)[which] * 1009 % task.train_size, :-1]
        return (windows[:32],)

    return task_case(task, round(3000 * share), batch)


def tanks(folder: Path, share: float) -> Case:
    """Two tanks."""
    task = sequence_regression.Tanks(torch.device("cpu"), 32, 200)
    return task_case(task, round(1000 * share), lambda which: (task.x[task.train_size :][which],))


def whole(make: Callable[[], Any]) -> Case:
    """A published model."""
    published = make()
    return Case(published.model, list(published.calibration), list(published.test), several)


def part(make: Callable[[], Any], name: str = "") -> Case:
    """A GRU of a published model, the first if none is named, with what it gets there."""
    published = make()
    name = name or next(iter(find_grus(convert_model(published.model))))

    def arguments(inputs: Any) -> list[Any]:
        return [call.arguments for call in calls_of_grus(published.model, inputs)[name]]

    data, test = arguments(published.calibration), arguments(published.test)
    return Case(published.model.get_submodule(name), data, test, several)


def random_gru(seed: int) -> Case:
    """A random GRU, with inputs that change slowly."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    torch.manual_seed(seed)
    C, H, layers = draw(4, 16, 40), draw(16, 32, 64), draw(1, 2)
    model = nn.GRU(C, H, layers, bidirectional=draw(0, 1) == 1)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= draw(1, 2, 4)
    x = torch.randn(2, 64, 16, C, generator=generator).cumsum(1) / 4
    return Case(model, [x[0]], [x[1]])


CASES: dict[str, Callable[[Path, float], Case]] = {
    "spoken digits": digits,
    "characters": characters,
    "two tanks": tanks,
    "g2p-en, encoder": lambda folder, share: part(Phonemes, "encoder"),
    "g2p-en, decoder": lambda folder, share: part(Phonemes, "decoder"),
    "NSNet2": lambda folder, share: whole(Denoiser),
    "PLCMOS": lambda folder, share: whole(Quality),
    "PLCMOS, first GRU": lambda folder, share: part(Quality),
    "GTCRN": lambda folder, share: whole(StreamingDenoiser),
    "GTCRN, first GRU": lambda folder, share: part(StreamingDenoiser),
    **{
        f"random {seed}": partial(lambda folder, share, seed: random_gru(seed), seed=seed)
        for seed in range(10)
    },
}


@torch.no_grad()
def measured(case: Case, model: nn.Module, data: list[Any]) -> float:
    """Signal over noise of the outputs in dB."""
    signal = noise = 0.0
    for batch in data:
        real, found = (
            [each for _, each in named_tensors(run_batch(m, batch, case.forward))]
            for m in (case.model, model)
        )
        for a, b in zip(real, found, strict=True):
            more = energies(a, b)
            signal, noise = signal + more[0], noise + more[1]
    return decibels(signal, noise)


@dataclass(frozen=True)
class Row:
    """Uniform widths against the chosen ones."""

    name: str
    bits: int
    sizes: Sizes
    uniform: float
    predicted: float
    on_data: float
    chosen: float
    needed: int
    packed: int
    off: tuple[float, ...]


def rows(
    name: str,
    case: Case,
    widths: dict[str, tuple[int, ...]],
    fit_weights: bool,
    uniform_bits: list[int],
) -> Iterator[Row]:
    """Compare a model at some widths of all operators."""
    found = None
    for bits in uniform_bits:
        model, sizes = uniform(case, bits)
        flash = sizes.flash
        dB = measured(case, model, case.test)
        if found is None:
            options = {"forward_fn": case.forward, "fit_weights": fit_weights, "progress": False}
            found = allocate_bits(case.model, case.data, {"flash": flash}, widths, **options)
        best = found.with_budget({"flash": flash}, progress=False)
        reached = {"sqnr": measured(case, model, case.data)}
        least = found.with_budget(reached, progress=False)
        packed = found.with_budget({**reached, "packed": math.inf}, progress=False)
        yield Row(
            name,
            bits,
            sizes,
            dB,
            best.chosen.predicted,
            best.chosen.measured or math.nan,
            measured(case, best.model, case.test),
            least.chosen.sizes.flash,
            packed.chosen.sizes.packed,
            tuple(abs(p.predicted - (p.measured or math.nan)) for p in best.front),
        )


def uniform(case: Case, bits: int) -> tuple[nn.Module, Sizes]:
    """A model with one width for all operators, and what it takes."""
    model = convert_model(case.model, QuantConfig.uniform(bits, is_symmetric=False))
    calibrate_model(model, case.data, case.forward, progress=False)
    return model.eval(), sizes_of(find_grus(model).values())


def bound(name: str, case: Case, widths: dict[str, tuple[int, ...]], fit_weights: bool) -> str:
    """Bytes for the decibels of 8 bits: those found, and fewer than any widths need.

    A width is possible if the decibels are reached with all other operators at the widest width;
    the widths of W and R are tried together. This holds as long as a wider operator does no harm.
    """
    model, sizes = uniform(case, 8)
    flash = sizes.flash
    sqnr = measured(case, model, case.data)
    options = {"forward_fn": case.forward, "fit_weights": fit_weights, "progress": False}
    found = allocate_bits(case.model, case.data, {"sqnr": sqnr}, widths, **options)
    problem, least = found._problem, 0.0
    for module in problem.trials.grus:
        blocks = {
            part.operators: list(zip(part.choices, costs, strict=True))
            for part in problem.parts
            if part.module == module
            for costs in [problem.block(part, ["flash"]).costs[:, 0].tolist()]
        }
        weights = [blocks.pop((each,)) for each in ("weight.W", "weight.R")]
        for operators, choices in blocks.items():
            least += min(
                cost
                for bits, cost in choices
                if all(
                    problem.predicted({module: {each: own}}) >= sqnr
                    for each, own in zip(operators, bits, strict=True)
                )
            )
        least += min(
            cost_W + cost_R
            for ((W,), cost_W), ((R,), cost_R) in itertools.product(*weights)
            if problem.measure({module: {"weight.W": W, "weight.R": R}}) >= sqnr
        )
    needed = found.chosen.sizes.flash
    return (
        f"| {name} | {flash:,} | {sqnr:.1f} | {needed:,} | {needed / flash - 1:+.0%} "
        f"| {least:,.0f} | {least / flash - 1:+.0%} |"
    )


def fitted(name: str, case: Case, bits: int, others: int) -> str:
    """Weights of few bits, nearest and fitted codes, on other data: decibels, or a task's loss."""
    task, data, forward = case.task, case.data, case.forward
    if task is not None:  # the batches that the examples calibrate with
        drawn = common.batches(task.train_size, task.batch_size, 0)
        data = list(itertools.islice(drawn, common.CALIBRATION_BATCHES))
        forward = task.loss
    found = [] if task is None else [loss(task, case.model)]
    for fit in (False, True):
        config = QuantConfig.uniform(others, is_symmetric=False)
        for each in ("W", "R"):
            config = config.replace(each, bitwidth=bits)
        model = convert_model(case.model, config)
        calibrate_model(model, data, forward, progress=False, fit_weights=fit)
        model.eval()
        found.append(measured(case, model, case.test) if task is None else loss(task, model))
    if task is None:
        return f"| {name} | {bits}/{others} | | {found[0]:.1f} dB | {found[1]:.1f} dB | |"
    real, nearest, of_fitted = found
    figures = " | ".join(f"{each:.4g}" for each in (real, nearest, of_fitted))
    return (
        f"| {name} | {bits}/{others} | {figures} | {(nearest - of_fitted) / (nearest - real):.1%} |"
    )


@torch.no_grad()
def loss(task: common.Task, model: nn.Module) -> float:
    """The task's loss on its test data."""
    *sums, count = task.score(model, torch.arange(task.test_size))
    return float(next(iter(task.report([each / count for each in sums]).values())))


TITLES = ("model", "bits", "bytes", "uniform dB", "predicted dB", "measured dB", "on other data dB")


def cells(row: Row) -> list[str]:
    """A row of the table."""
    sizes = row.sizes
    found = [row.name, str(row.bits), f"{sizes.flash:,}", f"{row.uniform:.1f}"]
    found += [f"{each:.1f}" for each in (row.predicted, row.on_data, row.chosen)]
    for needed, before in ((row.needed, sizes.flash), (row.packed, sizes.packed)):
        found += [f"{needed:,}", f"{needed / before - 1:+.0%}"]
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--models", type=Path, help="folder of models that are trained here")
    parser.add_argument("--fit-weights", action="store_true", help="fit weights of few bits")
    parser.add_argument(
        "--widths", nargs="+", default=WIDTHS, metavar="PATTERN=N,N,..", help="to choose from"
    )
    parser.add_argument(
        "--only-fit", nargs="+", metavar="W/A", help="only nearest against fitted codes"
    )
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 8], help="uniform widths")
    parser.add_argument("--bound", action="store_true", help="the fewest bytes that may be enough")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of training")
    options = parser.parse_args()
    global KEPT
    KEPT = options.models
    warnings.simplefilter("ignore")
    if options.only_fit:
        print("| model | weights/others | float | nearest | fitted | won back |")
        print("|---|---|" + "---:|" * 4)
        for name in options.cases:
            case = CASES[name](options.data, options.share)
            for bits, others in (each.split("/") for each in options.only_fit):
                print(fitted(name, case, int(bits), int(others)), flush=True)
        return
    widths = {
        pattern: tuple(map(int, found.split(",")))
        for pattern, _, found in (each.partition("=") for each in options.widths)
    }
    if options.bound:
        print("| model | bytes | dB | found | saved | at least | saved at most |")
        print("|---|" + "---:|" * 6)
        for name in options.cases:
            case = CASES[name](options.data, options.share)
            print(bound(name, case, widths, options.fit_weights), flush=True)
        return
    titles = [*TITLES, "bytes for as many dB", "saved", "packed", "saved"]
    print("| " + " | ".join(titles) + " |\n|---|" + "---:|" * (len(titles) - 1))
    found: list[Row] = []
    started = time.perf_counter()
    for name in options.cases:
        case = CASES[name](options.data, options.share)
        for row in rows(name, case, widths, options.fit_weights, options.bits):
            found.append(row)
            print("| " + " | ".join(cells(row)) + " |", flush=True)
    for bits in options.bits:
        own = [row for row in found if row.bits == bits]
        gains = statistics.fmean(row.chosen - row.uniform for row in own)
        saved = statistics.fmean(1 - row.needed / row.sizes.flash for row in own)
        packed = statistics.fmean(1 - row.packed / row.sizes.packed for row in own)
        front = [each for row in own for each in row.off]
        off = [abs(row.predicted - row.on_data) for row in own]
        print(
            f"{bits} bits: {gains:+.1f} dB with as many bytes on average; {saved:.0%} fewer bytes "
            f"for as many dB, {packed:.0%} packed; predicted within {max(off):.1f} dB of measured, "
            f"{statistics.fmean(off):.1f} on average; {sum(each <= 1 for each in front)} of "
            f"{len(front)} points of fronts within 1 dB, all within {max(front):.1f}"
        )
    print(f"{time.perf_counter() - started:.0f} s, torch {torch.__version__}")


if __name__ == "__main__":
    main()
