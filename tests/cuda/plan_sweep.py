"""On a GPU: random plans of every rule of rounding against the CPU.

    python tests/cuda/plan_sweep.py [--plans 100] [--codes 1e7] [--processes 16]

Each plan runs on the GPU and in the CPU executor, for at least `--codes` codes of states, and some
of its rows in the reference executor as well. It prints how many of how many codes differ, and how
many are not those of the step before: units that are saturated prove little. With `--device cpu`
the kernels run on the host, one fiber for each CUDA thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer import cell as reference
from quant_gru.integer.plan import CellPlan, FrozenPart
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.cuda.forward import executor as cuda

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from host_machine import Host, prepared
from random_plans import random_case

KINDS = ("w8a8", "w8a16", "w16a16", "mixed", "few")
HIDDEN = (16, 21, 33, 48, 64, 96, 100, 128, 200, 256)
STEPS = (4, 8, 16, 50)
FIRST = 40_000  # of the seeds
FEW = (3, 2)  # steps and rows that the reference runs


class Found(NamedTuple):
    """What a comparison found.

    Attributes:
        codes: All codes that were compared.
        moved: Those that differ from the code of the step before.
        differing: Those that are not equal.
    """

    codes: int
    moved: int
    differing: int


def on(plan: CellPlan, device: torch.device) -> CellPlan:
    """A plan on another device."""

    def moved(value):
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        if hasattr(value, "__dataclass_fields__") and not isinstance(value, FrozenPart):
            fields = {name: moved(getattr(value, name)) for name in value.__dataclass_fields__}
            return type(value)(**fields)
        return value

    frozen = plan.frozen
    tables = {name: table.to(device) for name, table in frozen.tables.items()}
    fields = {name: getattr(frozen, name) for name in frozen.__dataclass_fields__}
    return CellPlan(FrozenPart(**{**fields, "tables": tables}), moved(plan.weights))


def drawn(quantizer: Quantizer, *shape: int) -> Tensor:
    """Random codes."""
    return torch.randint(quantizer.lo, quantizer.hi + 1, shape, dtype=quantizer.container)


@cache
def host(parent: int) -> Host:
    """The stand-in for a GPU; processes of one parent share its compiled kernels."""
    folder = Path(tempfile.gettempdir()) / f"plan_sweep_{parent}"
    folder.mkdir(exist_ok=True)
    return Host(prepared(folder))


def compared(rule: str, seed: int, codes: int, where: str) -> Found:
    """Run one plan in all executors."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    case = random_case(seed, KINDS[seed % len(KINDS)], rule, hidden=HIDDEN)
    plan, rng, fastest = case.plan, random.Random(seed), cpu.choices()[0]
    T, H = rng.choice(STEPS), plan.hidden_size
    N = -(-codes // (T * H))
    x, h0 = drawn(plan.x, T, N, plan.input_size), drawn(plan.h, N, H)
    lengths = torch.randint(1, T + 1, (N,)) if rng.random() < 0.2 else None
    wanted = cpu.run(plan, x, h0, lengths, case.reverse, fastest)[0]
    if where == "cpu":
        got = cuda.run(plan, x, h0, lengths, case.reverse, host(os.getppid()))[0]
    else:
        there = torch.device(where)
        on_it = None if lengths is None else lengths.to(there)
        got = cuda.run(on(plan, there), x.to(there), h0.to(there), on_it, case.reverse)[0].cpu()
    few = x[: FEW[0], : FEW[1]], h0[: FEW[1]], None, case.reverse
    defined = reference.run(plan, *few)[0] != cpu.run(plan, *few, fastest)[0]
    return Found(
        wanted.numel(),
        int((wanted[1:] != wanted[:-1]).sum()),
        int((got != wanted).sum()) + int(defined.sum()),
    )


def main() -> None:
    """Print a line for each rule."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=100, help="of each rule")
    parser.add_argument("--codes", type=float, default=1e7, help="at least, of each plan")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, help="print what was compared so far, and stop")
    parser.add_argument("--device", default="cuda", help="cpu: kernels run on the host, slowly")
    args = parser.parse_args()
    start, wrong = time.perf_counter(), []
    found = {rule: [Found(0, 0, 0)] for rule in ROUNDINGS}
    pool = ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn"))
    try:
        cases = {
            pool.submit(compared, rule, seed, int(args.codes), args.device): (rule, seed)
            for seed in range(FIRST, FIRST + args.plans)
            for rule in ROUNDINGS
        }
        for future in as_completed(cases):
            rule, seed = cases[future]
            found[rule].append(future.result())
            if future.result().differing:
                wrong.append(f"{rule}, seed {seed}, {KINDS[seed % len(KINDS)]}")
            if args.seconds and time.perf_counter() - start > args.seconds:
                break
    finally:
        pool.shutdown(cancel_futures=True)
    for rule, results in found.items():
        codes, moved, differing = map(sum, zip(*results, strict=True))
        print(
            f"{rule}: {differing} of {codes:.2e} codes of {len(results) - 1} random plans differ "
            f"({moved:.2e} of them moved)"
        )
    print(f"{time.perf_counter() - start:.0f} s", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
