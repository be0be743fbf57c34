"""Random stacks: layers and directions of different widths and signs, with or without lengths."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kept import shared
from quant_gru import QuantConfig, QuantGRU
from quant_gru.config import ACTIVATIONS
from quant_gru.integer.plan import GRUPlan

WIDTHS = (4, 7, 8, 12, 16)


@dataclass(frozen=True)
class StackCase:
    """A GRU with real values to run it on.

    Attributes:
        gru: Calibrated, in eval mode.
        x: (T, N, C), of any strides.
        h0: (layers * directions, N, H), of any strides, or None.
        lengths: int64 (N,) or None.
    """

    gru: QuantGRU
    x: Tensor
    h0: Tensor | None
    lengths: Tensor | None

    @property
    def plan(self) -> GRUPlan:
        """Its plan."""
        with torch.no_grad():
            return self.gru._plan()


def random_stack(seed: int, *, bidirectional: bool | None = None) -> StackCase:
    """The same case for the same seed, with a GRU of its own."""
    with torch.enable_grad():
        case = _made(seed, bidirectional)
    return replace(case, gru=copy.deepcopy(case.gru))


@shared
def _made(seed: int, bidirectional: bool | None) -> StackCase:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    both = rng.random() < 0.5 if bidirectional is None else bidirectional
    H, C = rng.choice((1, 2, 7, 8, 15, 16, 17, 33)), rng.choice((1, 2, 5, 16, 19))
    config = rng.choice((QuantConfig(), QuantConfig.int8(), QuantConfig.w8a16()))
    gru = QuantGRU(
        C,
        H,
        num_layers=rng.randint(1, 3),
        bidirectional=both,
        bias=rng.random() < 0.8,
        config=config.replace_globals(scale_kind=rng.choice(("pot", "free"))),
        zoneout=(0.0, 0.0, 0.3, 0.5)[seed % 4],
    ).eval()
    gru.calibrate(torch.randn(8, 4, C, generator=generator))
    gru.finalize_calibration()
    for layer in range(gru.num_layers):
        for reverse in (False, True)[: 1 + both]:
            for name in ("input.x", "output.h", rng.choice(ACTIVATIONS)):
                if gru.config[name].bitwidth is None:
                    continue
                gru.adjust_quant_config(
                    name,
                    bitwidth=rng.choice(WIDTHS),
                    is_unsigned=rng.random() < 0.5,
                    layer=layer,
                    reverse=reverse,
                )
    T, N = rng.choice((1, 2, 5, 17)), rng.choice((1, 2, 3, 9, 25, 41))

    def values(*shape: int) -> Tensor:
        found = 2 * torch.randn(shape, generator=generator)
        return torch.where(found > 3.5, torch.inf, found)

    x = values(T, N, C)
    kind = rng.randrange(5)
    if kind == 1:
        x = values(C, N, T).permute(2, 1, 0)
    elif kind == 2:
        x = values(N, 1, C).expand(N, T, C).transpose(0, 1)
    elif kind == 3:
        x = values(2 * T, N, C + 3)[::2, :, 2 : 2 + C]
    elif kind == 4:
        x = torch._neg_view(x)
    h0 = None
    if rng.random() < 0.7:
        states = gru.num_layers * (1 + both)
        h0 = values(H, N, states).permute(2, 1, 0) * 0.3
        if rng.random() < 0.3:
            h0 = h0[:, :1].expand(states, N, H)
    lengths = torch.randint(1, T + 1, (N,), generator=generator) if rng.random() < 0.4 else None
    return StackCase(gru, x, h0, lengths)


__all__ = ["StackCase", "random_stack"]
