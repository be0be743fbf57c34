"""Run random plans on kernels that were built with sanitizers; `make sanitize` does both.

    python sanitized_sweep.py FOLDER [plans per kind]

FOLDER holds the sanitized module. Every code is compared with the reference, too, and every
gradient with the straight-through one. Then the tests of what else is native run on that module.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# stacks, their backwards, streams, boundaries, batches, layers that follow weights, calls, launches
ELSE = (
    "kernels/test_native_stack.py",
    "kernels/test_stack_backward.py",
    "kernels/test_cpu_boundary.py",
    "kernels/test_cpu_executor.py::test_threads_and_many_rows",
    "kernels/test_live_weights.py::test_a_layer_changes_its_kernel_and_back",
    "gru/test_prepared_calls.py",
    "kernel_runtime/test_launches.py",
    "actnn/codec/test_codec_executors.py",
)
MODULES = {
    "runtime": "quant_gru.kernel_runtime._native",
    ".": "quant_gru.kernels._native",
    "codec": "actnn.codec._native",
}


def load(folder: Path) -> None:
    """Put the modules found in `folder` in the place of the installed ones."""
    for place, name in MODULES.items():
        (path,) = (folder / place).glob("_native*.so")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module


def main() -> None:
    """Sweep all kinds of plans over all instruction sets that run here."""
    load(Path(sys.argv[1]))
    plans = int(sys.argv[2]) if len(sys.argv) > 2 else 8

    import pytest
    import torch
    from gradient_errors import error
    from live_cases import live_and_fresh, random_qparams, random_weights, same_part
    from random_plans import KINDS, random_case

    from quant_gru.integer import cell as reference
    from quant_gru.integer.backward import Tape, Wanted, straight_through
    from quant_gru.kernels import _native
    from quant_gru.kernels.cpu import executor
    from quant_gru.kernels.cpu.backward import backward

    assert str(sys.argv[1]) in str(executor._native.__file__)
    # however little there is to do, threads share it
    _native.set_thread_price(1e-9)
    before, count = _native.threads_started(), 0
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
    assert _native.threads_started() > before + count
    for seed in range(plans):
        torch.set_num_threads(1 + seed % 3)
        rng = random.Random(seed)
        qparams = random_qparams(rng)
        weights = random_weights(rng, 1 + seed, 40, finite=seed % 4 > 0)
        live, _, fresh = live_and_fresh(qparams, weights)
        live.update(*weights)
        assert not same_part(live.part, fresh(weights).weights), seed
    _native.set_thread_price(1.0)
    print(f"sanitized kernels: {count} runs, every code equal, every gradient close, no finding")
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options.append(f"--rootdir={TESTS.parent}")
    sys.exit(pytest.main([*options, *(str(TESTS / each) for each in ELSE)]))


if __name__ == "__main__":
    main()
