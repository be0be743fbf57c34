"""Float training and prediction in plain PyTorch, independent of quantization."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quant_gru.demo.data import Sequences
from quant_gru.demo.model import SequenceClassifier

LEARNING_RATE = 1e-2
MAX_GRADIENT = 1.0


def train(
    model: SequenceClassifier,
    data: Sequences,
    epochs: int,
    seed: int,
    batch_size: int = 64,
    on_epoch: Callable[[float], None] = lambda loss: None,
) -> None:
    """Train `model` in place: Adam, one-cycle learning rate, clipped gradients.

    Args:
        model: The classifier; in eval mode afterwards.
        data: Training sequences.
        epochs: Passes over `data`.
        seed: Determines the order of the sequences.
        batch_size: Sequences per step.
        on_epoch: Called after every epoch with its mean loss.
    """
    order = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(data) // batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    model.train()
    for _ in range(epochs):
        shuffled = data.select(torch.randperm(len(data), generator=order))
        total = 0.0
        for batch in shuffled.batches(batch_size):
            scores = model(batch.features, batch.lengths)
            loss = nn.functional.cross_entropy(scores, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        on_epoch(total / len(data))
    model.eval()


@torch.no_grad()
def predict(model: nn.Module, data: Sequences, batch_size: int = 256) -> Tensor:
    """Return predicted classes, int64 (N,)."""
    batches = data.batches(batch_size)
    return torch.cat([model(batch.features, batch.lengths).argmax(1) for batch in batches])
