"""What each rule of rounding costs on a CPU beside `half_even`, and whether every code is right.

    python benchmarks/cpu_rounding.py [--repeats 150] [--variant avx2]
    python benchmarks/cpu_rounding.py --codes 100000000

The first prints times relative to those of `half_even`: the least processor's time of one thread,
of many rounds of calls in turn. Other work on the machine disturbs the least time least. `again` is
a second GRU with `half_even`, whose ratio is noise. The second runs random plans of every kind up
to 16 bits, on every instruction set that runs here, and counts codes that differ from the reference
executor's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from quant_gru import QuantConfig, QuantGRU
from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer import cell as reference
from quant_gru.kernels.cpu import executor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))

OTHERS = [rule for rule in ROUNDINGS if rule != "half_even"]
CONFIGS = {
    "int8": QuantConfig.int8(),
    "int8, free": QuantConfig.int8().replace_globals(scale_kind="free"),
    "w8a16": QuantConfig.w8a16(),
    "w8a16, free": QuantConfig.w8a16().replace_globals(scale_kind="free"),
    "int16": QuantConfig.int16(),
    "int16, free": QuantConfig.int16().replace_globals(scale_kind="free"),
}
SHAPES = [(1, 100, 40, 64), (1, 100, 128, 256), (32, 50, 64, 128)]  # N, T, C, H
STACKED = (1, 100, 40, 64)


def calibrated(
    shape: tuple[int, int, int, int], config: QuantConfig, layers: int
) -> tuple[QuantGRU, torch.Tensor]:
    """A calibrated GRU and an input (T, N, C)."""
    N, T, C, H = shape
    torch.manual_seed(0)
    gru = QuantGRU(C, H, num_layers=layers, config=config)
    x = torch.randn(T, N, C)
    gru.calibrate(x)
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru, x


def seconds(gru: QuantGRU, x: torch.Tensor, trains: bool, calls: int) -> float:
    """The least processor's time of a call."""
    least = float("inf")
    for _ in range(calls):
        start = time.process_time()
        if trains:
            gru(x)[0].square().sum().backward()
        else:
            with torch.inference_mode():
                gru(x)
        least = min(least, time.process_time() - start)
    return least


def ratios(
    shape: tuple[int, int, int, int], config: QuantConfig, repeats: int, layers: int, trains: bool
) -> tuple[float, list[float]]:
    """Seconds with `half_even`, and the ratios of the other rules and of a second `half_even`."""
    made = []
    for rule in ("half_even", *OTHERS, "half_even"):
        gru, x = calibrated(shape, config.replace_globals(rounding=rule), layers)
        made.append((gru.train(trains), x, trains))
    once = max(seconds(*made[0], 2), 1e-6)
    calls = max(1, round(1e-3 / once))
    found: list[list[float]] = [[] for _ in made]
    for first in range(repeats):
        # nothing always follows the same rule
        for i in range(first, first + len(made)):
            found[i % len(made)].append(seconds(*made[i % len(made)], calls))
    even, *others = map(min, found)
    return even, [each / even for each in others]


def print_ratios(repeats: int) -> None:
    """Print the table of times."""
    print(f"variant {executor.chosen()}, one thread")
    print(f"{'':34}{'half_even':>11}" + "".join(f"{rule:>11}" for rule in (*OTHERS, "again")))

    def line(name: str, shape: tuple[int, int, int, int], key: str, layers: int, trains: bool):
        even, others = ratios(shape, CONFIGS[key], repeats, layers, trains)
        cells = "".join(f"{ratio:>11.2f}" for ratio in others)
        print(f"{name:34}{even * 1e6:>8.0f} us{cells}", flush=True)

    for key in CONFIGS:
        for shape in SHAPES:
            line(f"{key}, {' '.join(map(str, shape))}", shape, key, 1, False)
    for key in ("int8", "w8a16", "int16"):
        line(f"{key}, 3 layers", STACKED, key, 3, False)
    for key in CONFIGS:
        line(f"{key}, training", SHAPES[2], key, 1, True)


def count_differing(codes: int) -> None:
    """Print how many codes of random plans differ from the reference executor's."""
    from random_plans import KINDS, random_case

    variants = executor.choices()[:-1]
    kinds = [kind for kind in KINDS if kind != "wide"]
    for rule in ROUNDINGS:
        total = differing = plans = 0
        while total < codes / len(ROUNDINGS):
            case = random_case(1_000_000 + plans, kinds[plans % len(kinds)], rule)
            generator = torch.Generator().manual_seed(plans)
            T, _, C = case.x.shape
            plan, many = case.plan, 2048

            def drawn(quantizer, *shape, generator=generator):
                found = torch.randint(quantizer.lo, quantizer.hi + 1, shape, generator=generator)
                return found.to(quantizer.container)

            case = replace(
                case,
                x=drawn(plan.x, T, many, C),
                h0=drawn(plan.h, many, plan.hidden_size),
                lengths=None,
            )
            expected = reference.run(plan, case.x, case.h0, None, case.reverse)[0]
            for variant in variants:
                got = executor.run(plan, case.x, case.h0, None, case.reverse, variant, 1)[0]
                differing += int((got != expected).sum())
                total += got.numel()
            plans += 1
        print(
            f"{rule}: {differing} of {total:.3g} codes differ "
            f"({plans} plans on {', '.join(variants)})",
            flush=True,
        )


def main() -> None:
    """Print one of both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=150)
    parser.add_argument("--variant", help="an instruction set; see quant-gru info")
    parser.add_argument("--codes", type=float, help="count differing codes of so many instead")
    args = parser.parse_args()
    if args.variant:
        os.environ[executor.VARIABLE] = args.variant
    torch.set_num_threads(1)
    if args.codes:
        count_differing(int(args.codes))
    else:
        print_ratios(args.repeats)


if __name__ == "__main__":
    main()
