"""Blocks of input projections for tests, and what is chosen for a machine and a plan."""

from quant_gru.kernels import _native
from quant_gru.kernels._native import Tile, TiledReals, WeightStationary
from quant_gru.kernels.cuda.projection.select import POLICY, chip_of, size_of

MOST_SHARED = 227 << 10  # bytes per block, for compute capabilities 9 and 10
SMALL_TILE, MEDIUM_TILE, LARGE_TILE = Tile(2, 2, 2), Tile(2, 2, 4), Tile(2, 2, 8)
# by planes
STATIONARY = {1: WeightStationary(4, 3, 8, 4, 1), 2: WeightStationary(4, 3, 4, 4, 1)}
COLUMNS = (8, 10, 12, 13, 14)  # of warpgroups, for all planes together


def small(parts=1):
    return TiledReals(2, 2, 2, 4, 4, parts)


def medium(parts=1):
    return TiledReals(4, 2, 4, 4, 2, parts)


def two_planes(parts=1):
    return TiledReals(2, 2, 2, 4, 3, parts)


TALL = TiledReals(2, 2, 8, 4, 3, 1)


def alone(columns, planes):
    """A block with one per multiprocessor."""
    warps = (8, 1) if planes == 1 else (4, 2)
    return TiledReals(*warps, columns, 3, 1, 1, 128)


def weight_stationary(machine, numbers, shape, T, N):
    """Blocks that keep their weights, or None."""
    return _native.weight_stationary(chip_of(machine), size_of(numbers, shape, T, N), POLICY)


def choose_reals(machine, numbers, shape, T, N):
    """The blocks that read real values, or None."""
    return _native.choose_reals(chip_of(machine), size_of(numbers, shape, T, N), POLICY)


def keep_few_weights(monkeypatch, block):
    """Let blocks of one kind keep their weights in small cases."""
    monkeypatch.setattr(POLICY, "stationary", [block, block])
    monkeypatch.setattr(POLICY, "stationary_rows", 50)
    monkeypatch.setattr(POLICY, "stationary_weights", 16)
