"""On a GPU: every requantizer of 8 and 16 bits with power-of-two scales, and random plans.

    python tests/cuda/requantizer_sweep.py [--seconds 60]

It runs all 2^32 accumulators by all shifts that leave something of them, by every rule of rounding,
against formulas that have nothing in common with the kernels. Then random plans of every rule run
on the GPU and on the CPU. It prints how many of how many codes differ.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path

import torch

from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer.plan import CellPlan, FrozenPart
from quant_gru.integer.rounding import NUMBERS
from quant_gru.kernel_runtime.cuda import driver
from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.sources import Sources
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.cuda.forward import executor as cuda
from quant_gru.kernels.cuda.machine import PLAIN, SOURCES

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from random_plans import random_case

SweepC = structure(
    "SweepC",
    differing=ctypes.c_void_p,
    **dict.fromkeys(("bits", "shift", "lo", "hi"), ctypes.c_int64),
)
ACCUMULATORS, THREADS = 1 << 32, 1 << 20
# what a thread compares for an accumulator, and the accumulators that float32 holds
PRIMITIVES, IN_DOUBLE, IN_FLOAT, EXACT = 2, 3, 3, (1 << 25) - 1
# significant bits of multipliers: operands of 8 bits, and of 8 and 16 or 16 bits
WIDTHS = {8: 24, 16: 16}


def kernel_of(rule: str) -> Kernel:
    """The kernel of a rule."""
    return Kernel.of("requantizer_sweep", "sweep", {**PLAIN, "QG_RULE": NUMBERS[rule]})


def record_of(differing: torch.Tensor, width: int, shift: int) -> ctypes.Structure:
    """The kernel's argument for codes of a width; `differing` has a place for each thread."""
    half = 1 << (width - 1)
    return SweepC(differing.data_ptr(), WIDTHS[width], shift, -half, half - 1)


def every_requantizer(device: torch.device) -> None:
    """Print the differing codes of all accumulators by all shifts."""
    sources = Sources(Path(__file__).parent, SOURCES.headers, SOURCES.error, SOURCES.cache)
    machine = driver.machine_of(device, sources)
    for rule in ROUNDINGS:
        start, found, total = time.perf_counter(), 0, 0
        for width, bits in WIDTHS.items():
            differing = torch.zeros(THREADS, dtype=torch.int64, device=device)
            # beyond 33 bits every code is 0 or -1; below `bits` accumulators are shifted left
            for shift in range(bits - 1, bits + 33):
                record = record_of(differing, width, shift)
                machine.launch(kernel_of(rule), Grid((THREADS // 256, 1), 256), record)
                total += PRIMITIVES * ACCUMULATORS
                if rule != "double":
                    total += IN_DOUBLE * ACCUMULATORS + (IN_FLOAT + (width == 8)) * EXACT
            found += int(differing.sum())
        seconds = time.perf_counter() - start
        print(f"{rule}: {found} of {total:.2e} requantized codes differ ({seconds:.1f} s)")


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


def random_plans(device: torch.device, seconds: float) -> None:
    """Print the differing codes of random plans."""
    kinds, fastest = ("w8a8", "w8a16", "w16a16", "mixed", "wide"), cpu.choices()[0]
    for rule in ROUNDINGS:
        end, found, total, plans = time.perf_counter() + seconds, 0, 0, 0
        while time.perf_counter() < end:
            kind = kinds[plans % len(kinds)]
            case = random_case(40_000 + plans, kind, rule)
            T, N = 64, 256 if kind == "wide" else 2048
            x = torch.randint(case.plan.x.lo, case.plan.x.hi + 1, (T, N, case.plan.input_size))
            h0 = torch.randint(case.plan.h.lo, case.plan.h.hi + 1, (N, case.plan.hidden_size))
            wanted = cpu.run(case.plan, x, h0, None, case.reverse, fastest)[0]
            plan = on(case.plan, device)
            got = cuda.run(plan, x.to(device), h0.to(device), None, case.reverse)[0]
            found += int((got.cpu() != wanted).sum())
            total += wanted.numel()
            plans += 1
        print(f"{rule}: {found} of {total:.2e} codes of {plans} random plans differ", flush=True)


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="random plans, each rule")
    seconds = parser.parse_args().seconds
    device = torch.device("cuda", 0)
    print(torch.cuda.get_device_name(device))
    every_requantizer(device)
    random_plans(device, seconds)


if __name__ == "__main__":
    main()
