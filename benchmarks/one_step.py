"""A call of one step on a GPU, as a stream of steps makes it, replayed from CUDA graphs.

    python benchmarks/one_step.py

One row, C = 64, the state given, 8 bits: a graph of one call, and one of twenty.
"""

from __future__ import annotations

import statistics

import torch

from quant_gru import QuantConfig, QuantGRU


def captured(gru: QuantGRU, x: torch.Tensor, h: torch.Tensor, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of some calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            gru(x, h)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Of a replay."""
    found = []
    for _ in range(7):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / replays)
    return statistics.median(found)


def main() -> None:
    """Measure three sizes."""
    for H in (64, 256, 512):
        gru = QuantGRU(64, H, config=QuantConfig.int8()).cuda().eval()
        gru.calibrate(torch.randn(50, 4, 64, device="cuda"))
        gru.finalize_calibration()
        gru.use_quantization = True
        x = torch.randn(1, 1, 64, device="cuda")
        h = torch.zeros(1, 1, H, device="cuda")
        with torch.no_grad():
            for _ in range(5):
                gru(x, h)
            torch.cuda.synchronize()
            many, one = captured(gru, x, h, 20), captured(gru, x, h, 1)
        print(
            f"H={H}: graph of one call {microseconds(one, 100):.1f} us, "
            f"of twenty {microseconds(many, 20) / 20:.1f} us a call"
        )


if __name__ == "__main__":
    main()
