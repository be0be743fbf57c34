"""Accuracy of the 8-bit presets beside PyTorch's dynamic quantization, and what they cost.

    python benchmarks/presets.py [--digits spoken_digits.npz]

`random` is the output of a GRU(128, 256) with random weights on noise, `digits` that of the demo's
GRU, trained on spoken digits: signal over quantization noise in decibels, against the float GRU.
`times int8` is a call of GRU(128, 256), 50 steps of 32 rows on one thread, over that of int8.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from quant_gru import QuantConfig, QuantGRU
from quant_gru.demo.comparison import quantize
from quant_gru.demo.model import SequenceClassifier
from quant_gru.demo.spoken import spoken_task
from quant_gru.demo.training import train

CONFIGS = {
    "int8": QuantConfig.int8(),
    "int8, free": QuantConfig.int8().replace_globals(scale_kind="free"),
    "int8_wide": QuantConfig.int8_wide(),
    "int8_wide, free": QuantConfig.int8_wide().replace_globals(scale_kind="free"),
    "w8a16": QuantConfig.w8a16(),
}


def decibels(signal: Tensor, found: Tensor) -> float:
    """Signal over noise."""
    return float(10 * torch.log10(signal.square().sum() / (found - signal).square().sum()))


def dynamic(gru: nn.GRU) -> nn.Module:
    """PyTorch's dynamic quantization: 8-bit weights and inputs of products, all else float."""
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(copy.deepcopy(gru)), {nn.GRU})[0]


def on_noise() -> tuple[dict[str, float], dict[str, float]]:
    """Decibels of each on noise, and times."""
    torch.manual_seed(0)
    gru, data, test = nn.GRU(128, 256), torch.randn(60, 16, 128), torch.randn(60, 16, 128)
    x, signal = torch.randn(50, 32, 128), gru(test)[0]
    found = {"dynamic": decibels(signal, dynamic(gru)(test)[0])}
    made = {}
    for name, config in CONFIGS.items():
        made[name] = ours = QuantGRU(128, 256, config=config).eval()
        ours.load_state_dict(gru.state_dict())
        ours.calibrate(data)
        ours.finalize_calibration()
        ours.use_quantization = True
        found[name] = decibels(signal, ours(test)[0])
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(30):
        for name, ours in made.items():
            start = time.perf_counter()
            ours(x)
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return found, {name: t / medians["int8"] for name, t in medians.items()}


def on_digits(path: Path) -> dict[str, float]:
    """Decibels of each on spoken digits."""
    task = spoken_task(path)
    torch.manual_seed(0)
    model = SequenceClassifier(task.n_features, 64, task.n_classes)
    with torch.enable_grad():
        train(model, task.train, task.epochs, 0)
    data = task.test.spread(300)
    x = pack_padded_sequence(data.features, data.lengths, batch_first=True, enforce_sorted=False)
    signal = model.gru(x)[0].data
    found = {"dynamic": decibels(signal, dynamic(model.gru)(x)[0].data)}
    for name, config in CONFIGS.items():
        found[name] = decibels(signal, quantize(model, config, task.train).gru(x)[0].data)
    return found


@torch.no_grad()
def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--digits", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    noise, times = on_noise()
    digits = {} if args.digits is None else on_digits(args.digits)
    print(f"{'':>16} {'random':>8} {'digits':>8} {'times int8':>11}")
    for name in noise:
        heard = f"{digits[name]:8.1f}" if name in digits else f"{'':8}"
        cost = f"{times[name]:11.2f}" if name in times else ""
        print(f"{name:>16} {noise[name]:8.1f} {heard} {cost}")


if __name__ == "__main__":
    main()
