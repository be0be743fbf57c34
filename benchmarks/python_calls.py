"""Python calls of functions of ours in one call, on the CPU.

    python benchmarks/python_calls.py [--each]

Counted with `sys.setprofile` at T = N = 1, C = 40, H = 64: a call in inference, one in eval mode
with gradients on, a step of training (forward and backward), and the first call of each. `--each`
prints the functions, too.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import quant_gru
from quant_gru import QuantConfig, QuantGRU

OURS = Path(quant_gru.__file__).parents[1]
STACKS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "bidirectional": {"bidirectional": True},
    "two layers": {"num_layers": 2},
    "two layers, bidirectional": {"num_layers": 2, "bidirectional": True},
}


def calls_in(run: Callable[[], object]) -> Counter[str]:
    """How often each function of ours is called."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(OURS):
            found[f"{path.relative_to(OURS)}: {frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def made(**options: Any) -> QuantGRU:
    """A calibrated GRU that has not been called."""
    torch.manual_seed(0)
    gru = QuantGRU(40, 64, config=QuantConfig.int8(), **options).eval()
    gru.calibrate(torch.randn(20, 2, 40))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", action="store_true", help="print the functions")
    args = parser.parse_args()
    x = torch.randn(1, 1, 40)
    print(f"{'':>26} {'first':>6} {'later':>6}")
    for name, options in STACKS.items():
        for kind in ("inference", "eval, gradients on", "training step"):
            gru = made(**options).train(kind == "training step")
            weights = list(gru.parameters())

            def run(
                gru: QuantGRU = gru, weights: list[torch.Tensor] = weights, kind: str = kind
            ) -> None:
                with torch.set_grad_enabled(kind != "inference"):
                    y, _ = gru(x)
                if kind == "training step":
                    torch.autograd.grad(y, weights, torch.ones_like(y))

            first = calls_in(run)
            for _ in range(3):
                run()
            later = calls_in(run)
            print(f"{name}\n" if kind == "inference" else "", end="")
            print(f"{kind:>26} {sum(first.values()):6d} {sum(later.values()):6d}")
            for function, count in later.most_common() if args.each else ():
                print(f"{'':>26} {count:6d} {function}")


if __name__ == "__main__":
    main()
