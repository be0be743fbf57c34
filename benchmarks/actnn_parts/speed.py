"""Memory and speed of training with actnn on a GPU, beside what PyTorch offers, in one run.

    python benchmarks/actnn.py speed                             # all models, all rows
    python benchmarks/actnn.py speed --models gpt --rows exact fit --budgets 3 4 6 --match
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python benchmarks/actnn.py speed --largest 16
    python benchmarks/actnn.py speed --json rows.json && python benchmarks/actnn.py pareto rows.json

Models: ResNet-50 at 224 x 224, batch 256, in TF32 and in bfloat16 channels_last; 12 GPT blocks
(width 1024, 16 heads, 16 x 1024 tokens) in bfloat16; a bidirectional GRU of 3 layers.

A step is forward, backward and clearing of the gradients. `held` is what the forward leaves
allocated; `peak` the most that is allocated in a step, parameters included; `samples/s` comes from
the median of several steps. All by PyTorch's allocator and CUDA events. `--largest GiB` finds the
largest batch of each row within so much memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import actnn
from actnn.planning import Planner
from actnn.planning.solver import smallest_budget
from actnn.planning.units import find_units

MIB = 2**20
USABLE = 0.97  # of the memory; the allocator cannot fill all gaps
TRIES = 8  # of the largest batch


class GPTBlock(nn.Module):
    """Attention and a multilayer perceptron, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, C) to the same."""
        n, t, c = x.shape
        q, k, v = (
            part.view(n, t, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(c, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, c))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GRUTagger(nn.Module):
    """A GRU of three layers in both directions, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(256, 512, num_layers=3, bidirectional=True)
        self.head = nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        """(T, N, 256) to (T, N, 64)."""
        return self.head(self.gru(x)[0])


@dataclass
class Task:
    """A model with its batch; `blocks` are the paths of what is recomputed block by block."""

    make: Callable[[], nn.Module]
    example: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: int
    tf32: bool = False
    blocks: bool = True


def resnet() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50()


def classify(model: nn.Module, example: Any) -> Tensor:
    x, y = example
    return nn.functional.cross_entropy(model(x).float(), y)


def images(dtype: torch.dtype, layout: torch.memory_format) -> Callable[[int], Any]:
    def example(batch: int) -> Any:
        x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype)
        return x.to(memory_format=layout), torch.randint(1000, (batch,), device="cuda")

    return example


def square(model: nn.Module, example: Any) -> Tensor:
    return model(example).float().square().mean()


TASKS = {
    "resnet_tf32": Task(
        lambda: resnet().cuda(),
        images(torch.float32, torch.contiguous_format),
        classify,
        256,
        tf32=True,
    ),
    "resnet_bf16": Task(
        lambda: resnet().cuda().to(torch.bfloat16, memory_format=torch.channels_last),
        images(torch.bfloat16, torch.channels_last),
        classify,
        256,
    ),
    "gpt": Task(
        lambda: nn.Sequential(*[GPTBlock(1024, 16) for _ in range(12)]).cuda().bfloat16(),
        lambda batch: torch.randn(batch, 1024, 1024, device="cuda", dtype=torch.bfloat16),
        square,
        16,
    ),
    "gru": Task(
        lambda: GRUTagger().cuda(),
        lambda batch: torch.randn(512, batch, 256, device="cuda"),
        square,
        64,
        tf32=True,
        blocks=False,
    ),
}


@dataclass
class Row:
    """One line of the table."""

    model: str
    row: str
    batch: int
    held: float
    peak: float
    samples: float
    note: str = ""


def checkpointed(model: nn.Module) -> nn.Module:
    """Run each block under torch.utils.checkpoint, as a user would."""
    for unit in find_units(model):
        if unit.composite:
            run = unit.module.forward
            unit.module.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
    return model


@contextmanager
def memory_budget(share: float) -> Iterator[None]:
    with torch._functorch.config.patch(activation_memory_budget=share):
        yield


ROWS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "exact": lambda model: model,
    "checkpoint": checkpointed,
    "compile": torch.compile,  # type: ignore[dict-item]
    "compile 0.5": torch.compile,  # type: ignore[dict-item]
    "compile 0.2": torch.compile,  # type: ignore[dict-item]
    "lossless": lambda model: actnn.compress(model, bits=32),
    "8 bits": lambda model: actnn.compress(model, bits=8),
    "4 bits": lambda model: actnn.compress(model, bits=4),
    "2 bits": lambda model: actnn.compress(model, bits=2),
    "2 bits adaptive": lambda model: actnn.compress(model, level="L3"),
    "8 bits compiled": lambda model: torch.compile(actnn.compress(model, bits=8)),
    "4 bits compiled": lambda model: torch.compile(actnn.compress(model, bits=4)),
    "2 bits compiled": lambda model: torch.compile(actnn.compress(model, bits=2)),
}
SHARES = {"compile 0.5": 0.5, "compile 0.2": 0.2}  # of what torch.compile would save
PEERS = ("exact", "checkpoint", "compile", "compile 0.5", "compile 0.2")
FITS = ("fit", "fit compiled")


def measure(
    task: Task, model: nn.Module, example: Any, batch: int, steps: int, graph: bool = False
) -> tuple[float, ...]:
    """Held MiB, peak MiB and samples a second; with `graph`, of steps in a CUDA graph."""

    def step() -> float:
        before = torch.cuda.memory_allocated()
        loss = task.loss(model, example)
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        model.zero_grad(set_to_none=True)
        return held

    for _ in range(5):
        held = step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated()
    run: Callable[[], object] = step
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        run = captured.replay
    times = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    median = statistics.median(a.elapsed_time(b) for a, b in times)
    return held / MIB, peak / MIB, batch / median * 1e3


def clean() -> None:
    """Give back the memory of the row before, also what an error held."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def prepared(name: str, batch: int) -> tuple[Task, nn.Module, Any]:
    clean()
    task = TASKS[name]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = task.tf32
    torch.manual_seed(0)
    return task, task.make(), task.example(batch)


def run_row(name: str, row: str, batch: int, steps: int, graph: bool = False) -> Row:
    """A row without a budget; one that runs out of memory has zeros."""
    try:
        task, model, example = prepared(name, batch)
        with memory_budget(SHARES.get(row, 1.0)):
            model = ROWS[row](model)
            return Row(name, row, batch, *measure(task, model, example, batch, steps, graph))
    except torch.OutOfMemoryError as error:
        return Row(name, row, batch, 0.0, 0.0, 0.0, f"OutOfMemoryError: {error}"[:120])


def fit_rows(name: str, row: str, budgets: list[float], batch: int, steps: int) -> Iterator[Row]:
    """One row for each budget in GiB; the model is measured once."""
    task, model, example = prepared(name, batch)
    compiled = row == "fit compiled"
    planner = None
    try:
        start = time.perf_counter()
        planner = Planner(model, example, loss=task.loss, compile=compiled)
        print(f"    {name} {row}: measured in {time.perf_counter() - start:.0f} s", flush=True)
        for budget in sorted(budgets, reverse=True):
            label = f"{row} {budget:.4g} GiB"
            try:
                start = time.perf_counter()
                plan = planner.plan(round(budget * 2**30))
                print(
                    f"    {name} {label}: planned in {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
                yield Row(
                    name, label, batch, *measure(task, model, example, batch, steps), str(plan)
                )
            except actnn.ActNNError as error:
                yield Row(name, label, batch, 0.0, 0.0, 0.0, str(error))
                return  # smaller budgets fail, too
    except (torch.OutOfMemoryError, actnn.ActNNError) as error:
        yield Row(name, row, batch, 0.0, 0.0, 0.0, f"{type(error).__name__}: {error}"[:200])


def peak_of(name: str, row: str, batch: int) -> float:
    """Peak of the second step in MiB; of `fit`, that of the plan with the lowest peak.

    Raises:
        torch.OutOfMemoryError: The memory is too small.
    """
    task, model, example = prepared(name, batch)
    if row in FITS:
        planner = Planner(model, example, loss=task.loss, compile=row == "fit compiled")
        return smallest_budget(planner.costs) / MIB
    with memory_budget(SHARES.get(row, 1.0)):
        model = ROWS[row](model)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            task.loss(model, example).backward()
            model.zero_grad(set_to_none=True)
        return torch.cuda.max_memory_allocated() / MIB


def largest_batch(name: str, row: str, gib: float, steps: int) -> Row:
    """The largest batch that trains within so much memory, within a few per cent.

    Two smaller batches tell how the peak grows. Then the batch where it should reach the limit is
    tried, and others by what came out.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))
    few, limit = max(1, TASKS[name].batch // 4), gib * 1024 * USABLE
    best = Row(name, row, 0, 0.0, 0.0, 0.0, f"not even {2 * few}")
    try:
        low, high = peak_of(name, row, few), peak_of(name, row, 2 * few)
        fits, ceiling = 2 * few, sys.maxsize
        least = 0.01 * low  # so that a peak that hardly grows divides nothing by 0
        batch = few + int((limit - low) / max(high - low, least) * few)
        for _ in range(TRIES):
            if row in FITS:
                found = next(fit_rows(name, row, [gib * USABLE], batch, steps))
            else:
                found = run_row(name, row, batch, steps)
            if found.samples:
                best, fits = found, batch
                grown = few + int((limit - low) / max(found.peak - low, least) * (batch - few))
                batch = grown if grown < ceiling else (fits + ceiling) // 2
            else:
                first = ceiling == sys.maxsize
                batch, ceiling = int(0.93 * batch) if first else (fits + batch) // 2, batch
            if batch <= 1.03 * fits:
                break
    except torch.OutOfMemoryError:
        pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return best


def print_row(row: Row) -> None:
    print(
        f"{row.model:<12} {row.row:<22} {row.batch:6d} {row.held:9.0f} {row.peak:9.0f} "
        f"{row.samples:9.0f}",
        flush=True,
    )
    if row.note:
        print("    " + row.note.replace("\n", "\n    "), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *FITS], default=[*ROWS, *FITS])
    parser.add_argument("--budgets", nargs="+", type=float, default=[3, 4, 6, 8], help="GiB")
    parser.add_argument("--largest", type=float, help="find the largest batch within so many GiB")
    parser.add_argument("--match", action="store_true", help="fit at the peaks of the peers, too")
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--graph", action="store_true", help="steps in CUDA graphs, but for fit")
    parser.add_argument("--json", help="file for the rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(
            "Expected a CUDA device, got none; examples/train_in_less_memory.py needs none"
        )
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}")
    print(f"{'model':<12} {'row':<22} {'batch':>6} {'held':>9} {'peak':>9} {'samples/s':>9}")
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print_row(row)
        if options.json:
            content = {"device": device, "rows": [asdict(each) for each in rows]}
            Path(options.json).write_text(json.dumps(content), encoding="utf-8")

    for name in options.models:
        batch = options.batch or TASKS[name].batch
        for row in options.rows:
            if options.largest:
                add(largest_batch(name, row, options.largest, options.steps))
            elif row not in FITS:
                add(run_row(name, row, batch, options.steps, options.graph))
            else:
                peers = [each for each in rows if each.model == name and each.row in PEERS]
                peaks = [1.001 * each.peak / 1024 for each in peers if each.samples]
                budgets = [*options.budgets, *(peaks if options.match else [])]
                for found in fit_rows(name, row, budgets, batch, options.steps):
                    add(found)
                    compare(found, peers)


def compare(found: Row, peers: list[Row]) -> None:
    """Print the speed beside that of each peer whose peak is at least as high."""
    for peer in peers:
        if found.samples and 0 < peer.peak and 0.9 * peer.peak <= found.peak <= 1.001 * peer.peak:
            ratio = found.samples / peer.samples
            print(f"    {ratio:.3f} times the speed of {peer.row} at its peak", flush=True)
