"""Digests of everything that the host plans for a GPU, which no GPU is needed for.

    python tests/cuda/launch_digests.py --seeds 200 > FILE

One line for each plan: its name, and digests of its form and gate arithmetic, of the layouts of its
recurrence, and of the launches of its calls with the texts and options of their kernels. Where only
code moves, two versions of the package print the same lines.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
sys.path.append(str(Path(__file__).parents[1] / "cpp"))

from cuda_library import KINDS, gpu_case
from random_plans import random_case

from kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.integer.call_form import CallForm
from quant_gru.kernels.cuda.forward import executor, launch_plan
from quant_gru.kernels.cuda.forward.stack import Stack
from quant_gru.kernels.cuda.machine import SOURCES
from quant_gru.kernels.cuda.plan import structure
from quant_gru.kernels.cuda.recurrence import planner

MACHINES = (
    ("sm_90a", {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}),
    ("sm_100", {1: 148, 2: 70, 4: 33, 8: 14, 16: 4}),
    ("sm_80", {1: 108}),
    ("sm_89", {1: 20}),
)
FORM = "narrow real words weight_bytes state_bytes wide_input out_bytes tables table_bytes fused"
FORM += " zoneout saturated powers in_int32"


class Recorder:
    """A machine that records launches, prepared or started."""

    def __init__(self, arch: str, clusters: dict[int, int]) -> None:
        self.arch, self._clusters = arch, clusters
        self.launches: list[tuple[Kernel, Grid, Any]] = []

    def clusters(self) -> dict[int, int]:
        return self._clusters

    def expect(self, kernel: Kernel) -> None:
        pass

    def prepare(self, kernel: Kernel, grid: Grid, arguments: Any) -> Any:
        self.launches.append((kernel, grid, arguments))

    launch = prepare

    def multiply(self, product: Any) -> None:
        return None

    def join(self, launches: Any) -> None:
        return None


def values_of(record: Any) -> list[Any]:
    """All numbers of a ctypes structure but addresses, nested ones included, in order."""
    if isinstance(record, ctypes.Array):
        return [value for each in record for value in values_of(each)]
    if not isinstance(record, ctypes.Structure):
        return [record]
    found = []
    for name, kind in record._fields_:
        if kind is not ctypes.c_void_p and getattr(kind, "_type_", None) is not ctypes.c_void_p:
            found += values_of(getattr(record, name))
    return found


def digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:16]


def gates_of(gates: Any) -> Any:
    return gates and (gates.real, tuple(gates.tables), gates.table_bytes)


def numbers_of(plan: Any) -> list[Any]:
    """The form of a plan, its gate arithmetic, and the contents of its tables."""
    form, frozen = structure.form_of(plan), structure.frozen_numbers(plan.frozen)
    found: list[Any] = [getattr(form, name) for name in FORM.split()]
    found += [gates_of(form.own), gates_of(form.recurrence), sorted(form.products.items())]
    found += [frozen.saturated and values_of(frozen.saturated)]
    reals = ("float", "double") if form.narrow else ("double",)
    found += [values_of(frozen.cells[real]) for real in reals]
    for table in (getattr(frozen.cells["double"], gate) for gate in "zrg"):
        if table.direct:
            found.append(ctypes.string_at(table.direct, 4 * table.entries))
        if table.lines:
            found.append(ctypes.string_at(table.lines, 8 * table.line_count))
    return found


def layouts_of(plan: Any, rng: random.Random) -> Iterator[Any]:
    """What the recurrence's planner chooses for the plan's form and many sizes."""
    form = structure.form_of(plan)
    for _ in range(30):
        H, N, D = rng.randint(1, 1100), rng.choice((1, 2, 7, 64, 300, 1024)), rng.choice((1, 2))
        _, clusters = rng.choice(MACHINES)
        shape = planner.choose(form, H, N, D, clusters)
        yield H, N, D, shape is None
        if shape is None:
            continue
        yield shape.features, shape.units, shape.blocks, shape.split, shape.spread, shape.rows
        yield planner.time_of(shape, form, N, D, clusters), shape.projected_words(form, 3, N)
        states = (None, planner.StateOutputs(values=True, codes=False))
        kernel, grid = planner.layout(
            shape, form, H, N, D, rng.random() < 0.3, rng.choice(states), rng.random() < 0.5, 8
        )
        yield kernel.macros, tuple(grid)


def launches_of(recorder: Recorder) -> Iterator[Any]:
    for kernel, grid, record in recorder.launches:
        source = SOURCES.path_of(kernel.source).read_text("utf-8")
        options = [f"-D{name}={value}" for name, value in kernel.macros]
        yield kernel.source, kernel.function, options, source, tuple(grid), values_of(record)


def lines(seeds: int) -> Iterator[str]:
    # the product of a GPU's library is left out; its launches stay
    launch_plan.Schedule._native_call = lambda *_: None  # type: ignore[method-assign]
    yield "headers " + digest(SOURCES.header_texts)
    for seed in range(seeds):
        for kind in KINDS:
            rng = random.Random(seed)
            plan = random_case(seed, kind).plan
            yield f"plan {kind} {seed} {digest(*numbers_of(plan))} {digest(*layouts_of(plan, rng))}"
    for seed in range(max(1, seeds // 4)):
        for kind in KINDS:
            case = gpu_case(seed, kind, large=seed % 2 == 0)
            for arch, clusters in MACHINES:
                called, prepared = Recorder(arch, clusters), Recorder(arch, clusters)
                gru, real = case.case.gru, torch.zeros(1, 1, 1)
                form = CallForm.of(real, real, torch.float32, None)
                plan = gru._plan()
                made = Stack(plan, prepared).schedule(case.T, case.N, form)
                cell = plan.cells[0][0]
                codes = torch.zeros(case.T, case.N, cell.input_size, dtype=torch.int32)
                h0 = torch.zeros(case.N, cell.hidden_size, dtype=torch.int32)
                executor.run(cell, codes, h0, machine=called)
                digests = (digest(*launches_of(each)) for each in (prepared, called))
                yield f"call {kind} {seed} {arch} {made is not None} {' '.join(digests)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=60)
    os.environ.pop(planner.VARIABLE, None)
    torch.manual_seed(0)
    for line in lines(parser.parse_args().seeds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
