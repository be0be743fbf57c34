"""Time that the host spends for each tensor that actnn keeps or compresses, in steps of training.

    python benchmarks/actnn.py hooks [--device cuda]

Linear layers of so few features that the host limits the step. Each saves two tensors: its input
and its weight. `idle` are hooks that return what they get: this time is PyTorch's own. `kept`
tensors pass the hooks of actnn only. Inputs with codes are also encoded in the forward and decoded
in the backward: two launches, which allocate their results. `codec` is what these two calls take
from Python.
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
    operator = best(lambda: x + 1, device, 2000)
    print(f"an operator of PyTorch, which allocates and launches: {operator:.1f} us")

    def idle():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            exact()

    tensors = 2 * LAYERS
    own = (best(idle, device) - plain) / tensors
    print(f"idle: {own:.1f} us per saved tensor")
    kept = 0.0
    for bits in (32, 4):
        step = step_of(actnn.compress(model(), bits=bits, min_bytes=0), x)
        for _ in range(WARM):
            step()
        each = (best(step, device) - plain) / tensors
        if bits == 32:
            kept = each
            print(f"kept: {each:.1f} us per saved tensor, {each - own:.1f} more than idle")
        else:
            print(f"compressed to {bits} bits: {each - kept:.1f} us per launch")
    key = codec.Key(codec.noise_state(0, device=device), 0)
    codes = codec.encode(x, 4, key)

    def both():
        codec.encode(x, 4, key)
        codec.decode(codes)

    print(f"codec: {best(both, device, 2000):.1f} us")


if __name__ == "__main__":
    main()
