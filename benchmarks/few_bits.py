"""CPU kernels with weights of 4, 2 and 1 bits beside weights of 8 bits: ratios measured in one run.

    python benchmarks/few_bits.py [--seconds 2] [--variant avx2] [--streams]

Weights of few bits take that many bits of memory, and are unpacked in registers. One thread, codes
in and out; plans take turns, and every figure is the shortest time. With --streams, steps of a
stream instead, called from Python with float32 values.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from quant_gru import QuantGRU
from quant_gru.config.choice import PRESETS
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels.cpu import executor

BITS = (8, 4, 2, 1)
SHAPES = ((1, 100, 40, 64), (1, 50, 128, 256), (1, 20, 256, 512), (32, 20, 64, 128))


def calibrated(preset: str, bits: int, inputs: int, hidden: int) -> QuantGRU:
    """Return a calibrated GRU with weights of so many bits."""
    torch.manual_seed(0)
    config = PRESETS[preset]()
    for name in ("weight.W", "weight.R"):
        config = config.replace(name, bitwidth=bits)
    gru = QuantGRU(inputs, hidden, config=config).eval()
    gru.calibrate(torch.randn(30, 2, inputs))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def runner(cell: CellPlan, variant: str, N: int, T: int) -> Callable[[], object]:
    """Return a function that runs a cell on random codes."""
    x = torch.randint(cell.x.lo, cell.x.hi + 1, (T, N, cell.input_size)).to(cell.x.container)
    h0 = torch.zeros(N, cell.hidden_size, dtype=cell.h.container)
    return lambda: executor.run(cell, x, h0, None, False, variant, 1)


def stepper(gru: QuantGRU) -> Callable[[], object]:
    """Return a function that runs 100 steps of a stream."""
    stream, x = gru.stream(), torch.randn(1, gru.input_size)

    def run() -> None:
        for _ in range(100):
            stream(x)

    return run


def shortest(runs: dict[int, Callable[[], object]], seconds: float) -> dict[int, float]:
    """Return the shortest time of each function, in seconds; they take turns."""
    best = dict.fromkeys(runs, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for bits, run in runs.items():
            start = time.perf_counter()
            run()
            best[bits] = min(best[bits], time.perf_counter() - start)
    return best


def line(what: str, best: dict[int, float], calls: int = 1) -> str:
    """Return a line of the table."""
    ratios = "  ".join(f"{best[bits] / best[8]:.2f}" for bits in BITS[1:])
    return f"{what} {1e6 * best[8] / calls:8.2f} us  {ratios}"


def main() -> None:
    """Print a line for each preset, shape and instruction set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each line")
    parser.add_argument("--variant", help="an instruction set; see quant-gru info")
    parser.add_argument("--streams", action="store_true", help="steps of streams")
    options = parser.parse_args()
    torch.set_num_threads(1)
    variants = [options.variant] if options.variant else executor.choices()[:-1]
    print("times of 4, 2 and 1 bits by those of 8 bits; N, T, C, H")
    for preset in ("int8", "w8a16"):
        for N, T, C, H in SHAPES:
            if options.streams and N > 1:
                continue
            grus = {bits: calibrated(preset, bits, C, H) for bits in BITS}
            if options.streams:
                steps = {bits: stepper(gru) for bits, gru in grus.items()}
                best = shortest(steps, options.seconds)
                print(line(f"{preset:6} stream of ({C}, {H})".ljust(30), best, 100))
                continue
            cells = {bits: gru._plan().cells[0][0] for bits, gru in grus.items()}
            for variant in variants:
                runs = {bits: runner(cell, variant, N, T) for bits, cell in cells.items()}
                best = shortest(runs, options.seconds)
                print(line(f"{preset:6} {(N, T, C, H)!s:18} {variant:12}", best))


if __name__ == "__main__":
    main()
