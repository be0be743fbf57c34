"""Cost of calibration, as ratios to nn.GRU's own forward, measured in one run.

    python benchmarks/calibration.py [--repeats 5] [--threads 1] [--method histogram]
    python benchmarks/calibration.py --device cuda
    python benchmarks/calibration.py --order

Prints, for each shape, the time of the plain forward, of calibrate() and of its parts: the float
run in float64 with all operators, and the observers' work; and of finalize_calibration(), which
chooses the scales. `all/fwd` is the whole calibration over the forward of the same data. The claim
is `calibrate - observers < 3 x forward`. On a GPU the plain forward is cuDNN's, and all that is
observed and counted stays on the device.

--order counts the observed values that depend on the order of sums: those that differ between a
GRU and the same GRU with other orders of inputs and units.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from quant_gru import QuantGRU
from quant_gru.calibration.float_run import FloatWeights, float_layers
from quant_gru.calibration.observers import make_observer
from quant_gru.config import CALIBRATED

SHAPES = [
    (64, 200, 128, 256),
    (64, 200, 256, 256),
    (16, 100, 40, 64),
    (1, 200, 40, 64),
    (8, 100, 16, 64),
]


def machine() -> str:
    """One line on where this runs."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
        cpu = models[0] if models else cpu
    except OSError:
        pass
    return f"{cpu}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"


def once(function: Callable[[], object], device: str) -> float:
    """Seconds of one call, all of its work on the device included."""
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(
    N: int, T: int, C: int, H: int, method: str, repeats: int, device: str
) -> dict[str, float]:
    """Median seconds of each part; the parts take turns, so that noise hits all alike."""
    torch.manual_seed(0)
    gru = QuantGRU(C, H).to(device)
    gru.calibration_method, gru.use_quantization = method, False
    x = torch.randn(T, N, C, device=device)
    sequence = gru._normalize(x, None)
    weights = gru._float_weights()

    def forward() -> None:
        with torch.no_grad():
            gru(x)

    def calibrate() -> None:
        gru.reset_calibration()
        gru.calibrate(x)

    def run_only() -> None:
        float_layers(sequence.x, sequence.h0, None, weights, lambda *_: None)

    blocks: list[dict[str, torch.Tensor]] = []
    float_layers(sequence.x, sequence.h0, None, weights, lambda *found: blocks.append(found[2]))

    def observe_only() -> None:
        observers = {name: make_observer(method) for name in CALIBRATED}
        for block in blocks:
            for name, observer in observers.items():
                observer.update(block[name].to(torch.float32))

    parts = {
        "forward": forward,
        "calibrate": calibrate,
        "finalize": gru.finalize_calibration,
        "run": run_only,
        "observers": observe_only,
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats + 1):
        for name, part in parts.items():
            times[name].append(once(part, device))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def values_of(weights: FloatWeights, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of every operator of a GRU of one layer, whose initial state is 0."""
    blocks: list[dict[str, torch.Tensor]] = []
    h0 = torch.zeros(1, x.shape[1], weights.R.shape[1])
    float_layers(x, h0, None, [[weights]], lambda *found: blocks.append(found[2]))
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def count_differences(C: int, H: int, batches: int) -> None:
    """Print how many values depend on the order of inputs and units."""
    torch.manual_seed(0)
    total, different, most = 0, 0, 0.0
    W, R, bw, br = (w.detach() for w in torch.nn.GRU(C, H).parameters())
    for _ in range(batches):
        x, inputs, units = torch.randn(100, 32, C), torch.randperm(C), torch.randperm(H)
        rows = torch.cat([units + gate * H for gate in range(3)])
        ours = values_of(FloatWeights(W, R, bw, br), x)
        other = FloatWeights(W[rows][:, inputs], R[rows][:, units], bw[rows], br[rows])
        for name, theirs in values_of(other, x[..., inputs]).items():
            if name == "input.x":
                continue
            expected = ours[name][:, rows if theirs.shape[1] == 3 * H else units]
            total += theirs.numel()
            different += int((expected.float() != theirs.float()).sum())
            most = max(most, float((expected - theirs).abs().max()))
    print(f"GRU({C}, {H}): {different} of {total} values differ in float32; {most:.1e} in float64")


def main() -> None:
    """Measure all shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--method", default="histogram")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--order", action="store_true", help="count values; measure no time")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.order:
        count_differences(64, 128, batches=12)
        return
    where = torch.cuda.get_device_name() if args.device == "cuda" else machine()
    print(f"{where}; method {args.method}; medians of {args.repeats}")
    print(
        f"{'N,T,C,H':>16} {'forward':>10} {'calibrate':>10} {'finalize':>10} {'run':>10}"
        f" {'observers':>10} {'run/fwd':>10} {'(cal-obs)/fwd':>14} {'all/fwd':>8}"
    )
    for shape in SHAPES:
        t = measure(*shape, args.method, args.repeats, args.device)
        cells = " ".join(f"{t[name] * 1e3:8.1f}ms" for name in t)
        print(
            f"{','.join(map(str, shape)):>16} {cells} {t['run'] / t['forward']:9.2f}x"
            f" {(t['calibrate'] - t['observers']) / t['forward']:13.2f}x"
            f" {(t['calibrate'] + t['finalize']) / t['forward']:7.1f}x"
        )


if __name__ == "__main__":
    main()
