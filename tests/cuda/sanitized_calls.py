"""Whole calls and steps of training of every kind of plan, to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/cuda/sanitized_calls.py [--only int8]

Prints a line when a case begins and one when its results are right.

Results are compared with the CPU's, too. Shapes are those that take different kernels: one row,
batches, all layouts of the recurrence up to 1024 units, projections beside it, several layers and
directions. sanitize.py runs all of it under several tools, some at a time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from math import inf

import torch
from gpu_pairs import equal, pair
from torch.nn.utils.rnn import pack_padded_sequence

from quant_gru import QuantConfig
from quant_gru.config import FUSIBLE
from quant_gru.kernels.cuda.projection.select import POLICY

# T, N, C, H of calls, and of steps of training
SIZES = [
    (7, 1, 12, 40),
    (9, 5, 40, 64),
    (6, 40, 33, 100),
    (5, 16, 128, 256),
    (4, 24, 64, 512),
    (3, 16, 32, 1024),
    (2, 72, 512, 1024),
]
# the same of recurrences that start while their projection goes on, were they longer
BESIDE = [(18, 64, 256, 1024), (20, 8, 64, 512), (24, 8, 256, 512)]
# of many rows, whose projection is one of groups of warps where a device has them
MANY = [
    (3, 1030, 140, 64),
    (2, 1600, 150, 130),
    (2, 1600, 256, 256),
    (2, 1600, 330, 520),
    (2, 1600, 64, 320),
    (3, 1030, 384, 100),
]
TRAINED = [(5, 3, 12, 40), (4, 20, 40, 256), (3, 8, 33, 512), (3, 16, 64, 1024)]


def widths(config: QuantConfig, bits: int | None, *operators: str) -> QuantConfig:
    """A configuration with other widths of some operators."""
    for name in operators:
        config = config.replace(name, bitwidth=bits)
    return config


CONFIGS = {
    "int8": QuantConfig.int8(),
    "w8a16": QuantConfig.w8a16(),
    "int16": QuantConfig.int16(),
    "pwl": QuantConfig.w8a16().replace_globals(activation="pwl"),
    "free": QuantConfig.int8().replace_globals(scale_kind="free"),
    "fused": widths(QuantConfig.int8(), None, *FUSIBLE),
    "wide": widths(QuantConfig.int16(), 24, "matmul.Wx", "gate.z_pre"),
}

WHAT = [*CONFIGS, "beside", "many"]


def call(config: QuantConfig, T: int, N: int, C: int, H: int) -> None:
    """A call with NaN in its input and a state before the first step."""
    cpu, gpu = pair(C, H, config)
    x, hx = torch.randn(T, N, C), torch.randn(1, N, H)
    x[T // 2, N // 2, C // 2] = float("nan")
    with torch.no_grad():
        equal(gpu(x.cuda(), hx.cuda()), cpu(x, hx))


def stacked(config: QuantConfig) -> None:
    """A call of several layers and directions."""
    cpu, gpu = pair(40, 64, config, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(6, 11, 40)
    with torch.no_grad():
        equal(gpu(x.cuda()), cpu(x))


def trained(config: QuantConfig, T: int, N: int, C: int, H: int) -> None:
    """A forward and a backward."""
    cpu, gpu = (each.train() for each in pair(C, H, config))
    x = torch.randn(T, N, C)
    there = x.cuda().requires_grad_()
    y, last = gpu(there)
    equal([y.detach()], [cpu(x)[0].detach()])
    (y.square().sum() + last.sum()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in gpu.parameters() if p.grad is not None)


def converted(config: QuantConfig) -> None:
    """Steps of training of two layers and directions: packed rows, and a module of halves."""
    options = {"num_layers": 2, "bidirectional": True}
    cpu, gpu = (each.train().bfloat16() for each in pair(40, 64, config, **options))
    x = torch.randn(6, 5, 40, dtype=torch.bfloat16)
    rows = pack_padded_sequence(x, [3, 6, 1, 6, 2], enforce_sorted=False)
    states = torch.randn(4, 5, 64, dtype=torch.bfloat16)
    for first in (rows, x):
        y, last = gpu(first.to("cuda"), states.cuda().requires_grad_())
        expected, _ = cpu(first, states)
        y, expected = (each if first is x else each.data for each in (y, expected))
        equal([y.detach()], [expected.detach()])
        (y.float().square().sum() + last.float().sum()).backward()
    assert all(bool(p.grad.isfinite().all()) for p in gpu.parameters())


def cases(what: str) -> dict[str, Callable[[], None]]:
    """What is run of a kind of plan, by name."""
    if what == "beside":
        return {
            f"{kind} call {sizes}": partial(call, CONFIGS[kind], *sizes)
            for kind in ("int8", "w8a16")
            for sizes in BESIDE
        }
    if what == "many":
        return {
            f"call {name} {sizes}": partial(call, CONFIGS[name], *sizes)
            for name in ("int8", "w8a16")
            for sizes in MANY
        }
    config = CONFIGS[what]
    found: dict[str, Callable[[], None]] = {f"call {s}": partial(call, config, *s) for s in SIZES}
    found["two layers, two directions"] = partial(stacked, config)
    found["packed rows and halves"] = partial(converted, config)
    return found | {f"step of training {s}": partial(trained, config, *s) for s in TRAINED}


def main() -> None:
    """Run the chosen ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--cases", type=int, nargs="+", help="only these of each")
    parser.add_argument("--until", type=float, default=inf, help="begin no case after this time")
    args = parser.parse_args()
    for what in args.only:
        if what == "beside":
            POLICY.overlap_steps, POLICY.overlap_work = 8, 0
        for index, (name, run) in enumerate(cases(what).items()):
            if (args.cases is None or index in args.cases) and time.time() < args.until:
                print(f"{what}: {name}: begins", flush=True)
                run()
                torch.cuda.synchronize()
                print(f"{what}: {name}: equal", flush=True)


if __name__ == "__main__":
    main()
