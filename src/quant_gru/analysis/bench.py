"""Times of a GRU on this machine: float, PyTorch's dynamic int8, and integers."""

from __future__ import annotations

import copy
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from quant_gru.analysis.compare import bytes_of
from quant_gru.analysis.tables import text_table
from quant_gru.kernels.dispatch import executor_name
from quant_gru.whole_models.calibrate import calibrate_model
from quant_gru.whole_models.convert import convert_model

PRESETS = ("int8", "int8_wide", "w8a16", "int16")
_SECONDS = 0.4  # of each way
_FEWEST = 5


@dataclass(frozen=True)
class Timed:
    """One way to run the GRU.

    Attributes:
        name: 'float', 'dynamic int8' or a preset.
        sequence: Microseconds of a step in a call of all steps: the median.
        step: Microseconds of a call of one step, with the state of the step before; the median.
        weights: Bytes of weights and biases.
    """

    name: str
    sequence: float
    step: float
    weights: int | None


@dataclass(frozen=True)
class Bench:
    """All ways; `print` it.

    Attributes:
        rows: The ways, float first.
        shape: What was run, and where.
    """

    rows: tuple[Timed, ...]
    shape: str

    def __str__(self) -> str:
        titles = [
            "",
            "us a step of a sequence",
            "times float",
            "us a call of a step",
            "times float",
            "bytes",
        ]
        first = self.rows[0]
        rows = [
            [
                row.name,
                f"{row.sequence:.3g}",
                f"{first.sequence / row.sequence:.2f}",
                f"{row.step:.3g}",
                f"{first.step / row.step:.2f}",
                "" if row.weights is None else f"{row.weights:,}",
            ]
            for row in self.rows
        ]
        return f"{self.shape}\n{text_table(titles, rows)}"

    def to_json(self) -> str:
        """Return all figures as JSON."""
        return json.dumps(
            {"shape": self.shape, "ways": [asdict(row) for row in self.rows]}, indent=2
        )


def bench(
    input_size: int,
    hidden_size: int,
    layers: int,
    *,
    batch_size: int = 1,
    steps: int = 100,
    threads: int = 1,
) -> Bench:
    """Time a random GRU on the CPU; the ways take turns.

    Args:
        input_size: C.
        hidden_size: H.
        layers: Layers.
        batch_size: Sequences of a call.
        steps: Steps of a sequence.
        threads: Threads of PyTorch and of the kernels.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps, batch_size, input_size, generator=generator)
    gru = torch.nn.GRU(input_size, hidden_size, layers).eval()
    ways: dict[str, torch.nn.Module] = {"float": gru}
    dynamic = _dynamic(gru)
    if dynamic is not None:
        ways["dynamic int8"] = dynamic
    for preset in PRESETS:
        ways[preset] = calibrate_model(convert_model(gru, preset), [x], progress=False).eval()
    with _threads(threads), torch.no_grad():
        whole = _medians({name: _sequence(way, x) for name, way in ways.items()})
        single = _medians({name: _steps(way, x[:1]) for name, way in ways.items()})
    rows = tuple(
        Timed(
            name,
            1e6 * whole[name] / steps,
            1e6 * single[name],
            None if name == "dynamic int8" else bytes_of(way).weights,
        )
        for name, way in ways.items()
    )
    shape = (
        f"GRU({input_size}, {hidden_size}), {layers} layer{'s' * (layers > 1)}, "
        f"batch {batch_size}, {steps} steps, {threads} thread{'s' * (threads > 1)}; "
        f"{executor_name(torch.device('cpu'))}, torch {torch.__version__}, {platform.machine()}"
    )
    return Bench(rows, shape)


def _dynamic(gru: torch.nn.GRU) -> torch.nn.Module | None:
    """Return PyTorch's own int8 GRU; None where this PyTorch has none."""
    wrapped = torch.nn.Sequential(copy.deepcopy(gru))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: torch.nn.Module = torch.ao.quantization.quantize_dynamic(
                wrapped, {torch.nn.GRU}, dtype=torch.qint8
            )[0]
            found(torch.zeros(1, 1, gru.input_size))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return found


def _sequence(way: torch.nn.Module, x: Tensor) -> Callable[[], object]:
    return lambda: way(x)


def _steps(way: torch.nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a call of one step that goes on from the state of the last one."""
    _, state = way(x)

    def step() -> object:
        nonlocal state
        _, state = way(x, state)
        return state

    return step


def _medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each call; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + _SECONDS * len(calls)
    while time.perf_counter() < end or min(map(len, times.values())) < _FEWEST:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(own) for name, own in times.items()}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
