"""What an exporter needs of a GRU: its plan and, where it has them, its float weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quant_gru.execution.layers import Weights
from quant_gru.integer.plan import GRUPlan


@dataclass(frozen=True)
class Source:
    """A GRU to export.

    Attributes:
        plan: Its plan; None for a GRU without scales, which has the profile 'float' only.
        weights: [layer][direction] -> W (3H, C), R (3H, H), bw, br (3H,), rows as PyTorch stores
            them; None for a frozen GRU.
        input_size: C.
        hidden_size: H.
        num_layers: Layers.
        directions: 1 or 2.
        batch_first: Whether N comes before T in inputs and outputs.
        zoneout: Share of a state that a unit keeps.
        file: Returns the bytes of its frozen file, with time first; only of a GRU with a plan.
    """

    plan: GRUPlan | None
    weights: Sequence[Sequence[Weights]] | None
    input_size: int
    hidden_size: int
    num_layers: int
    directions: int
    batch_first: bool
    zoneout: float
    file: Callable[[], bytes]
