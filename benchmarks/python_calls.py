"""Python calls that a call of a QuantGRU makes in files of ours, counted by `sys.setprofile`.

    python benchmarks/python_calls.py [--where]

On a CPU, T = N = 1, C = 40, H = 64, 8 bits. A prepared call is the fifth with the same weights; a
step of training is a forward and a backward whose gradients are contiguous. The first call follows
calibration: it builds the plan. `--where` adds the functions that are called most.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import kernel_runtime
import quant_gru
from quant_gru import QuantGRU

OURS = tuple(str(Path(each.__file__ or "").parent) for each in (quant_gru, kernel_runtime))


def python_calls(run: Callable[[], object]) -> Counter[str]:
    """Return how often each function of ours is called while `run` runs."""
    found: Counter[str] = Counter()

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            found[f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"] += 1

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def quantized(training: bool, **options: Any) -> QuantGRU:
    """Return a calibrated GRU without a plan."""
    torch.manual_seed(0)
    gru = QuantGRU(40, 64, config="int8", **options).train(training)
    gru.calibrate(torch.randn(20, 4, 40))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def call_of(training: bool, **options: Any) -> Callable[[], object]:
    """Return a call, or a step of training, of a GRU that has not been called."""
    gru, x = quantized(training, **options), torch.randn(1, 1, 40)
    weights = list(gru.parameters())
    grad = torch.randn(1, 1, 64 * (2 if gru.bidirectional else 1))

    def call() -> object:
        with nullcontext() if training else torch.no_grad():
            y, _ = gru(x)
        return torch.autograd.grad(y, weights, grad) if training else y

    return call


def main() -> None:
    """Print a line for each kind of call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--where", action="store_true")
    args = parser.parse_args()
    stack = {"num_layers": 2, "bidirectional": True}
    for what, training, options, before in (
        ("prepared call in eval mode", False, {}, 4),
        ("prepared step of training, one layer", True, {}, 4),
        ("prepared step of training, two layers, bidirectional", True, stack, 4),
        ("first call", False, {}, 0),
    ):
        python_calls(call_of(training, **options))  # imports and caches of the process
        call = call_of(training, **options)
        for _ in range(before):
            call()
        found = python_calls(call)
        print(f"{found.total():5d}  {what}")
        if args.where:
            for name, count in found.most_common(30):
                print(f"       {count:5d}  {name}")


if __name__ == "__main__":
    main()
