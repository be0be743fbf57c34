"""Run random plans on kernels that were built with sanitizers; `make sanitize` does both.

    python sanitized_sweep.py FOLDER [plans per kind]

FOLDER holds the sanitized module. Every code is compared with the reference, too, and every
gradient with the straight-through one.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def load(folder: Path) -> None:
    """Put the module found in `folder` in the place of the installed one."""
    (path,) = folder.glob("_native*.so")
    name = "quant_gru.kernels.cpu._native"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module


def main() -> None:
    """Sweep all kinds of plans over all instruction sets that run here."""
    load(Path(sys.argv[1]))
    plans = int(sys.argv[2]) if len(sys.argv) > 2 else 24

    import torch
    from gradient_errors import error
    from random_plans import KINDS, random_case

    from quant_gru.integer import reference
    from quant_gru.integer.backward import Tape, Wanted, straight_through
    from quant_gru.kernels.cpu import executor
    from quant_gru.kernels.cpu.training import backward

    assert str(sys.argv[1]) in str(executor._native.__file__)
    count = 0
    for kind in KINDS:
        for seed in range(plans if kind != "wide" else plans // 4):
            case = random_case(10_000 + seed, kind)
            T, N, _ = case.x.shape
            H = case.plan.hidden_size
            generator = torch.Generator().manual_seed(seed)
            held = torch.rand(T, N, H, generator=generator) < 0.3 if seed % 2 else None
            expected = reference.run(case.plan, case.x, case.h0, case.lengths, case.reverse, held)
            tape = Tape(case.plan, case.x, case.h0, expected[0], case.lengths, case.reverse, held)
            grads = (
                torch.randn(T, N, H, generator=generator),
                torch.randn(N, H, generator=generator),
            )
            gradients = straight_through(tape, *grads, Wanted(h=True))
            for variant in executor.choices()[:-1]:
                got = executor.run(
                    case.plan,
                    case.x,
                    case.h0,
                    case.lengths,
                    case.reverse,
                    variant,
                    1 + seed % 3,
                    held,
                )
                for ours, theirs in zip(got, expected, strict=True):
                    assert torch.equal(ours, theirs), (seed, kind, variant)
                ours = backward(tape, *grads, Wanted(h=True), variant, 1 + seed % 3)
                for name in ("x", "h0", "W", "R", "bw", "br", "h"):
                    found = error(name, getattr(ours, name), gradients, tape, 1e-5)
                    assert found <= 1e-5, (seed, kind, variant, name, found)
                count += 1
    print(f"sanitized kernels: {count} runs, every code equal, every gradient close, no finding")


if __name__ == "__main__":
    main()
