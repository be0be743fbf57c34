"""Sweeps whose first cases are in every run of the tests, and the rest among the slow ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(cases: Iterable[Any], count: int) -> list[Any]:
    """Return all cases, values or tuples of them; those after the first `count` are slow."""
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in every[count:]]
    return [pytest.param(*case) for case in every[:count]] + slow


def batches(sweep: dict[str, int], size: int) -> list[Any]:
    """Return kinds with the first and the end of some seeds; those after the first `size` are slow.

    Args:
        sweep: How many seeds there are of each kind.
        size: The most seeds at once.
    """
    found = []
    for kind, count in sweep.items():
        firsts = range(0, count, size)
        found += first_of([(kind, at, min(at + size, count)) for at in firsts], 1)
    return found
