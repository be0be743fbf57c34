"""Quantized inference on the CPU against float engines: ratios measured in one run.

    python benchmarks/cpu.py [--threads 1] [--repeats 15] [--variant avx2] [--config int8]
    python benchmarks/cpu.py --threads 1,2,4

Whole calls from Python, quantize and dequantize included; a single step runs through
`QuantGRU.stream`. Every figure is a median; engines take turns, so that noise of the machine hits
all alike. Beside `QuantGRU` stand nn.GRU in float32, PyTorch's dynamic quantization (the best of
its engines) and, if onnx and onnxruntime are installed, ONNX Runtime's float GRU (a '-' otherwise).

`GMAC/s` is the rate of the native code alone, real values in and out. `of mul` compares it with a
loop that does nothing but multiply in the same instructions, `of mem` compares the weights it goes
through in each step with a loop that does nothing but read as many bytes: with one row a step
cannot be faster than its weights are read. What is near either limit cannot become much faster.

With several numbers of threads the table is another one: whole calls of batches, and how many times
as fast as with the first number they are.
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
from quant_gru.kernels import _native
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
BATCHES = [shape for shape in SHAPES if shape[0] > 1]


def fused(config: QuantConfig) -> QuantConfig:
    """The three products unrounded."""
    for name in ("op.rRh", "op.old_contrib", "op.new_contrib"):
        config = config.replace(name, bitwidth=None)
    return config


CONFIGS = {
    "int8": QuantConfig.int8(),
    "int8_wide": QuantConfig.int8_wide(),
    "int8-free": QuantConfig.int8().replace_globals(scale_kind="free"),
    "int8-fused": fused(QuantConfig.int8()),
    "w8a16": QuantConfig.w8a16(),
    "int16": QuantConfig.int16(),
    "24 bits": QuantConfig.uniform(24, is_symmetric=False),
    "32 bits": QuantConfig.uniform(32, is_symmetric=False),
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


def onnx_runtime(gru: torch.nn.GRU, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """ONNX Runtime's float GRU with the same weights, on the CPU."""
    try:
        import onnx
        import onnxruntime
    except ImportError:
        return {}
    H, C = gru.hidden_size, gru.input_size

    def gates(weight: torch.Tensor) -> torch.Tensor:
        reset, update, candidate = weight.detach().chunk(3)
        return torch.cat([update, reset, candidate])

    tensors = {
        "W": gates(gru.weight_ih_l0)[None],
        "R": gates(gru.weight_hh_l0)[None],
        "B": torch.cat([gates(gru.bias_ih_l0), gates(gru.bias_hh_l0)])[None],
    }
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node(
                "GRU", ["x", "W", "R", "B"], ["y"], hidden_size=H, linear_before_reset=1
            )
        ],
        "gru",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, None, C])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 1, None, H])],
        [onnx.numpy_helper.from_array(t.numpy(), name) for name, t in tensors.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 8
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = x.numpy()
    with torch.inference_mode():
        expected = gru(x)[0]
        found = torch.from_numpy(session.run(None, {"x": values})[0])[:, 0]
        assert torch.allclose(expected, found, atol=1e-4), "not the same GRU"
    return {"onnxruntime": lambda: session.run(None, {"x": values})}


def multiply_rate(variant: str) -> float:
    """Multiply-accumulates per second of a loop of nothing else; nan where there is none."""
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        done = _native.multiply(variant, 2_000_000)
        rates.append(done / (time.perf_counter() - start))
    return max(rates) or float("nan")


def read_rate(size: int) -> float:
    """Bytes per second of a loop that reads a buffer of `size` bytes again and again."""
    buffer = torch.zeros(max(size, 4096), dtype=torch.uint8)
    loops = 1 + (1 << 27) // buffer.numel()
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        done = _native.read_memory(buffer.data_ptr(), buffer.numel(), loops)
        rates.append(done / (time.perf_counter() - start))
    return max(rates)


def modules(
    shape: tuple[int, int, int, int], config: QuantConfig
) -> tuple[QuantGRU, torch.nn.GRU, torch.Tensor]:
    """A calibrated GRU, the float one with its weights, and an input (T, N, C)."""
    N, T, C, H = shape
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=config).eval()
    plain = torch.nn.GRU(C, H).eval()
    plain.load_state_dict(gru.state_dict())
    x = torch.randn(T, N, C)
    gru.calibrate(x if T > 1 else torch.randn(50, N, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru, plain, x


def scaling(shape: tuple[int, int, int, int], config: QuantConfig, args: argparse.Namespace) -> str:
    """One line of the table of numbers of threads."""
    gru, plain, x = modules(shape, config)
    engines: dict[str, Callable[[], object]] = {}
    for count in args.threads:
        for name, module in (("ours", gru), ("nn.GRU", plain)):

            def run(module: torch.nn.Module = module, count: int = count) -> object:
                torch.set_num_threads(count)
                return module(x)

            engines[f"{name} {count}"] = run
    with torch.inference_mode():
        t = medians(engines, args.repeats)
    columns = [f"{','.join(map(str, shape)):>15}"]
    for count in args.threads:
        ours, theirs = t[f"ours {count}"], t[f"nn.GRU {count}"]
        first = [t[f"{name} {args.threads[0]}"] for name in ("ours", "nn.GRU")]
        columns.append(
            f"{theirs * 1e6:9.1f} {ours * 1e6:9.1f} {theirs / ours:8.2f}x"
            f" {first[0] / ours:8.2f}x {first[1] / theirs:8.2f}x"
        )
    return " ".join(columns)


def measure(shape: tuple[int, int, int, int], config: QuantConfig, args: argparse.Namespace) -> str:
    """One line of the table."""
    N, T, C, H = shape
    gru, plain, x = modules(shape, config)
    variant = executor.chosen()
    stack = executor.stack_of(gru._plan(), variant)
    assert stack is not None
    stream, x_t = gru.stream(N), x[0]
    engines: dict[str, Callable[[], object]] = {
        "ours": (lambda: stream(x_t)) if T == 1 else (lambda: gru(x)),
        "call": lambda: gru(x),
        "native": lambda: stack.run(x, None, None),
        "nn.GRU": lambda: plain(x),
        **dynamic(plain, x),
        **onnx_runtime(plain, x),
    }
    with torch.inference_mode():
        t = medians(engines, args.repeats)
    rivals = [value for name, value in t.items() if name.startswith("dynamic")]
    best = min(rivals) if rivals else float("nan")
    ort = t.get("onnxruntime", float("nan"))
    rate = N * T * 3 * H * (H + C) / t["native"]
    weight_bytes = 3 * H * H * (1 if config["weight.R"].bitwidth <= 8 else 4)
    reading = weight_bytes * T / t["native"] / read_rate(weight_bytes) if N == 1 else float("nan")
    columns = [
        f"{','.join(map(str, shape)):>15}",
        *(f"{value * 1e6:9.1f}" for value in (t["nn.GRU"], best, ort, t["ours"], t["native"])),
        *(f"{value / t['ours']:8.2f}x" for value in (t["nn.GRU"], best, ort)),
        f"{rate / 1e9:7.1f}",
        f"{rate / args.multiply_rate:7.0%}",
        f"{reading:7.0%}",
    ]
    return " ".join(columns).replace("nan%", "-").replace("nanx", "-").replace("nan", "  -")


def main() -> None:
    """Measure all shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1]
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--variant", default="", help="as QUANT_GRU_CPU")
    parser.add_argument("--config", choices=CONFIGS, default="int8")
    args = parser.parse_args()
    os.environ[executor.VARIABLE] = args.variant
    torch.set_num_threads(args.threads[0])
    print(f"{machine()}; {executor.chosen()}; {args.config}; medians of {args.repeats}, us")
    if len(args.threads) > 1:
        heads = (
            f"{'nn.GRU':>9} {f'ours ({n})':>9} {'nn/ours':>9} {'ours x':>9} {'nn.GRU x':>9}"
            for n in args.threads
        )
        print(f"{'N,T,C,H':>15}", *heads)
        for shape in BATCHES:
            print(scaling(shape, CONFIGS[args.config], args), flush=True)
        return
    args.multiply_rate = args.threads[0] * multiply_rate(executor.chosen())
    print(
        f"{'N,T,C,H':>15} {'nn.GRU':>9} {'dynamic':>9} {'ORT':>9} {'ours':>9} {'native':>9}"
        f" {'nn/ours':>9} {'dyn/ours':>9} {'ORT/ours':>9} {'GMAC/s':>7} {'of mul':>7} {'of mem':>7}"
    )
    for shape in SHAPES:
        print(measure(shape, CONFIGS[args.config], args), flush=True)


if __name__ == "__main__":
    main()
