"""Digests of everything that the host plans for a GPU, which no GPU is needed for.

    python tests/cuda/launch_digests.py --seeds 200 > FILE

One line for each plan: its name, and digests of its form and gate arithmetic, of the layouts of its
recurrence, and of the launches of its calls and of its backward with the texts and options of their
kernels. Where only code moves, two versions of the package print the same lines.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import hashlib
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
sys.path.append(str(Path(__file__).parents[1] / "cpp"))

from cuda_library import KINDS, gpu_case
from gate_structs import cell_of, saturated_of
from random_plans import random_case
from recurrence_layouts import StateOutputs, layout

from quant_gru.integer.call_form import CallForm
from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward.inputs import PRECISIONS
from quant_gru.kernels.cuda.forward import launch_plan
from quant_gru.kernels.cuda.machine import SOURCES
from quant_gru.kernels.cuda.plan import structure
from quant_gru.kernels.cuda.plan.structure import KINDS as CONTAINERS
from quant_gru.kernels.cuda.projection.select import POLICY, chip_of
from quant_gru.kernels.cuda.recurrence import planner

MACHINES = (
    ("sm_90a", {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}),
    ("sm_100", {1: 148, 2: 70, 4: 33, 8: 14, 16: 4}),
    ("sm_80", {1: 108}),
    ("sm_89", {1: 20}),
)
FORM = "narrow real words weight_bytes state_bytes wide_input out_bytes tables table_bytes fused"
FORM += " zoneout saturated powers in_int32"


class Machine:
    """A GPU that launches are planned for."""

    def __init__(self, arch: str, clusters: dict[int, int]) -> None:
        self.arch, self._clusters = arch, clusters

    def clusters(self) -> dict[int, int]:
        return self._clusters

    def expect(self, kernel: Kernel) -> None:
        pass


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
    saturated = saturated_of(frozen)
    found: list[Any] = [getattr(form, name) for name in FORM.split()]
    found += [gates_of(form.own), gates_of(form.recurrence), sorted(form.products.items())]
    found += [saturated and values_of(saturated)]
    reals = ("float", "double") if form.narrow else ("double",)
    found += [values_of(cell_of(frozen, real)) for real in reals]
    for table in (getattr(cell_of(frozen, "double"), gate) for gate in "zrg"):
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
        states = (None, StateOutputs(values=True, codes=False))
        kernel, grid = layout(
            shape, form, H, N, D, rng.random() < 0.3, rng.choice(states), rng.random() < 0.5, 8
        )
        yield kernel.macros, tuple(grid)


class Cell:
    """A layer and direction whose arrays, and tables of gates, are at address 0."""

    def __init__(self, plan: CellPlan, between: Sequence[WeightedSum] = ()) -> None:
        self.plan, self.form = plan, structure.form_of(plan)
        self._between = [(int(each.shift), int(each.multipliers[0])) for each in between]
        self.arrays = None

    @property
    def kinds(self) -> tuple[int, int]:
        return CONTAINERS[self.plan.weights.W.dtype], CONTAINERS[self.plan.weights.R.dtype]

    def native(self, _: list[Any]) -> Any:
        plan, w = self.plan, self.plan.weights
        gates = structure.frozen_numbers(plan.frozen).native
        sizes, bits = (plan.input_size, plan.hidden_size), (w.bits_W, w.bits_R)
        stored = [(0, 0, 0, 0, kind) for kind in self.kinds]
        given = gates, self.form, sizes, bits, [(0, 0, 0, 0)] * 3, stored
        return _native.CellArrays(*given, lambda _: 0), self._between, 0

    def fill(self, machine: Machine) -> None:
        pass


def layers_of(plan: GRUPlan) -> list[list[Cell]]:
    return [
        [Cell(cell, plan.between[i - 1][d] if i else ()) for d, cell in enumerate(cells)]
        for i, cells in enumerate(plan.cells)
    ]


def planned_launches(machine: Machine, layers: Any, T: int, N: int, form: CallForm) -> Any:
    if not all(cell.form.narrow for cells in layers for cell in cells):
        return None
    plan = launch_plan.planned(machine, layers, T, N, form, keeps=False)  # type: ignore[arg-type]
    return plan and plan[0][0]


def code_launches(machine: Machine, cell: Cell, T: int, N: int) -> Any:
    """The launches of a cell on codes."""
    sequence = (0, 0, 0, 0, False, 0)
    given = [cell.native([])], chip_of(machine), T, N, [sequence], POLICY  # type: ignore[arg-type]
    return _native.code_launches_of(*given)[0]


def backward_launches(machine: Machine, cell: Cell, T: int, N: int, rng: random.Random) -> Any:
    """What a backward of a cell starts, in its order; its products, and bytes of its workspace."""
    direction = cell.native([]), rng.random() < 0.5, cell.kinds
    wanted = tuple(rng.random() < 0.7 for _ in range(5))
    precision = dataclasses.astuple(PRECISIONS[rng.choice(list(PRECISIONS))])
    policy = _native.BackwardPolicy()
    policy.product_bytes = rng.choice((32 << 20, 1 << 16))
    given = [direction], T, N, wanted, precision, machine.clusters(), policy
    return _native.layer_backward_of(*given)


def described(launches: Any) -> Iterator[Any]:
    """Launches with the texts of their kernels."""
    for source, *rest in launches or ():
        yield source, rest, source and SOURCES.texts[f"{source}.cu"]


def lines(seeds: int) -> Iterator[str]:
    headers = {name: text for name, text in SOURCES.texts.items() if not name.endswith(".cu")}
    yield "headers " + digest(dict(sorted(headers.items())))
    for seed in range(seeds):
        for kind in KINDS:
            rng = random.Random(seed)
            plan = random_case(seed, kind).plan
            yield f"plan {kind} {seed} {digest(*numbers_of(plan))} {digest(*layouts_of(plan, rng))}"
    for seed in range(max(1, seeds // 4)):
        for kind in KINDS:
            case = gpu_case(seed, kind, large=seed % 2 == 0)
            for arch, clusters in MACHINES:
                machine = Machine(arch, clusters)
                gru, real = case.case.gru, torch.zeros(1, 1, 1)
                form = CallForm.of(real, real, torch.float32, None)
                layers = layers_of(gru._plan())
                made = planned_launches(machine, layers, case.T, case.N, form)
                codes = code_launches(machine, layers[0][0], case.T, case.N)
                digests = (digest(*described(each)) for each in (made, codes))
                yield f"call {kind} {seed} {arch} {made is not None} {' '.join(digests)}"
                if layers[0][0].form.narrow:
                    rng = random.Random(seed)
                    steps, *rest = backward_launches(machine, layers[0][0], case.T, case.N, rng)
                    kernels = described(each for each, *_ in steps if each)
                    yield f"backward {kind} {seed} {arch} {digest(*kernels, *steps, *rest)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=60)
    os.environ.pop(planner.VARIABLE, None)
    torch.manual_seed(0)
    for line in lines(parser.parse_args().seeds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
