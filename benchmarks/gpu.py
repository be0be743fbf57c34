"""Quantized inference on a GPU against cuDNN: ratios measured in one run.

    python benchmarks/gpu.py [--config int8] [--repeats 20] [--shapes 3]

Whole calls, quantize and dequantize included, as Python makes them (eager) and replayed from a CUDA
graph. `cuDNN` is nn.GRU, the best of TF32, float16 and bfloat16. `us/step` is the recurrence alone.
Every figure is a median; engines take turns. Codes are compared with the reference first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from cpu import CONFIGS

from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer import reference
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels.cuda import border, compiler, driver, executor, planner

SHAPES = [
    (1, 100, 64, 128),
    (1, 1000, 128, 256),
    (16, 100, 64, 128),
    (32, 50, 64, 128),
    (32, 200, 128, 256),
    (64, 200, 256, 512),
    (64, 200, 512, 1024),
    (128, 100, 256, 256),
    (256, 50, 128, 128),
    (8, 1000, 256, 512),
    (32, 1000, 80, 256),
    (512, 20, 100, 100),
]

Engine = Callable[[], object]


def captured(engine: Engine) -> Engine:
    """The engine as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            engine()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine()
    return graph.replay


def medians(engines: dict[str, Engine], repeats: int) -> dict[str, float]:
    """Median microseconds of each engine, by events around five calls."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        for _ in range(3):
            engine()
    for _ in range(repeats):
        for name, engine in engines.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                engine()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / 5 * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def whole_call(plan: CellPlan, x: torch.Tensor, h0: torch.Tensor) -> torch.Tensor:
    """Real values in, real values out."""
    codes, nan = border.quantize(plan.x, x)
    states, _ = border.quantize(plan.h, h0)
    out, _ = executor.run(plan, codes, states)
    return border.dequantize(plan.h, out, nan)


class LastRecurrence:
    """A machine that remembers the recurrent launch, to repeat it."""

    def __init__(self, machine: driver.Device) -> None:
        self.machine = machine
        self.clusters = machine.clusters
        self.again: Engine = lambda: None

    def launch(self, *arguments: object) -> None:
        """Launch, and remember."""
        if getattr(arguments[0], "source", "") == "recurrent":
            self.again = lambda: self.machine.launch(*arguments)  # type: ignore[arg-type]
        self.machine.launch(*arguments)  # type: ignore[arg-type]


def cudnn(C: int, H: int, x: torch.Tensor) -> Engine:
    """nn.GRU in x's dtype."""
    plain = torch.nn.GRU(C, H, device=x.device, dtype=x.dtype).eval()
    return lambda: plain(x)


def measure(shape: tuple[int, int, int, int], config: QuantConfig, repeats: int) -> str:
    """One line of the table."""
    N, T, C, H = shape
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=config).eval().cuda()
    x, h0 = torch.randn(T, N, C, device="cuda"), torch.zeros(N, H, device="cuda")
    gru.calibrate(x[:100, :32])
    gru.finalize_calibration()
    gru.use_quantization = True
    plan = gru._plan().cells[0][0]
    few = border.quantize(plan.x, x[:20])[0]
    states = border.quantize(plan.h, h0)[0]
    expected = reference.run(plan, few, states)[0]
    equal = torch.equal(executor.run(plan, few, states)[0], expected)

    recorder = LastRecurrence(driver.machine_of(x.device))
    codes = border.quantize(plan.x, x)[0]
    kept = executor.run(plan, codes, states, machine=recorder)
    engines: dict[str, Engine] = {
        "ours": lambda: whole_call(plan, x, h0),
        "alone": recorder.again,
        "module": lambda: gru(x),
    }
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        engines[f"cudnn {kind}"] = cudnn(C, H, x.to(kind))
    if "cuda" not in gru_executor():
        del engines["module"]
    t = medians(engines, repeats)
    for name in [name for name in engines if name == "ours" or name.startswith("cudnn")]:
        # one at a time: cuDNN's workspaces in graphs must not meet those outside
        t |= medians({f"graph {name}": captured(engines[name])}, repeats)
    del kept
    eager = min(value for name, value in t.items() if name.startswith("cudnn"))
    graph = min(value for name, value in t.items() if name.startswith("graph cudnn"))
    form = executor.numbers_of(plan).form
    chosen = planner.choose(form, H, N, 1, recorder.clusters())
    laid = (
        "generic"
        if chosen is None
        else (f"{chosen.blocks},{chosen.split},{chosen.spread},{chosen.rows}")
    )
    return (
        f"{','.join(map(str, shape)):>16} {eager:9.1f} {t['ours']:9.1f} {eager / t['ours']:7.2f}x"
        f" {graph:9.1f} {t['graph ours']:9.1f} {graph / t['graph ours']:7.2f}x"
        f" {t['alone'] / T:8.3f} {laid:>9} {t.get('module', float('nan')):9.1f}"
        f" {'equal' if equal else 'DIFFERENT'}"
    )


def gru_executor() -> str:
    """The executor that QuantGRU uses on a GPU."""
    from quant_gru.kernels.ops import executor_name

    return executor_name("cuda").removeprefix("reference (PyTorch integers, cuda)")


def main() -> None:
    """Measure all shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--config", choices=CONFIGS, default="int8")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first ones")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}; NVRTC {compiler.version()}; "
        f"{args.config}; medians of {args.repeats}, us"
    )
    print(
        f"{'N,T,C,H':>16} {'cuDNN':>9} {'ours':>9} {'ratio':>8} {'graph':>9} {'ours':>9}"
        f" {'ratio':>8} {'us/step':>8} {'shape':>9} {'QuantGRU':>9}"
    )
    with torch.no_grad():
        for shape in SHAPES[: args.shapes]:
            print(measure(shape, CONFIGS[args.config], args.repeats), flush=True)


if __name__ == "__main__":
    main()
