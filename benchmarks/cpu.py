"""Quantized inference on the CPU against float engines: ratios measured in one run.

    python benchmarks/cpu.py [--threads 1] [--repeats 15] [--variant avx2] [--config int8]

Whole calls from Python, quantize and dequantize included. Every figure is a median; engines take
turns, so that noise of the machine hits all alike. Beside `QuantGRU` stand nn.GRU in float32,
PyTorch's dynamic quantization (the best of its engines) and, if it is installed, ONNX Runtime's
float GRU. `kernel` is the native executor alone, codes in and codes out; `GMAC/s` is its rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch

from calibration import machine
from quant_gru import QuantConfig, QuantGRU
from quant_gru.kernels.cpu import executor

SHAPES = [
    (1, 1, 40, 64),
    (1, 100, 40, 64),
    (1, 100, 64, 128),
    (1, 100, 128, 256),
    (1, 100, 256, 512),
    (32, 100, 64, 128),
    (32, 100, 128, 256),
    (128, 50, 128, 256),
    (512, 20, 100, 100),
]


def fused(config: QuantConfig) -> QuantConfig:
    """The three products unrounded."""
    for name in ("op.rRh", "op.old_contrib", "op.new_contrib"):
        config = config.replace(name, bitwidth=None)
    return config


CONFIGS = {
    "int8": QuantConfig.int8(),
    "int8-free": QuantConfig.int8().replace_globals(scale_kind="free"),
    "int8-fused": fused(QuantConfig.int8()),
    "w8a16": QuantConfig.w8a16(),
    "int16": QuantConfig.int16(),
}


def medians(engines: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each engine; each measurement lasts about 5 ms at least."""
    counts = {}
    for name, engine in engines.items():
        engine()
        start = time.perf_counter()
        engine()
        counts[name] = max(1, round(5e-3 / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, engine in engines.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                engine()
            times[name].append((time.perf_counter() - start) / counts[name])
    return {name: statistics.median(values) for name, values in times.items()}


def dynamic(gru: torch.nn.GRU, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """PyTorch's dynamically quantized GRU, with every engine of this machine."""
    found: dict[str, Callable[[], object]] = {}
    for engine in torch.backends.quantized.supported_engines:
        if engine == "none":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.backends.quantized.engine = engine
            wrapped = torch.nn.Sequential(gru)
            quantized = torch.ao.quantization.quantize_dynamic(wrapped, {torch.nn.GRU})[0]

        def run(model: torch.nn.Module = quantized, engine: str = engine) -> object:
            torch.backends.quantized.engine = engine
            return model(x)

        try:
            run()
        except RuntimeError:
            continue
        found[f"dynamic {engine}"] = run
    return found


def measure(shape: tuple[int, int, int, int], config: QuantConfig, args: argparse.Namespace) -> str:
    """One line of the table."""
    N, T, C, H = shape
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=config).eval()
    plain = torch.nn.GRU(C, H).eval()
    plain.load_state_dict(gru.state_dict())
    x = torch.randn(T, N, C)
    gru.calibrate(x if T > 1 else torch.randn(50, N, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    variant = executor.chosen()
    plan = gru._plan().cells[0][0]
    x_codes = plan.x.quantize(x).to(plan.x.container)
    h_codes = plan.h.quantize(torch.zeros(N, H)).to(plan.h.container)
    engines: dict[str, Callable[[], object]] = {
        "ours": lambda: gru(x),
        "kernel": lambda: executor.run(plan, x_codes, h_codes, None, False, variant, args.threads),
        "nn.GRU": lambda: plain(x),
        **dynamic(plain, x),
    }
    with torch.inference_mode():
        t = medians(engines, args.repeats)
    rivals = [value for name, value in t.items() if name.startswith("dynamic")]
    best = min(rivals) if rivals else float("nan")
    rate = N * T * 3 * H * (H + C) / t["kernel"] / 1e9
    return (
        f"{','.join(map(str, shape)):>15} {t['nn.GRU'] * 1e6:10.1f} {best * 1e6:10.1f}"
        f" {t['ours'] * 1e6:10.1f} {t['kernel'] * 1e6:10.1f}"
        f" {t['nn.GRU'] / t['ours']:8.2f}x {best / t['ours']:9.2f}x"
        f" {t['nn.GRU'] / t['kernel']:8.2f}x {rate:8.1f}"
    )


def main() -> None:
    """Measure all shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--variant", default="", help="as QUANT_GRU_CPU")
    parser.add_argument("--config", choices=CONFIGS, default="int8")
    args = parser.parse_args()
    os.environ[executor.VARIABLE] = args.variant
    torch.set_num_threads(args.threads)
    print(f"{machine()}; {executor.chosen()}; {args.config}; medians of {args.repeats}, us")
    print(
        f"{'N,T,C,H':>15} {'nn.GRU':>10} {'dynamic':>10} {'ours':>10} {'kernel':>10}"
        f" {'nn/ours':>9} {'dyn/ours':>10} {'nn/kernel':>9} {'GMAC/s':>8}"
    )
    for shape in SHAPES:
        print(measure(shape, CONFIGS[args.config], args), flush=True)


if __name__ == "__main__":
    main()
