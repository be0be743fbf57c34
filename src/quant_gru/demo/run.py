"""The main job: train in float, quantize in five ways, compare, and write the int8 model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from quant_gru.demo.comparison import (
    CALIBRATION_BATCHES,
    Row,
    quantize,
    rows_of,
    variants,
)
from quant_gru.demo.data import Task, digits_task
from quant_gru.demo.model import SequenceClassifier
from quant_gru.demo.output import OutputFolder
from quant_gru.demo.spoken import spoken_task
from quant_gru.demo.tables import results_table, sqnr_table
from quant_gru.demo.training import train
from quant_gru.kernels.dispatch import executor_name

ONE_THREAD_UP_TO = 128
LEGEND = """\
agreement    test sequences with the same predicted class as float
GRU weights  the frozen GRU's file, with tables and scales, and its share of the
             float parameters; the linear layer stays float and is not counted
SQNR of h    signal over quantization noise of the GRU's output, in decibels
"""


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command line.

    Attributes:
        data: A spoken-digits npz; None for scikit-learn's handwritten digits.
        output: Folder for the checkpoint and the parameter file.
        epochs: Passes over the training data; None for the default of the task.
        hidden_size: Units of the GRU.
        seed: Determines the split, the initial weights and the order of the sequences.
    """

    data: Path | None = None
    output: Path = Path("demo_output")
    epochs: int | None = None
    hidden_size: int = 64
    seed: int = 0


def run_demo(options: DemoOptions, console: Console) -> list[Row]:
    """Run the job and print the results to `console`.

    Returns:
        The rows of the table: float, int8, int8_wide, w8a16, int16, int4 weights.

    Raises:
        DataError: The data or the output folder cannot be used.
    """
    with _threads(options.hidden_size):
        return _run(options, console)


def _run(options: DemoOptions, console: Console) -> list[Row]:
    started = time.perf_counter()
    task = digits_task(options.seed) if options.data is None else spoken_task(options.data)
    folder = OutputFolder.prepare(options.output)
    epochs = options.epochs or task.epochs
    _print_facts(console, task, options)

    model = _train(task, options, epochs, console)
    versions = {}
    for name, config in variants().items():
        with _progress(console, f"Calibrating {name}", CALIBRATION_BATCHES) as advance:
            versions[name] = quantize(model, config, task.train, on_batch=advance)
    folder.save(versions["int8"])
    rows = rows_of(model, versions, task.test)

    console.print(results_table(rows))
    console.print(LEGEND)
    console.print(sqnr_table(rows))
    steps = folder.next_steps(task.n_features, options.hidden_size, task.n_classes)
    console.print(steps, soft_wrap=True, markup=False)
    console.print(f"\nDone in {time.perf_counter() - started:.0f} s.")
    return rows


def _train(task: Task, options: DemoOptions, epochs: int, console: Console) -> SequenceClassifier:
    torch.manual_seed(options.seed)
    model = SequenceClassifier(task.n_features, options.hidden_size, task.n_classes)
    started = time.perf_counter()
    with _progress(console, "Training in float", epochs) as advance:
        train(model, task.train, epochs, options.seed, on_epoch=lambda _: advance())
    console.print(f"training: {epochs} epochs in {time.perf_counter() - started:.1f} s")
    return model


def _print_facts(console: Console, task: Task, options: DemoOptions) -> None:
    steps, classes = task.train.features.shape[1], task.n_classes
    for text in (
        f"data:     {task.name}",
        f"          {len(task.train)} training and {len(task.test)} test sequences "
        f"of up to {steps} steps x {task.n_features}",
        f"model:    GRU({task.n_features}, {options.hidden_size}), "
        f"Linear({options.hidden_size}, {classes}), seed {options.seed}",
        f"executor: {executor_name()}",
    ):
        console.print(text, soft_wrap=True, markup=False)


@contextmanager
def _threads(hidden_size: int) -> Iterator[None]:
    """Use one thread for small GRUs.

    Their matrices do not benefit from a second thread. If another process occupies the core of that
    thread, each step waits for it, and the job takes ten times as long.
    """
    before = torch.get_num_threads()
    if hidden_size <= ONE_THREAD_UP_TO:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(console: Console, text: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar that is removed at the end, and nothing if there is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    disabled = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as progress:
        bar = progress.add_task(text, total=total)
        yield lambda: progress.advance(bar)
