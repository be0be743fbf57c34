"""Time that the host spends for each tensor that actnn keeps or compresses, in steps of training.

    python benchmarks/actnn.py hooks [--device cuda]

Linear layers of so few features that the host limits the step. Each saves two tensors: its input
and its weight. `idle` are hooks that return what they get, and `detached` those that detach it, as
hooks must lest an output keeps its own node alive: these times are PyTorch's own. `kept` tensors
pass the hooks of actnn only. Inputs with codes are also encoded in the forward and decoded in the
backward: two launches, which allocate their results. `an operator` of PyTorch, which allocates and
launches, and `codec`, the two calls from Python, say how fast the host is.

The kinds of steps alternate, and the differences are medians over the rounds: hosts that others
use change their speed within seconds.
"""

import argparse
import platform
import time
from statistics import median

import torch
from torch import nn

import actnn
from actnn import codec

LAYERS, WARM, ROUNDS, OPERATORS = 50, 70, 200, 100


def time_of(run, device) -> float:
    """Return the time of one run on the host, in microseconds."""
    start = time.perf_counter()
    run()
    taken = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize()
    return taken * 1e6


def many(run):
    """Return a run of many calls."""

    def runs():
        for _ in range(OPERATORS):
            run()

    return runs


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

    def hooked(pack):
        def step():
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                exact()

        return step

    def both():
        codec.encode(x, 4, key)
        codec.decode(codes)

    key = codec.Key(codec.noise_state(0, device=device), 0)
    codes = codec.encode(x, 4, key)
    runs = {"exact": exact, "idle": hooked(lambda x: x), "detached": hooked(torch.Tensor.detach)}
    runs |= {"operator": many(lambda: x + 1), "codec": many(both)}
    for name, bits in (("kept", 32), ("codes", 4)):
        runs[name] = step_of(actnn.compress(model(), bits=bits, min_bytes=0), x)
        for _ in range(WARM):
            runs[name]()
    rounds = [{name: time_of(run, device) for name, run in runs.items()} for _ in range(ROUNDS)]

    def middle(count, name, less=None):
        """Return the median of a time, less another of the same round, in parts of `count`."""
        return median(each[name] - (each[less] if less else 0) for each in rounds) / count

    tensors = 2 * LAYERS
    print(f"{where}, PyTorch {torch.__version__}: a layer takes {middle(LAYERS, 'exact'):.1f} us")
    print(f"an operator of PyTorch: {middle(OPERATORS, 'operator'):.1f} us")
    for name in ("idle", "detached", "kept"):
        print(f"{name}: {middle(tensors, name, 'exact'):.1f} us per saved tensor")
    print(f"compressed to 4 bits: {middle(tensors, 'codes', 'kept'):.1f} us per launch")
    print(f"codec: {middle(OPERATORS, 'codec'):.1f} us")


if __name__ == "__main__":
    main()
