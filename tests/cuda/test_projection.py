"""The input projection in one kernel, on the host: as the kernel that adds up a unit at a time."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from derived import byte_offset, exact_of
from host_machine import COMPILER
from projection_blocks import (
    LARGE_TILE,
    MEDIUM_TILE,
    SMALL_TILE,
    STATIONARY,
    Projection,
    size_of,
    weight_stationary,
)
from random_plans import random_case
from recurrence_layouts import launch_of

from quant_gru import QuantConfig, QuantGRU, QuantGRUWarning
from quant_gru.kernels._native import Epilogue, WeightStationary, choose_tile
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = pytest.mark.slow


def plan_of(config, C, H, scale):
    torch.manual_seed(C)
    gru = QuantGRU(C, H, config=config).eval()
    with torch.no_grad():
        gru.weight_ih_l0.mul_(scale)
        gru.bias_ih_l0.uniform_(-3, 3)
    gru.calibrate(torch.randn(12, 4, C))
    with warnings.catch_warnings():
        # biases that are cut off are as large as any
        warnings.filterwarnings("ignore", "Expected biases", QuantGRUWarning)
        gru.finalize_calibration()
    return gru._plan().cells[0][0]


def rows_of(plan, x):
    """Codes in the container of a plan."""
    return x.to(plan.x.container).contiguous()


def result_of(plan, shape, T, N, fill, guard=0):
    """Room for codes of W x."""
    size = T * shape.tiles(N) * shape.units * shape.rows
    wide = numbers_of(plan).form.wide_input
    return torch.full((size + guard, 2 if wide else 1), fill, dtype=torch.int32)


def by_unit(plan, x, shape, host):
    """What the kernel for few rows writes; -1 where nothing is."""
    T, N, _ = x.shape
    Wx = result_of(plan, shape, T, N, -1)
    Projection(plan, shape, T, N, False).run(host, rows_of(plan, x), Wx)
    return Wx


def in_one(plan, x, shape, tile, host):
    """What the kernel writes, into memory that ends where the result does."""
    T, N, C = x.shape
    numbers, guard = numbers_of(plan), 4096
    v = x.to(torch.int64) - byte_offset(plan.x)
    planes = [v] if numbers.x_planes == 1 else [v >> 8, (v & 255) - 128]
    rows = torch.zeros((len(planes), T, N, -(-C // 16) * 16), dtype=torch.int8)
    rows[..., :C] = torch.stack(planes).to(torch.int8)
    Wx = result_of(plan, shape, T, N, -7, guard)
    Projection(plan, shape, T, N, tile).run(host, rows, Wx)
    assert (Wx[-guard:] == -7).all()
    return Wx[:-guard]


UNSIGNED = QuantConfig.int8().replace("input.x", is_unsigned=True, is_symmetric=False)
WIDE = QuantConfig.int8().replace("matmul.Wx", bitwidth=13)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("config", "tile", "sizes", "scale"),
    [
        # T, N, C, H, rows of a tile of the recurrence; of weights, so that biases are large beside
        (QuantConfig.int8(), SMALL_TILE, (3, 11, 21, 37, 8), 1),
        (QuantConfig.int8(), SMALL_TILE, (3, 11, 21, 37, 8), 1e-5),
        (UNSIGNED, SMALL_TILE, (35, 1, 7, 16, 1), 1),
        (UNSIGNED, MEDIUM_TILE, (5, 13, 70, 66, 2), 1),
        (WIDE, SMALL_TILE, (4, 9, 80, 33, 4), 1e-5),
        (WIDE, MEDIUM_TILE, (33, 1, 48, 20, 1), 1),
        (WIDE, SMALL_TILE, (3, 11, 80, 37, 8), 1),
        (QuantConfig.int8(), LARGE_TILE, (5, 15, 130, 65, 8), 1),
        (QuantConfig.int8(), WeightStationary(4, 2, 4, 4, 1), (17, 16, 256, 37, 8), 1),
        (UNSIGNED, WeightStationary(2, 1, 4, 3, 1), (77, 1, 16, 20, 1), 1),
        (UNSIGNED, WeightStationary(4, 2, 8, 4, 2), (11, 14, 130, 50, 2), 1),
        (WIDE, WeightStationary(1, 2, 2, 4, 1), (75, 1, 97, 33, 1), 1e-5),
        (WIDE, WeightStationary(1, 2, 2, 4, 1), (3, 16, 97, 33, 8), 1),
        (QuantConfig.w8a16(), WeightStationary(2, 2, 4, 4, 1), (13, 12, 290, 37, 4), 1),
        (QuantConfig.w8a16(), SMALL_TILE, (3, 6, 21, 37, 4), 1),
        (QuantConfig.w8a16(), MEDIUM_TILE, (7, 11, 129, 20, 2), 1),
    ],
    ids=[
        *("int8", "int8 doubles", "unsigned single", "unsigned", "wide doubles", "wide single"),
        "wide eights",
        *("int8 large", "kept", "kept single", "kept wide tile", "kept wide"),
        *("kept wide eights", "kept w8a16"),
        *("w8a16", "w8a16 medium"),
    ],
)
def test_codes(host, config, tile, sizes, scale):
    """Sizes of no tile, the ends of codes; large biases send sums through doubles."""
    T, N, C, H, NB = sizes
    plan = plan_of(config, C, H, scale)
    generator = torch.Generator().manual_seed(T)
    x = torch.randint(plan.x.lo, plan.x.hi + 1, (T, N, C), generator=generator)
    x[0], x[-1] = plan.x.lo, plan.x.hi
    numbers = numbers_of(plan)
    assert size_of(numbers, planner.make_shape(1, 1, 1, 1, 1), 1, 1).projects_bytes
    if numbers.x_planes == 1:
        assert exact_of(plan, host)[0] == [scale == 1] * 2
    shape = planner.make_shape(H, 1, 1, 1, NB)
    expected = by_unit(plan, x, shape, host)
    there = expected[:, -1] != -1  # the last word has room left
    assert there.sum() == T * N * H
    got = in_one(plan, x, shape, tile, host)
    assert torch.equal(got[there], expected[there])


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "mixed"])
def test_random_plans(host, kind):
    """Any scales, widths and zero points; sums in float32, in int32 and beyond."""
    count = 0
    for seed in range(150):
        case = random_case(seed, kind)
        plan, x, numbers = case.plan, case.x, numbers_of(case.plan)
        if (
            not numbers.form.narrow
            or not size_of(numbers, planner.make_shape(1, 1, 1, 1, 1), 1, 1).projects_bytes
        ):
            continue
        shape = planner.make_shape(numbers.H, 1, 1, 1, (1, 2, 4, 8)[seed % 4])
        expected = by_unit(plan, x, shape, host)
        there = expected[:, -1] != -1
        got = in_one(plan, x, shape, SMALL_TILE, host)
        assert torch.equal(got[there], expected[there]), f"seed {seed}"
        count += 1
    assert count > 10


def test_tiles_follow_sizes():
    """Few rows go to many small blocks, many to large ones; codes of two bytes have no large."""
    assert choose_tile(128, 100, 1, 132) == SMALL_TILE
    assert choose_tile(512, 12800, 1, 132) == LARGE_TILE
    assert choose_tile(512, 12800, 2, 132) == MEDIUM_TILE
    assert (
        choose_tile(128, 12800, 1, 132) == MEDIUM_TILE
    )  # 400 large ones: 396 at once, and four alone
    assert choose_tile(112, 10240, 1, 132) == LARGE_TILE
    assert choose_tile(128, 12800, 1, 148) == LARGE_TILE


def test_weights_stay_where_many_rows_pass():
    """Of many units and rows, on GPUs with clusters, and where rows stand as they are counted."""
    numbers = numbers_of(plan_of(QuantConfig.int8(), 512, 256, 1))
    shape = planner.make_shape(256, 1, 1, 1, 8)
    hopper, small = (
        SimpleNamespace(arch="sm_90a", clusters=lambda of=of: of)
        for of in ({1: 132, 2: 66}, {1: 1})
    )
    assert weight_stationary(hopper, numbers, shape, 100, 128) == STATIONARY[1]
    assert weight_stationary(small, numbers, shape, 100, 128) is None
    assert weight_stationary(hopper, numbers, shape, 50, 128) is None
    assert weight_stationary(hopper, numbers, shape, 1000, 100) is None
    doubled = planner.make_shape(256, 2, 2, 1, 16)  # tiles of two strips, the last one half empty
    assert weight_stationary(hopper, numbers, doubled, 100, 128) == STATIONARY[1]
    assert weight_stationary(hopper, numbers, doubled, 100, 120) is None
    for H in (240, 272):  # few units, units of no block
        assert (
            weight_stationary(hopper, numbers, planner.make_shape(H, 1, 1, 1, 8), 100, 128) is None
        )
    made, share = STATIONARY[1].launch(256, 12800, 256, 132, Epilogue(1))
    _, grid = launch_of(made)
    assert share % 8 == grid.blocks[0] % 4 == 0
    assert grid.blocks[0] <= 132
    assert (grid.blocks[0] // 4 - 1) * 3 * share < 12800 <= grid.blocks[0] // 4 * 3 * share
    assert grid.shared_bytes == 3 * 4 * 64 * 64 + 192 * 272
