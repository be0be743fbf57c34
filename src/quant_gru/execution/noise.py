"""Random masks of training: held states, dropped weights and dropped values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant_gru.integer.random import BETWEEN_LAYERS, RECURRENT, ZONEOUT
from quant_gru.kernels.dispatch import executor_of


@dataclass(frozen=True, eq=False)
class Noise:
    """The random masks of a forward; backward draws them again from the seed.

    Attributes:
        seed: int64 scalar on the input's device; None if nothing is drawn.
        dropout: Probability that a value between layers becomes zero.
        zoneout: Probability that a unit keeps its state in a step.
        recurrent_dropout: Probability that a recurrent weight is zero for a whole sequence.
        updates: bool (layers * directions, T, N, H), units that take their new state, as given by
            the caller; None if they are drawn.
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
        """Return units that keep their state, bool of `shape`, (T, N, H); None if all update."""
        if self.updates is not None:
            return ~self.updates[layer * directions + direction]
        if self.seed is None or not self.zoneout:
            return None
        return self._events(self.zoneout, shape, ZONEOUT + 2 * layer + direction)

    def _events(self, p: float, shape: tuple[int, int, int], stream: int) -> Tensor:
        assert self.seed is not None
        return executor_of(self.seed.device).events(self.seed, p, shape, stream)

    def factors(self, layer: int, shape: tuple[int, int, int]) -> Tensor:
        """Return factors for the input values of a layer: 0 or 1 / (1 - p), float32.

        Args:
            layer: Index of the layer.
            shape: (T, N, features).
        """
        dropped = self._events(self.dropout, shape, BETWEEN_LAYERS + 2 * layer)
        kept = 0.0 if self.dropout == 1 else 1 / (1 - self.dropout)
        return torch.where(dropped, 0.0, kept)

    def all_dropped(self, layers: int, directions: int, hidden_size: int) -> list[Tensor] | None:
        """Return `dropped_weights` of each layer and direction in turn; None if none drops."""
        found = [
            self.dropped_weights(layer, direction, hidden_size)
            for layer in range(layers)
            for direction in range(directions)
        ]
        return [each for each in found if each is not None] or None

    def dropped_weights(self, layer: int, direction: int, hidden_size: int) -> Tensor | None:
        """Return dropped recurrent weights, bool (3H, H) in PyTorch's row order; None if none."""
        if self.seed is None or not self.recurrent_dropout:
            return None
        shape = (1, 3 * hidden_size, hidden_size)
        stream = RECURRENT + 2 * layer + direction
        return self._events(self.recurrent_dropout, shape, stream)[0]

    def weight_factors(self, layer: int, direction: int, hidden_size: int) -> Tensor | None:
        """Return factors of the recurrent weights: 0 or 1 / (1 - p), float32; None if all are 1."""
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
    """Return the noise of one forward, with a seed from PyTorch's generator of `device`.

    Args:
        device: Device of the input.
        dropout: As for `Noise`.
        zoneout: As for `Noise`.
        recurrent_dropout: As for `Noise`.
        updates: As for `Noise`.

    Returns:
        None if nothing is random and no units are held.
    """
    drawn = dropout or recurrent_dropout or (zoneout and updates is None)
    if not drawn and updates is None:
        return None
    seed = torch.randint(1 << 62, (), device=device) if drawn else None
    return Noise(seed, dropout, zoneout, recurrent_dropout, updates)
