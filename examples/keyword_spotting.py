"""Spoken digits: a small GRU names the word of a recording.

    python examples/keyword_spotting.py --data spoken_digits.npz
    torchrun --nproc-per-node 2 examples/keyword_spotting.py --data spoken_digits.npz --device cpu

The npz is that of the demo (docs/demo.md): log-mel features, takes 0..4 of each speaker for test.
Columns: cross-entropy of the test set in nats, and the share of words named correctly in percent.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from common import Processes, Result, Task, parser, run
from torch import Tensor, nn

from quant_gru.demo import SequenceClassifier
from quant_gru.demo.data import Sequences
from quant_gru.demo.errors import DataError
from quant_gru.demo.spoken import spoken_task

NOISES = 256


class KeywordSpotting(Task):
    """`SequenceClassifier` on spoken digits, trained with noise on the features.

    Args:
        data: The npz.
        device: Where features live.
        hidden_size: Units of the GRU.
        noise: Deviation of the noise; features have the deviation 1.
    """

    name = "spoken digits"
    batch_size = 64

    def __init__(
        self, data: Path, device: torch.device, hidden_size: int, noise: float = 0.5
    ) -> None:
        try:
            task = spoken_task(data)
        except DataError as error:
            raise SystemExit(str(error)) from None
        self.hidden_size, self.n_features, self.n_classes = (
            hidden_size,
            task.n_features,
            task.n_classes,
        )
        # lengths stay on the CPU: packing reads them there
        self.train, self.test = (
            Sequences(part.features.to(device), part.lengths, part.labels.to(device))
            for part in (task.train, task.test)
        )
        self.train_size, self.test_size = len(self.train), len(self.test)
        self.batch_size = min(self.batch_size, self.train_size)
        shape = NOISES, *self.train.features.shape[1:]
        pool = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.noises, self.drawn = noise * pool.to(device), 0

    def model(self) -> nn.Module:
        """A classifier."""
        return SequenceClassifier(self.n_features, self.hidden_size, self.n_classes)

    def loss(self, model: nn.Module, index: Tensor) -> Tensor:
        """Cross-entropy of training recordings, in training with noise."""
        batch = self.train.select(index)
        if model.training:
            # chosen by sample and step, so that it does not depend on the number of processes
            noise = self.noises[(index + self.drawn) % NOISES]
            batch = replace(batch, features=batch.features + noise)
            self.drawn += 1
        return nn.functional.cross_entropy(_scores(model, batch), batch.labels)

    def score(self, model: nn.Module, index: Tensor) -> list[float]:
        """Sums of cross-entropy and of words named correctly, number of recordings."""
        batch = self.test.select(index)
        scores = _scores(model, batch)
        loss = nn.functional.cross_entropy(scores, batch.labels, reduction="sum")
        right = (scores.argmax(1) == batch.labels).sum()
        return [loss.item(), float(right), float(len(batch))]

    def report(self, means: list[float]) -> dict[str, float]:
        """Cross-entropy and accuracy."""
        return {"cross-entropy": means[0], "accuracy %": 100 * means[1]}


def _scores(model: nn.Module, batch: Sequences) -> Tensor:
    longest = int(batch.lengths.max())
    scores: Tensor = model(batch.features[:, :longest], batch.lengths)
    return scores


def main(arguments: list[str] | None = None) -> list[Result]:
    """Command line."""
    options = parser(__doc__ or "", steps=800)
    options.add_argument("--data", type=Path, required=True, help="spoken_digits.npz")
    options.add_argument("--hidden-size", type=int, default=32)
    options.add_argument("--noise", type=float, default=0.5, help="on features, in training")
    chosen = options.parse_args(arguments)
    processes = Processes.join(chosen.device)
    try:
        task = KeywordSpotting(chosen.data, processes.device, chosen.hidden_size, chosen.noise)
        return run(task, chosen, processes)
    finally:
        processes.leave()


if __name__ == "__main__":
    main()
