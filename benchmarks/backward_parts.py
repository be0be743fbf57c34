"""Times the CUDA backward: whole, in a graph and eager, and by kernel.

python benchmarks/backward_parts.py [--precision bf16] [--shape N,T,C,H ...]
"""

from __future__ import annotations

import argparse
import time

import torch
from gpu import SHAPES

from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer.backward import Tape
from quant_gru.kernels.cuda.backward import layer
from quant_gru.kernels.cuda.forward import executor


def prepared(N: int, T: int, C: int, H: int):
    """A tape and gradients."""
    gru = QuantGRU(C, H, config=QuantConfig.int8()).eval().cuda()
    gru.calibrate(torch.randn(16, 8, C, device="cuda"))
    gru.finalize_calibration()
    plan = gru._plan().cells[0][0]
    x = torch.randint(-90, 90, (T, N, C), dtype=torch.int8, device="cuda")
    h0 = torch.zeros(N, H, dtype=torch.int8, device="cuda") + plan.h.zero_point
    out, _ = executor.run(plan, x, h0)
    tape = Tape(plan, x, h0.to(plan.h.container), out)
    return tape, torch.randn(T, N, H, device="cuda"), torch.randn(N, H, device="cuda")


def graph_time(call, repeats: int = 7) -> float:
    """Microseconds of a replay, the least of some."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        graph.replay()
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 200)
    return best


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--shape", action="append")
    parser.add_argument("--parts", action="store_true", help="also by kernel")
    options = parser.parse_args()
    wanted = options.shape and [tuple(map(int, each.split(","))) for each in options.shape]
    print(torch.cuda.get_device_name(), options.precision)
    for N, T, C, H in wanted or SHAPES:
        tape, out, last = prepared(N, T, C, H)

        def call(tape=tape, out=out, last=last):
            return layer.backward([tape], [out], [last], None, options.precision)

        whole = graph_time(call)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        host = (time.perf_counter() - start) / 20 * 1e6
        torch.cuda.synchronize()
        eager = (time.perf_counter() - start) / 20 * 1e6
        print(f"{N},{T},{C},{H}: graph {whole:.0f} us, eager {eager:.0f} us, host {host:.0f} us")
        if options.parts:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
            for each in sorted(p.key_averages(), key=lambda e: -e.device_time_total):
                time_, count = each.device_time_total / 3, each.count / 3
                print(f"    {time_:8.1f} us {count:5.1f} {each.key[:90]}")


if __name__ == "__main__":
    main()
