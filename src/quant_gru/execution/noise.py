"""What is random in training: states that are held, weights and values that are dropped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_gru.integer.random import BETWEEN_LAYERS, RECURRENT, ZONEOUT
from quant_gru.kernels.dispatch import events


@dataclass(frozen=True, eq=False)
class Noise:
    """The random part of a forward; backward draws it again from the seed.

    Attributes:
        seed: int64 scalar on the input's device; None where nothing is drawn.
        dropout: Probability of a value between layers to become zero.
        zoneout: Probability of a unit to keep its state in a step.
        recurrent_dropout: Probability of a recurrent weight to be zero for a whole sequence.
        updates: bool (layers * directions, T, N, H): units that take their new state, where the
            caller says so instead of its being drawn.
    """

    seed: Tensor | None = None
    dropout: float = 0.0
    zoneout: float = 0.0
    recurrent_dropout: float = 0.0
    updates: Tensor | None = None

    @property
    def drops(self) -> bool:
        """Whether values between layers are dropped."""
        return self.seed is not None and self.dropout > 0

    def held(
        self, layer: int, direction: int, directions: int, shape: tuple[int, int, int]
    ) -> Tensor | None:
        """Units that keep their state, bool of `shape`, (T, N, H); None where none does."""
        if self.updates is not None:
            return ~self.updates[layer * directions + direction]
        if self.seed is None or not self.zoneout:
            return None
        return events(self.seed, self.zoneout, shape, ZONEOUT + 2 * layer + direction)

    def factors(self, layer: int, shape: tuple[int, int, int]) -> Tensor:
        """What values that enter a layer are multiplied by: 0 or 1 / (1 - p), float32.

        Args:
            layer: The layer they enter.
            shape: (T, N, features).
        """
        assert self.seed is not None
        dropped = events(self.seed, self.dropout, shape, BETWEEN_LAYERS + 2 * layer)
        kept = 0.0 if self.dropout == 1 else 1 / (1 - self.dropout)
        return torch.where(dropped, 0.0, kept)

    def all_dropped(self, layers: int, directions: int, hidden_size: int) -> list[Tensor] | None:
        """`dropped_weights` of each layer and direction in turn; None where none is dropped."""
        found = [
            self.dropped_weights(layer, direction, hidden_size)
            for layer in range(layers)
            for direction in range(directions)
        ]
        return [each for each in found if each is not None] or None

    def dropped_weights(self, layer: int, direction: int, hidden_size: int) -> Tensor | None:
        """Recurrent weights that are zero, bool (3H, H) in PyTorch's row order; None for none."""
        if self.seed is None or not self.recurrent_dropout:
            return None
        shape = (1, 3 * hidden_size, hidden_size)
        stream = RECURRENT + 2 * layer + direction
        return events(self.seed, self.recurrent_dropout, shape, stream)[0]

    def weight_factors(self, layer: int, direction: int, hidden_size: int) -> Tensor | None:
        """What recurrent weights are multiplied by: 0 or 1 / (1 - p), float32; None for all 1."""
        dropped = self.dropped_weights(layer, direction, hidden_size)
        if dropped is None:
            return None
        return torch.where(dropped, 0.0, 1 / (1 - self.recurrent_dropout))


def draw(
    device: torch.device,
    *,
    dropout: float = 0.0,
    zoneout: float = 0.0,
    recurrent_dropout: float = 0.0,
    updates: Tensor | None = None,
) -> Noise | None:
    """The noise of one forward, its seed drawn by PyTorch's generator of `device`.

    Args:
        device: Where the input is.
        dropout: As of `Noise`.
        zoneout: As of `Noise`.
        recurrent_dropout: As of `Noise`.
        updates: As of `Noise`.

    Returns:
        None where nothing is random and no units are held.
    """
    drawn = dropout or recurrent_dropout or (zoneout and updates is None)
    if not drawn and updates is None:
        return None
    seed = torch.randint(1 << 62, (), device=device) if drawn else None
    return Noise(seed, dropout, zoneout, recurrent_dropout, updates)
