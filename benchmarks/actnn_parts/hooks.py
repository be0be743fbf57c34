"""Time that the host spends for each tensor that actnn keeps or compresses, in steps of training.

    python benchmarks/actnn.py hooks [--device cuda]

Linear layers of so few features that the host limits the step. `kept` tensors pass the hooks only.
Compressed ones are also encoded in the forward and decoded in the backward; `codec` is what these
two calls take by themselves.
"""

import argparse
import platform
import time

import torch
from torch import nn

import actnn
from actnn import codec

LAYERS, WARM, ROUNDS = 50, 70, 50


def best(run, device, rounds=ROUNDS) -> float:
    """Return the least time of many runs, in microseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return min(times) * 1e6


def step_of(model, x):
    """Return a step of training, without an optimizer."""

    def step():
        model(x).sum().backward()
        for p in model.parameters():
            p.grad = None

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    x = torch.randn(32, 16, device=device)

    def model():
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS))).to(device)

    where = platform.processor() or platform.machine()
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    exact = step_of(model(), x)
    plain = min(best(exact, device) for _ in range(2))
    print(f"{where}, PyTorch {torch.__version__}: a layer takes {plain / LAYERS:.1f} us")
    for bits in (32, 4):
        compressed = actnn.compress(model(), bits=bits, min_bytes=0)
        step = step_of(compressed, x)
        for _ in range(WARM):
            step()
        each = (best(step, device) - plain) / len(compressed.actnn.records)
        what = "kept" if bits == 32 else f"compressed to {bits} bits"
        print(f"{what}: {each:.1f} us per saved tensor")
    key = codec.Key(codec.noise_state(0, device=device), 0)
    codes = codec.encode(x, 4, key)

    def both():
        codec.encode(x, 4, key)
        codec.decode(codes)

    print(f"codec: {best(both, device, 2000):.1f} us")


if __name__ == "__main__":
    main()
