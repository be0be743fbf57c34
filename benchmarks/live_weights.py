"""What it costs that weights are followed at every forward of training, against building anew.

python benchmarks/live_weights.py [cpu|cuda]
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable

import torch

from quant_gru import QuantConfig, QuantGRU
from quant_gru.execution.layers import run_real
from quant_gru.integer.plan import CellPlan, build_weights, stack
from quant_gru.kernels.live_weights import live_of

SIZES = [(64, 128), (128, 256), (512, 512)]
T, N = 50, 32


def microseconds(call: Callable[[], object], device: str) -> float:
    """The least time of a call, and of what it queued."""
    best = float("inf")
    repeats = 3 if device == "cpu" else 20
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best * 1e6


def main(device: str) -> None:
    """Print a line for each size and configuration."""
    torch.set_num_threads(1)
    print(torch.cuda.get_device_name() if device == "cuda" else platform.processor())
    for config in ("int8", "w8a16"):
        for C, H in SIZES:
            gru = QuantGRU(C, H, config=getattr(QuantConfig, config)()).to(device)
            gru.calibrate(torch.randn(10, 4, C, device=device))
            gru.finalize_calibration()
            gru.use_quantization = True
            gru.train()
            x = torch.randn(T, N, C, device=device)
            h0 = torch.zeros(1, N, H, device=device)
            weights = gru._weights()
            with torch.no_grad():
                gru(x)
                cell = gru._plan().cells[0][0]
                live = live_of(cell.weights)
                qparams = gru._state.scales[0][0]
                values = [w.detach() for w in weights[0][0]]

                def anew():
                    part = build_weights(qparams, *values)  # noqa: B023
                    plan = stack([[CellPlan(cell.frozen, part)]])  # noqa: B023
                    return run_real(plan, x, h0, None, weights, 0.0)  # noqa: B023

                anew()
                times = {
                    "update": microseconds(lambda: live.update(*values), device),  # noqa: B023
                    "forward": microseconds(lambda: gru(x), device),  # noqa: B023
                    "forward, built anew": microseconds(anew, device),
                }
                if device == "cuda":
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        gru(x)
                    times["graph"] = microseconds(graph.replay, device)
                    gru.eval()
                    gru(x)
                    times["eval forward"] = microseconds(lambda: gru(x), device)  # noqa: B023
            text = ", ".join(f"{name} {value:.0f}" for name, value in times.items())
            print(f"{config} C={C} H={H} T={T} N={N}, us: {text}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
