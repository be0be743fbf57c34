"""What the examples share: the command line, processes, training, the comparison and its table.

Every example trains one float model and goes on from it in several ways, each for the same number
of steps, of the same data, at the same learning rate:

    float             the float model
    float, longer     float training goes on
    W/A after         `float, longer`, quantized after training (PTQ)
    W/A trained       the float model, quantized, then trained as such (QAT)

W are the bits of the two weight matrices, A those of everything else.

With torchrun each process takes its share of every batch, of calibration and of the test set.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from quant_gru import QuantConfig, calibrate_model, convert_model

CALIBRATION_BATCHES = 8
MAX_GRADIENT = 1.0


class Task(ABC):
    """Data, a model for them and what to judge it by.

    Attributes:
        name: What it is, for people.
        batch_size: Samples of a training step, all processes together.
        train_size: Training samples.
        test_size: Test samples.
        learning_rate: Highest learning rate of the float training.
        further_rate: The same of all training that follows.
    """

    name: str
    batch_size: int
    train_size: int
    test_size: int
    learning_rate = 1e-2
    further_rate = 2e-3

    @abstractmethod
    def model(self) -> nn.Module:
        """A new float model, on the CPU."""

    @abstractmethod
    def loss(self, model: nn.Module, index: Tensor) -> Tensor:
        """Mean loss () of the training samples `index`, int64 (N,)."""

    @abstractmethod
    def score(self, model: nn.Module, index: Tensor) -> list[float]:
        """Sums over the test samples `index`, int64 (N,); the last one is what to divide by."""

    @abstractmethod
    def report(self, means: list[float]) -> dict[str, float]:
        """Figures by name, of the means of `score`; the first is a loss."""


@dataclass(frozen=True)
class Processes:
    """This process among those of torchrun; the only one without it."""

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def join(cls, device: str) -> Processes:
        """Join the others: gloo on the CPU, NCCL on CUDA.

        A device that is not there ends the program with one line and exit code 2.
        """
        local = int(os.environ.get("LOCAL_RANK", 0))
        if device not in ("cpu", "cuda"):
            _refuse(f"Expected --device to be cpu or cuda, got {device!r}")
        if device == "cuda" and local >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            _refuse(f"Expected a CUDA device for each process, got {count} (--device cuda)")
        found = torch.device(device)
        if found.type == "cuda":
            found = torch.device("cuda", local)
            torch.cuda.set_device(found)
        if "WORLD_SIZE" not in os.environ:
            return cls(device=found)
        dist.init_process_group("nccl" if found.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), found)

    def leave(self) -> None:
        """Leave the others."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def share(self, index: Tensor) -> Tensor:
        """This process's part of `index` (N,)."""
        return index[self.rank :: self.count]

    def sum(self, values: list[float]) -> list[float]:
        """The sum of all processes' values."""
        if self.count == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return list(total.tolist())


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def parser(description: str, steps: int) -> argparse.ArgumentParser:
    """The options that all examples have."""
    made = argparse.ArgumentParser(description=description.partition("\n")[0])
    cuda = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", default=cuda, help="cpu or cuda (default: %(default)s)")
    made.add_argument("--bits", nargs="*", default=["8/8", "4/8"], metavar="W/A")
    made.add_argument(
        "--config", nargs="*", default=[], metavar="JSON", help="files of QuantConfig"
    )
    made.add_argument("--steps", type=int, default=steps, help="of float training")
    made.add_argument("--further", type=int, help="of all that follows (default: --steps / 2)")
    made.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED")
    made.add_argument("--json", type=Path, metavar="FILE", help="write figures and curves")
    return made


def configurations(options: argparse.Namespace) -> dict[str, QuantConfig]:
    """The chosen configurations by name."""
    found = {}
    for text in options.bits:
        try:
            weights, activations = (int(bits) for bits in text.split("/"))
        except ValueError:
            raise SystemExit(f"Expected --bits to be like 4/8, got {text!r}") from None
        config = QuantConfig.uniform(activations, is_symmetric=False)
        for name in ("weight.W", "weight.R"):
            config = config.replace(name, bitwidth=weights)
        found[text] = config
    return found | {Path(path).stem: QuantConfig.from_json(path) for path in options.config}


def batches(size: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Indices of batch after batch, all samples in a new order in each round; without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(size, generator=generator)
        yield from order[: size // batch_size * batch_size].split(batch_size)


def fit(
    model: nn.Module, task: Task, processes: Processes, steps: int, rate: float, seed: int
) -> list[float]:
    """Train a model in place: Adam, one-cycle learning rate, clipped gradients.

    Returns:
        The loss of every step, of this process's samples.
    """
    model.train()
    among = nn.parallel.DistributedDataParallel(model) if processes.count > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(steps, 2))
    losses: list[Tensor] = []
    for index in islice(batches(task.train_size, task.batch_size, seed), steps):
        loss = task.loss(among, processes.share(index))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    model.eval()
    return [] if not losses else list(torch.stack(losses).tolist())


def quantized(model: nn.Module, config: QuantConfig, task: Task, processes: Processes) -> nn.Module:
    """A copy of a float model, calibrated on training data."""
    drawn = islice(batches(task.train_size, task.batch_size, 0), CALIBRATION_BATCHES)
    return calibrate_model(
        convert_model(model, config),
        [processes.share(index) for index in drawn],
        forward_fn=lambda module, index: task.loss(module, index.cpu()),
        progress=False,
    )


@torch.no_grad()
def judge(model: nn.Module, task: Task, processes: Processes) -> dict[str, float]:
    """The task's figures of a model, on the whole test set."""
    *sums, count = processes.sum(task.score(model, processes.share(torch.arange(task.test_size))))
    return task.report([value / count for value in sums])


Result = dict[str, dict[str, Any]]
Look = Callable[[nn.Module], dict[str, Any]]


def compare(
    task: Task,
    options: argparse.Namespace,
    processes: Processes,
    seed: int,
    look: Look = lambda model: {},
) -> Result:
    """Everything of one seed: name -> {figures, curve}, and what `look` says of each model."""
    further = options.steps // 2 if options.further is None else options.further
    found: Result = {}

    def add(name: str, model: nn.Module, curve: list[float]) -> None:
        found[name] = {"figures": judge(model, task, processes), "curve": curve, **look(model)}

    def go_on(model: nn.Module) -> list[float]:
        return fit(model, task, processes, further, task.further_rate, seed + 1000)

    torch.manual_seed(seed)
    model = task.model().to(processes.device)
    curve = fit(model, task, processes, options.steps, task.learning_rate, seed)
    add("float", model, curve)
    longer = copy.deepcopy(model)
    add("float, longer", longer, go_on(longer))
    for name, config in configurations(options).items():
        add(f"{name} after", quantized(longer, config, task, processes), [])
        trained = quantized(model, config, task, processes)
        add(f"{name} trained", trained, go_on(trained))
    return found


def recovered(results: list[Result], name: str, measure: str) -> float:
    """Share of what quantization after training loses that training with it wins back.

    NaN where the loss is no more than float models differ from seed to seed.
    """

    def values(row: str) -> list[float]:
        return [result[row]["figures"][measure] for result in results]

    best, after, trained = (
        statistics.fmean(values(row))
        for row in ("float, longer", f"{name} after", f"{name} trained")
    )
    spread = statistics.stdev(values("float, longer")) if len(results) > 1 else 0.0
    return (after - trained) / (after - best) if after - best > spread else float("nan")


def table(title: str, results: list[Result], style: box.Box = box.SIMPLE_HEAD) -> Table:
    """One row per model: the mean of all seeds and, if there are several, their deviation."""
    made = Table(box=style, title=title, title_justify="left")
    made.add_column("model", no_wrap=True)
    measures = list(results[0]["float"]["figures"])
    for measure in measures:
        made.add_column(measure, justify="right")
    made.add_column("of the loss won back", justify="right")
    for name in results[0]:
        cells = []
        for measure in measures:
            values = [result[name]["figures"][measure] for result in results]
            spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.4g}{spread}")
        width, _, kind = name.rpartition(" ")
        share = recovered(results, width, measures[0]) if kind == "trained" else float("nan")
        made.add_row(name, *cells, f"{share:.0%}" if share == share else "")
    return made


def run(
    task: Task,
    options: argparse.Namespace,
    processes: Processes,
    look: Look = lambda model: {},
) -> list[Result]:
    """Compare for every seed; the first process prints the table and writes the figures."""
    if task.batch_size % processes.count:
        raise SystemExit(
            f"Expected the number of processes to be a divisor of {task.batch_size} (the batch "
            f"size), got {processes.count}"
        )
    started = time.perf_counter()
    results = [compare(task, options, processes, seed, look) for seed in options.seeds]
    if processes.rank == 0:
        console = Console(width=None if sys.stdout.isatty() else 110)
        console.print(table(task.name, results))
        seconds = time.perf_counter() - started
        place = processes.device.type
        if place == "cuda":
            place = torch.cuda.get_device_name()
        facts = f"{processes.count} x {place}, torch {torch.__version__}, {seconds:.0f} s"
        console.print(facts, highlight=False)
        if options.json is not None:
            document = {
                "task": task.name,
                "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
                "machine": facts,
                "seeds": options.seeds,
                "results": results,
            }
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return results
