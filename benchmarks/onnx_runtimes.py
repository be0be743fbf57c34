"""ONNX files in ONNX Runtime and OpenVINO: codes that differ, sizes and times.

    python benchmarks/onnx_runtimes.py codes      # share of the GRU's codes that differ
    python benchmarks/onnx_runtimes.py qdq        # the same by width, of the profile qdq
    python benchmarks/onnx_runtimes.py trained    # the same of the demo's trained GRU, by preset
    python benchmarks/onnx_runtimes.py times      # bytes, and times of one thread; C needs cc

OpenVINO runs with INFERENCE_PRECISION_HINT f32; --bf16 leaves its own choice. Inputs have a batch
and a length that were not seen at export.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

import quant_gru
from quant_gru import QuantConfig, QuantGRU
from quant_gru.demo.comparison import quantize, quantized_gru, variants
from quant_gru.demo.data import digits_task
from quant_gru.demo.model import SequenceClassifier
from quant_gru.demo.training import train

PROFILES = ("integer", "qdq", "float", "node")
SIZES = ((40, 64, "int8"), (64, 128, "int8"), (64, 128, "int16"), (128, 256, "int8"))
TEXT_OF_C = """
#include <stdio.h>
#include <time.h>
#include "net.h"
static net_state state;
static net_input x[NET_INPUT_SIZE];
static net_code y[NET_HIDDEN_SIZE];
int main(void) {
    double best = 1e9;
    int turn, n;
    net_init(&state);
    for (turn = 0; turn < 20; ++turn) {
        const clock_t start = clock();
        double taken;
        for (n = 0; n < 500; ++n) { x[n % NET_INPUT_SIZE] = (net_input)n; net_step(&state, x, y); }
        taken = (double)(clock() - start) / CLOCKS_PER_SEC / 500;
        if (taken < best) best = taken;
    }
    printf("%.9f %d\\n", best, (int)y[0]);
    return 0;
}
"""


class Tagger(torch.nn.Module):
    """A convolution, a GRU of two layers and directions, and a linear layer."""

    def __init__(self, config: QuantConfig) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(40, 40, 3, padding=1)
        self.gru = QuantGRU(40, 64, 2, bidirectional=True, batch_first=True, config=config)
        self.linear = torch.nn.Linear(128, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the GRU (N, T, 128), and scores (N, T, 10)."""
        y, _ = self.gru(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return y, self.linear(y)


class Denoiser(torch.nn.Module):
    """A causal mask from a GRU; the state goes in and out."""

    def __init__(self, config: QuantConfig) -> None:
        super().__init__()
        self.gru = QuantGRU(40, 64, batch_first=True, config=config)
        self.linear = torch.nn.Linear(64, 40)

    def forward(self, x: Tensor, hx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output of the GRU (N, T, 64), the masked input, and the state."""
        y, h_n = self.gru(x, hx)
        return y, x * torch.sigmoid(self.linear(y)), h_n


class Alone(torch.nn.Module):
    """A GRU of one layer and direction, which is exported by itself."""

    def __init__(self, config: QuantConfig) -> None:
        super().__init__()
        self.gru = QuantGRU(40, 64, batch_first=True, config=config)

    def forward(self, x: Tensor) -> Any:
        """Return output and last state."""
        return self.gru(x)


MODELS = {"GRU": Alone, "conv, GRU, linear": Tagger, "denoiser, 3 chunks": Denoiser}


def made(kind: type[torch.nn.Module], config: QuantConfig, seed: int = 0) -> Any:
    """Return a calibrated model."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    x = torch.randn(4, 50, 40)
    given = (x, torch.zeros(1, 4, 64)) if kind is Denoiser else (x,)
    model.gru.calibrating = True
    with torch.no_grad():
        model(*given)
    model.gru.calibrating = False
    model.gru.finalize_calibration()
    model.gru.use_quantization = True
    return model


def write(model: Any, path: Path, profile: str) -> None:
    """Export a model with a batch of 2 and 20 steps."""
    x = torch.randn(2, 20, 40)
    if isinstance(model, Alone):
        quant_gru.export_onnx(model.gru, path, x, profile, verify=False)
    elif isinstance(model, Denoiser):
        quant_gru.export_onnx(model, path, (x, torch.zeros(1, 2, 64)), profile, verify=False)
    else:
        quant_gru.export_onnx(model, path, x, profile, verify=False)


def onnx_runtime(path: Path, basic: bool = False) -> Callable[..., list[Any]]:
    """Load a file in ONNX Runtime, with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.register_custom_ops_library(quant_gru.onnx_operator_library())
    if basic:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda *given: session.run(None, dict(zip(names, given, strict=True)))


def openvino_with(hint: str | None) -> Callable[[Path], Callable[..., list[Any]]]:
    """Return a loader of OpenVINO, with one thread."""
    import openvino

    def load(path: Path) -> Callable[..., list[Any]]:
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1}
        if hint:
            options["INFERENCE_PRECISION_HINT"] = hint
        compiled = openvino.Core().compile_model(str(path), "CPU", options)
        return lambda *given: [np.array(each) for each in compiled(list(given)).values()]

    return load


def outputs(model: Any, run: Callable[..., list[Any]], x: Tensor) -> Tensor:
    """Return the output of the GRU in a runtime; the denoiser runs in three chunks."""
    if not isinstance(model, Denoiser):
        return torch.from_numpy(run(x.numpy())[0])
    state, found = np.zeros((1, len(x), 64), np.float32), []
    for chunk in x.split((1, 11, 25), dim=1):
        y, _, state = run(chunk.numpy(), state)
        found.append(torch.from_numpy(y))
    return torch.cat(found, dim=1)


def difference(model: Any, run: Callable[..., list[Any]]) -> tuple[float, int]:
    """Return the share of the GRU's codes that differ from PyTorch, and the largest difference."""
    x = torch.randn(5, 37, 40, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        given = (x, torch.zeros(1, 5, 64)) if isinstance(model, Denoiser) else (x,)
        expected = model(*given)[0]
    scales = [
        model.gru.get_quant_config("output.h", layer=model.gru.num_layers - 1, reverse=d)["scale"]
        for d in (False, True)[: 1 + model.gru.bidirectional]
    ]
    codes = (outputs(model, run, x) - expected).abs() / torch.tensor(scales).repeat_interleave(64)
    codes = codes.round()
    return float((codes > 0).float().mean()), int(codes.max())


def compared(model: Any, load: Callable[[Path], Callable[..., list[Any]]], path: Path) -> str:
    """Return how the codes differ, or why the runtime refuses the file."""
    try:
        run = load(path)
    except Exception as error:
        return f"refused: {str(error).strip().splitlines()[-1][:60]}"
    share, largest = difference(model, run)
    return "0" if share == 0 else f"{share:.1%} by {largest}"


def print_codes(folder: Path, hint: str | None) -> None:
    """Print a row for each model, width and profile."""
    runtimes = {"ONNX Runtime": onnx_runtime, "OpenVINO": openvino_with(hint)}
    print("| model | bits, scales | profile |", " | ".join(runtimes), "|")
    print("|---|---|---|---|---|")
    for name, kind in MODELS.items():
        for bits in ("int8", "int16"):
            for scale_kind in ("pot", "free"):
                config = getattr(QuantConfig, bits)().replace_globals(scale_kind=scale_kind)
                model = made(kind, config)
                for profile in PROFILES:
                    path = folder / "model.onnx"
                    write(model, path, profile)
                    cells = [compared(model, load, path) for load in runtimes.values()]
                    print(
                        "|", " | ".join((name, f"{bits[3:]}, {scale_kind}", profile, *cells)), "|"
                    )


def of_width(bits: int, scale_kind: str) -> QuantConfig:
    """Return a configuration with one width for all operators."""
    config = QuantConfig.int8().replace_globals(scale_kind=scale_kind)
    for name in config.operators:
        config = config.replace(name, bitwidth=bits)
    return config


def print_qdq(folder: Path) -> None:
    """Print the share of codes that differ in the profile qdq, least and most of four seeds."""
    print("| scales, bits | graph level | one layer | two layers, both directions |")
    print("|---|---|---|---|")
    path = folder / "model.onnx"
    for scale_kind in ("pot", "free"):
        for bits in (8, 12, 16):
            for basic in (True, False):
                cells = []
                for kind in (Alone, Tagger):
                    shares = []
                    for seed in range(4):
                        model = made(kind, of_width(bits, scale_kind), seed)
                        write(model, path, "qdq")
                        shares.append(difference(model, onnx_runtime(path, basic))[0])
                    cells.append(f"{min(shares):.1%} to {max(shares):.1%}")
                level = "basic" if basic else "default"
                print(f"| {scale_kind}, {bits} | {level} |", " | ".join(cells), "|", flush=True)


def print_trained(folder: Path, hint: str | None) -> None:
    """Print the share of codes that differ in the profile qdq, of the demo's GRU by preset."""
    task, path = digits_task(0), folder / "model.onnx"
    torch.manual_seed(0)
    model = SequenceClassifier(task.n_features, 64, task.n_classes)
    train(model, task.train, task.epochs, 0)
    x = task.test.features
    print("| preset | ONNX Runtime | ONNX Runtime, basic | OpenVINO |")
    print("|---|---|---|---|")
    for name, config in variants().items():
        gru = quantized_gru(quantize(model, config, task.train)).eval()
        quant_gru.export_onnx(gru, path, x[:2], "qdq", verify=False)
        with torch.no_grad():
            expected = gru(x)[0]
        scale, cells = gru.get_quant_config("output.h")["scale"], []
        for run in (onnx_runtime(path), onnx_runtime(path, True), openvino_with(hint)(path)):
            codes = ((torch.from_numpy(run(x.numpy())[0]) - expected).abs() / scale).round()
            cells.append(f"{(codes > 0).float().mean():.1%} by {codes.max():.0f}")
        print("|", " | ".join((name, *cells)), "|", flush=True)


def seconds(call: Callable[[], Any], least: float = 0.4) -> float:
    """Return the shortest time of a call, among those of `least` seconds."""
    call()
    best, ends = float("inf"), time.perf_counter() + least
    while time.perf_counter() < ends:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def time_of_c(folder: Path) -> float:
    """Return the seconds of a step of the C source in a folder on this machine."""
    (folder / "time.c").write_text(TEXT_OF_C)
    command = ["cc", "-O3", "-march=native", "net.c", "time.c", "-o", "time"]
    subprocess.run(command, cwd=folder, check=True)
    return float(subprocess.check_output([str(folder / "time")], text=True).split()[0])


def row_of_file(gru: QuantGRU, x: Tensor, folder: Path) -> list[str]:
    """Return bytes and times of the frozen file, executed by this library."""
    path = folder / "gru.safetensors"
    gru.freeze().save(path)
    loading = seconds(lambda: quant_gru.FrozenQuantGRU.load(path))
    loaded, stream, first = quant_gru.FrozenQuantGRU.load(path), gru.stream(1), x[0]
    with torch.no_grad():
        times = loading, seconds(lambda: loaded(x)), seconds(lambda: stream(first))
    return cells_of(path.stat().st_size, *times)


def row_of_onnx(gru: QuantGRU, x: Tensor, folder: Path, profile: str) -> list[str]:
    """Return bytes and times of a profile in ONNX Runtime."""
    whole, one = folder / "whole.onnx", folder / "one.onnx"
    quant_gru.export_onnx(gru, whole, x, profile, verify=False)
    quant_gru.export_step_onnx(gru, one, profile, verify=False)
    loading = seconds(lambda: onnx_runtime(whole))
    run, step = onnx_runtime(whole), onnx_runtime(one)
    stream = gru.stream(1)
    sequence, single, state = x.numpy(), x[0].numpy(), stream.state[0].contiguous().numpy()
    times = loading, seconds(lambda: run(sequence)), seconds(lambda: step(single, state))
    return cells_of(whole.stat().st_size, *times)


def cells_of(size: int, loading: float, whole: float, step: float) -> list[str]:
    """Return the columns of a row as text."""
    return [str(size), f"{1e3 * loading:.1f}", f"{1e3 * whole:.2f}", f"{1e6 * step:.1f}"]


def print_times(folder: Path) -> None:
    """Print sizes and times of sequences of 200 steps and of single steps, N = 1."""
    torch.set_num_threads(1)
    print("| C, H, preset | form | bytes | load, ms | 200 steps, ms | one step, us |")
    print("|---|---|---|---|---|---|")
    for C, H, preset in SIZES:
        torch.manual_seed(0)
        gru = QuantGRU(C, H, config=getattr(QuantConfig, preset)()).eval()
        gru.calibrate(torch.randn(50, 4, C))
        gru.finalize_calibration()
        gru.use_quantization = True
        x = torch.randn(200, 1, C)
        flash, taken = gru.export_c(folder, "net").flash_bytes, time_of_c(folder)
        rows = {
            "frozen file": row_of_file(gru, x, folder),
            "C source": [str(flash), "", f"{2e5 * taken:.2f}", f"{1e6 * taken:.1f}"],
            **{
                f"ONNX {name}": row_of_onnx(gru, x, folder, name)
                for name in (*PROFILES, "operator")
            },
        }
        for form, cells in rows.items():
            print("|", " | ".join((f"{C}, {H}, {preset}", form, *cells)), "|", flush=True)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("codes", "qdq", "trained", "times"))
    parser.add_argument("--bf16", action="store_true", help="leave OpenVINO its own precision")
    options = parser.parse_args()
    print(platform.processor() or platform.machine(), "onnxruntime", onnxruntime.__version__)
    with tempfile.TemporaryDirectory() as folder:
        if options.table == "codes":
            print_codes(Path(folder), None if options.bf16 else "f32")
        elif options.table == "qdq":
            print_qdq(Path(folder))
        elif options.table == "trained":
            print_trained(Path(folder), None if options.bf16 else "f32")
        else:
            print_times(Path(folder))


if __name__ == "__main__":
    main()
