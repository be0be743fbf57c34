"""What the first call of a plan takes on a GPU: its kernels are compiled, all of them at once.

    python benchmarks/first_call.py [--configs int8 w8a16 int16] [--features 128]

Each in a process of its own, calibrated before, with empty caches: ours and NVRTC's are turned
off. (N, T, C, H) = (64, 100, features, 256), inference and a step of training.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import product

N, T, H = 64, 100, 256


def first_call(name: str, C: int, training: bool) -> tuple[float, float]:
    """Seconds of the first call, and of the second."""
    import torch

    from quant_gru import QuantConfig, QuantGRU

    gru = QuantGRU(C, H, config=getattr(QuantConfig, name)()).cuda().train(training)
    x = torch.randn(T, N, C, device="cuda")
    gru.calibrate(x)
    gru.finalize_calibration()
    gru.use_quantization = True
    found = []
    with torch.set_grad_enabled(training):
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            y, _ = gru(x)
            if training:
                y.sum().backward()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
    return found[0], found[1]


def main() -> None:
    """Start a process for each, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", nargs="+", default=["int8", "w8a16", "int16"])
    parser.add_argument("--features", nargs="+", type=int, default=[128])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, C, kind = args.one
        first, second = first_call(name, int(C), kind == "training")
        what = f"{name:>6}, C = {C}, {kind:>9}"
        print(f"{what}: first call {first:5.2f} s, second {second * 1e3:6.2f} ms")
        return
    for name, C, kind in product(args.configs, args.features, ("inference", "training")):
        with tempfile.TemporaryDirectory() as folder:
            caches = {"QUANT_GRU_CACHE": folder, "CUDA_CACHE_DISABLE": "1"}
            command = [sys.executable, __file__, "--one", name, str(C), kind]
            subprocess.run(command, env={**os.environ, **caches}, check=True)


if __name__ == "__main__":
    main()
