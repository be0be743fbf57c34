"""What `fit` returns."""

from __future__ import annotations

from dataclasses import dataclass

from actnn.planning.blocks import BlockChoice
from actnn.planning.sizes import format_bytes
from actnn.planning.units import Unit


@dataclass(frozen=True)
class Plan:
    """A choice for each unit of a model, and what it costs.

    Attributes:
        choices: Path of a unit -> its choice, in order of the forward.
        budget: Bytes that the step may use at its peak.
        predicted_peak: Peak in bytes by the model of costs.
        peak: Peak in bytes of a real step.
        predicted_seconds: Seconds of a step, forward and backward, by the model of costs.
        seconds: Seconds of a real step: the lower quartile of some.
        noise: Variance that compression adds to the gradient, relative to its squared norm.
        notes: What was left out, and why: units that cannot be recomputed, choices whose gradient
            was wrong, measurements for which there was no time.
    """

    choices: dict[str, BlockChoice]
    budget: int
    predicted_peak: int
    peak: int
    predicted_seconds: float
    seconds: float
    noise: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max(map(len, self.choices))
        lines = [f"{path:<{width}}  {each}" for path, each in self.choices.items()]
        if all(each.whole for each in self.choices.values()):
            lines = [f"the model  {next(iter(self.choices.values()))}"]
        return "\n".join(
            [
                *lines,
                f"peak {format_bytes(self.peak)} of {format_bytes(self.budget)} "
                f"(predicted {format_bytes(self.predicted_peak)}), "
                f"{self.seconds * 1e3:.1f} ms a step (predicted "
                f"{self.predicted_seconds * 1e3:.1f} ms), gradient noise {self.noise:.1e}",
                *self.notes,
            ]
        )


def not_recomputed(units: list[Unit]) -> list[str]:
    """Return a line for each reason for which units are not recomputed."""
    paths: dict[str, list[str]] = {}
    for unit in units:
        if unit.once:
            paths.setdefault(unit.once, []).append(unit.path)
    return [f"not recomputed: {', '.join(each)}: {why}" for why, each in paths.items()]
