"""One network, trained exactly and in less memory: what is held, the peak, the time, the accuracy.

    python examples/train_in_less_memory.py [--steps 200] [--batch 64] [--plot memory.png]
    python examples/train_in_less_memory.py --device cuda --batch 4096

A small residual network learns handwritten digits (scikit-learn's, enlarged to 16 x 16). Every row
starts from the same weights and sees the same batches:

    exact             plain PyTorch
    4 bits            actnn.compress(model, bits=4)
    2 bits adaptive   actnn.compress(model, level="L3")
    fit               actnn.fit(model, batch, budget) at 75 % and at 60 % of the exact peak

`held` is what autograd keeps from forward to backward. `peak` is the most that all tensors of a
step take together, parameters and gradients included. On a GPU, the workspaces of convolutions are
most of the peak of a small batch, and no budget of 60 % of that peak can be met.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import actnn
from actnn.planning import format_bytes

CONSOLE = Console()


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to the same."""
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(x + self.norm2(self.conv2(y)))


def network(width: int = 16, blocks: int = 3) -> nn.Module:
    """A convolution, residual blocks and a classifier."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        *[Residual(width) for _ in range(blocks)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


@dataclass
class Digits:
    """Images (n, 1, 16, 16) and labels (n,), for training and for the test."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @classmethod
    def load(cls, device: torch.device) -> Digits:
        """Load the digits and divide them."""
        digits: Any = load_digits()
        x = torch.from_numpy(digits.images).float().unsqueeze(1).to(device) / 8 - 1
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
        y = torch.from_numpy(digits.target).long().to(device)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(device)
        x, y = x[order], y[order]
        return cls(x[:1400], y[:1400], x[1400:], y[1400:])

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step, the same in every row."""
        generator = torch.Generator().manual_seed(step)
        index = torch.randint(len(self.x), (size,), generator=generator).to(self.x.device)
        return self.x[index], self.y[index]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of a batch."""
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


@dataclass
class Result:
    """What one row of the table says."""

    held: int
    peak: int
    seconds: float
    loss: float
    accuracy: float
    report: actnn.Report


def train(model: nn.Module, data: Digits, steps: int, batch: int) -> Result:
    """Train, test, and measure one more step."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    # The rate falls to 0, so that the accuracy at the end does not depend on the last batches.
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, data.batch(step, batch))
        loss.backward()
        optimizer.step()
        rate.step()
        losses.append(loss.detach())
    final = torch.stack(losses[-10:]).mean().item()
    seconds = (time.perf_counter() - start) / steps
    model.eval()
    with torch.no_grad():
        right = (model(data.x_test).argmax(1) == data.y_test).float().mean().item()
    model.train()
    model.zero_grad()
    example = data.batch(0, batch)
    report = actnn.report(model, lambda: loss_of(model, example))
    assert report.peak is not None
    return Result(report.held, report.peak, seconds, final, right, report)


def main(arguments: list[str] | None = None) -> None:
    """Train every row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--plot", type=Path, help="draw the memory of the last row's step")
    options = parser.parse_args(arguments)
    data = Digits.load(options.device)
    torch.manual_seed(0)
    start = network().to(options.device)
    example = data.batch(0, options.batch)

    print("What each block would hold (actnn.estimate):")
    print(actnn.estimate(start, example, loss=loss_of))

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "held", "peak", "ms a step", "loss", "accuracy"):
        table.add_column(name, justify="right" if name else "left")
    plans = []

    def run(name: str, prepare: Callable[[nn.Module], object]) -> Result:
        model = copy.deepcopy(start)
        plan = prepare(model)
        if isinstance(plan, actnn.Plan):
            plans.append((name, plan))
        result = train(model, data, options.steps, options.batch)
        table.add_row(
            name,
            format_bytes(result.held),
            format_bytes(result.peak),
            f"{result.seconds * 1e3:.0f}",
            f"{result.loss:.3f}",
            f"{result.accuracy:.1%}",
        )
        return result

    exact = run("exact", lambda model: actnn.compress(model, level="L0"))
    run("4 bits", lambda model: actnn.compress(model, bits=4))
    run("2 bits adaptive", lambda model: actnn.compress(model, level="L3"))
    for percent in (75, 60):
        budget = exact.peak * percent // 100
        last = run(
            f"fit to {percent} %",
            lambda model, budget=budget: actnn.fit(model, example, budget, loss=loss_of),
        )
    CONSOLE.print(table)
    for name, plan in plans:
        print(f"{name}:\n{plan}\n")
    if options.plot is not None:
        last.report.plot(options.plot)


if __name__ == "__main__":
    main()
