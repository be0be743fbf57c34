"""System identification: a GRU learns how a pump drives the water levels of two tanks.

    python examples/sequence_regression.py

A pump fills the upper tank, which drains into the lower one, which drains away; the upper tank can
overflow, part of it into the lower one. From the pump's voltage alone, at every step, the GRU has
to say the level of the lower tank: the flow through a hole goes with the square root of the level,
and the overflow is a hard nonlinearity with a long memory. All data are simulated here.

Columns: squared error over the variance of the level, and the same as signal over noise in dB.
"""

from __future__ import annotations

import math

import torch
from common import Processes, Result, Task, parser, run
from torch import Tensor, nn

HEIGHT = 10.0  # of the upper tank
DRAIN, PUMP, SPILL = 0.25, 0.42, 0.6
SENSOR_NOISE = 0.01


def tanks(count: int, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Voltages and levels.

    Returns:
        The pump's voltage (count, steps, 1) in 0..3, and the lower tank's level (count, steps, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    # levels that hold for a while, smoothed, as an operator's hand or a controller gives them
    held = torch.rand(count, 1 + steps // 20, generator=generator).repeat_interleave(20, 1)
    voltage = 3.0 * nn.functional.avg_pool1d(held[:, None, : steps + 4], 5, 1)[:, 0, :steps]
    upper, lower = torch.zeros(count), torch.zeros(count)
    levels = []
    for u in voltage.unbind(1):
        through = DRAIN * upper.sqrt()
        upper = (upper + PUMP * u - through).clamp(min=0)
        over = (upper - HEIGHT).clamp(min=0)
        upper = upper - over
        lower = (lower + through + SPILL * over - DRAIN * lower.sqrt()).clamp(min=0)
        levels.append(lower)
    level = torch.stack(levels, 1)
    return voltage[..., None], level[..., None]


class Model(nn.Module):
    """A GRU and a linear layer on each of its outputs.

    Args:
        hidden_size: Units of the GRU, H.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gru = nn.GRU(1, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Levels (N, T, 1) of voltages (N, T, 1)."""
        level: Tensor = self.head(self.gru(x)[0])
        return level


class Tanks(Task):
    """The level of the lower tank.

    Args:
        device: Where sequences live.
        hidden_size: Units of the GRU.
        length: Steps of a sequence.
    """

    name = "two tanks"
    batch_size = 64
    train_size = 1024
    test_size = 256

    def __init__(self, device: torch.device, hidden_size: int, length: int) -> None:
        self.hidden_size = hidden_size
        voltage, level = tanks(self.train_size + self.test_size, length, seed=0)
        mean, deviation = level[: self.train_size].mean(), level[: self.train_size].std()
        self.x = ((voltage - 1.5) / 1.5).to(device)
        self.y = ((level - mean) / deviation).to(device)
        noise = torch.randn(self.train_size, length, 1, generator=torch.Generator().manual_seed(1))
        self.measured = self.y[: self.train_size] + SENSOR_NOISE * noise.to(device)

    def model(self) -> nn.Module:
        """A model of the tanks."""
        return Model(self.hidden_size)

    def loss(self, model: nn.Module, index: Tensor) -> Tensor:
        """Mean squared error against noisy measurements."""
        return nn.functional.mse_loss(model(self.x[index]), self.measured[index])

    def score(self, model: nn.Module, index: Tensor) -> list[float]:
        """Sum of squared errors, and of what they are compared with."""
        x, y = (part[self.train_size :][index] for part in (self.x, self.y))
        return [(model(x) - y).square().sum().item(), y.square().sum().item()]

    def report(self, means: list[float]) -> dict[str, float]:
        """Squared error, and signal over noise."""
        return {"squared error": means[0], "SNR dB": -10 * math.log10(means[0])}


def main(arguments: list[str] | None = None) -> list[Result]:
    """Command line."""
    options = parser(__doc__ or "", steps=1000)
    options.add_argument("--hidden-size", type=int, default=32)
    options.add_argument("--length", type=int, default=200, help="steps of a sequence")
    chosen = options.parse_args(arguments)
    processes = Processes.join(chosen.device)
    try:
        task = Tanks(processes.device, chosen.hidden_size, chosen.length)
        return run(task, chosen, processes)
    finally:
        processes.leave()


if __name__ == "__main__":
    main()
