"""Every native executor against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from quant_gru.integer import cell as reference
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels.cpu import executor

NATIVE = executor.choices()[:-1]


def check(
    plan: CellPlan,
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None = None,
    reverse: bool = False,
    threads: Sequence[int] = (1,),
    name: object = "",
) -> None:
    """Assert that all codes are those of the reference, with each number of threads."""
    expected = reference.run(plan, x, h0, lengths, reverse)
    for variant, count in itertools.product(NATIVE, threads):
        got = executor.run(plan, x, h0, lengths, reverse, variant, count)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), (name, variant, count)
