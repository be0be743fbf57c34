"""On a GPU: every requantizer of 8 and 16 bits with power-of-two scales.

    python tests/cuda/requantizer_sweep.py

It runs all 2^32 accumulators by all shifts that leave something of them, by every rule of rounding,
against formulas that have nothing in common with the kernels, and prints how many of how many codes
differ. `plan_sweep.py` runs random plans.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch

from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer.rounding import NUMBERS
from quant_gru.kernel_runtime.cuda import driver
from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.sources import Sources
from quant_gru.kernels._native import PLAIN
from quant_gru.kernels.cuda.machine import SOURCES

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


def main() -> None:
    """Run it."""
    device = torch.device("cuda", 0)
    print(torch.cuda.get_device_name(device))
    every_requantizer(device)


if __name__ == "__main__":
    main()
