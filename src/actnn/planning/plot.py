"""Pictures of memory over a step. They need matplotlib: the extra `viz`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actnn.errors import ActNNError
from actnn.planning.timeline import Timeline


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ActNNError(
            "Expected matplotlib to be installed for a plot; run pip install quant-gru[viz]"
        ) from error
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    return pyplot


def plot_memory(timeline: Timeline | None, path: str | Path) -> None:
    """Draw the memory of a step over its time into a file, forward and backward shaded.

    Args:
        timeline: The parts of the step.
        path: The file; its suffix decides the format.

    Raises:
        ActNNError: If matplotlib is missing or there is no timeline.
    """
    if timeline is None:
        raise ActNNError("Expected the report to have a timeline; pass step= to report()")
    pyplot = _pyplot()
    moments, held, peaks, now, backward = [], [], [], 0.0, 0.0
    for part in timeline.parts:
        if part.backward and not backward:
            backward = now
        moments.append(now * 1e3)
        held.append(part.start / 2**20)
        peaks.append(part.peak / 2**20)
        now += part.seconds
    moments.append(now * 1e3)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.stairs(peaks, moments, label="peak of each part", color="tab:red")
    axes.step(moments, [*held, held[-1]], where="post", label="allocated", color="tab:blue")
    axes.axvspan(backward * 1e3, now * 1e3, color="0.93", label="backward")
    axes.set(xlabel="time in the step / ms", ylabel="memory / MiB", xlim=(0, now * 1e3))
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
