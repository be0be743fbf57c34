"""Time that actnn's hooks cost in Python for each saved tensor, beside that of the codec.

python benchmarks/actnn.py hooks
"""

import argparse
import platform
import time

import torch
from torch import nn

import actnn
from actnn import codec

LAYERS, ROUNDS = 50, 50


def best(run) -> float:
    """Return the least time of many runs, in microseconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)))
    x = torch.randn(32, 16, requires_grad=True)
    plain = best(lambda: model(x * 1))
    codes = codec.encode(torch.randn(32, 16), 4, codec.Key(codec.noise_state(0), 0))
    print(f"{platform.processor() or platform.machine()}, PyTorch {torch.__version__}")
    print(f"without hooks: {plain / LAYERS:.1f} us per layer, which saves two tensors")
    for bits in (32, 4):
        saving = actnn.compressed(bits, min_bytes=0, model=model)

        def run(saving=saving):
            with saving:
                return model(x * 1)

        encode, codec.encode = codec.encode, lambda *_, **__: codes
        try:
            each = (best(run) - plain) / (2 * LAYERS)
        finally:
            codec.encode = encode
        what = "kept" if bits == 32 else f"compressed to {bits} bits"
        print(f"{what}: {each:.1f} us per saved tensor, {each / plain * LAYERS:.2f} of a layer")
