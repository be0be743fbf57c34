"""Says what `fit` measures and how long it may take, and when its time is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from actnn.errors import ActNNError

Report = Callable[[int, int, str], None]

_logger = logging.getLogger(__name__)


class Measuring:
    """The progress of measurements: a bar on a terminal, or calls of a function.

    Args:
        report: Called before each measurement with how many are done, how many there may be, and
            what comes. None draws a bar on standard error if that is a terminal.
        max_seconds: After this time only what a plan needs is measured; None for no limit.

    Raises:
        ActNNError: If an argument is not as described.
    """

    def __init__(self, report: Report | None, max_seconds: float | None) -> None:
        if report is not None and not callable(report):
            raise ActNNError(
                f"Expected progress to be a function of (done, total, text), got {report!r}"
            )
        number = isinstance(max_seconds, (int, float)) and not isinstance(max_seconds, bool)
        if max_seconds is not None and not (number and max_seconds > 0):
            raise ActNNError(f"Expected max_seconds to be a number above 0, got {max_seconds!r}")
        self._report, self._limit = report, max_seconds
        self._bar: Progress | None = None
        self._begin = time.monotonic()
        self._done = self._total = 0

    def has_time_for(self, seconds: float) -> bool:
        """Whether something that takes so long would end in time."""
        return self._limit is None or time.monotonic() - self._begin + seconds <= self._limit

    def begin(self, total: int) -> None:
        """Say how many measurements come, in addition to those before."""
        self._total += total
        if self._report is None and self._bar is None:
            console = Console(stderr=True)
            self._bar = Progress(
                TextColumn("fit"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                console=console,
                auto_refresh=False,
                transient=True,
                disable=not console.is_terminal,
            )
            self._bar.start()
            self._bar.add_task("")

    def next(self, what: str) -> None:
        """Say what is measured next."""
        self._total = max(self._total, self._done + 1)
        spent = time.monotonic() - self._begin
        left = spent / self._done * (self._total - self._done) if self._done else 0.0
        if self._limit is not None:
            left = min(left, max(self._limit - spent, 0.0))
        text = f"{what}, about {left:.0f} s left" if self._done else what
        _logger.info("fit %d/%d: %s", self._done + 1, self._total, text)
        if self._report is not None:
            self._report(self._done, self._total, text)
        if self._bar is not None:
            task = self._bar.tasks[0].id
            self._bar.update(task, completed=self._done, total=self._total, description=text)
            self._bar.refresh()
        self._done += 1

    @property
    def is_over(self) -> bool:
        """Whether there is no time for what can be left out."""
        return not self.has_time_for(0.0)

    @property
    def is_late(self) -> bool:
        """Whether it is over by more than a tenth: plans that were measured may still be timed."""
        return self._limit is not None and not self.has_time_for(-0.1 * self._limit)

    def end(self) -> None:
        """Remove the bar. What comes afterwards has the whole time again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._begin, self._done, self._total = time.monotonic(), 0, 0
