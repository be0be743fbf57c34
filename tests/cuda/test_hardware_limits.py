"""What the benchmark says that the hardware needs, without a GPU."""

import sys
from pathlib import Path

import pytest

from kept import calibrated_gru
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.recurrence import planner

# Last, because actnn.py is there.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu

# of an H200
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}
# us of calls in a graph there, int8 and w8a16, see docs/performance.md
MEASURED = {
    (1, 100, 64, 128): (32.6, 47.2),
    (1, 1000, 128, 256): (381, 500),
    (32, 200, 128, 256): (89.9, 116),
    (64, 200, 256, 512): (174, 231),
    (64, 200, 512, 1024): (421, 642),
    (128, 100, 256, 256): (68.2, 96.0),
    (8, 1000, 256, 512): (596, 716),
    (512, 20, 100, 100): (15.9, 23.3),
}


@pytest.fixture(scope="module", params=["int8", "w8a16"])
def numbers(request):
    """Of a small plan: what a layout follows from does not depend on its size."""
    return numbers_of(calibrated_gru(8, 16, request.param)._plan().cells[0][0])


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_calls_take_longer_than_the_floor(numbers, shape):
    chosen = planner.choose(numbers.form, shape[3], shape[0], 1, CLUSTERS)
    least = gpu.floor(shape, numbers.form, numbers.x_planes, chosen, CLUSTERS)
    measured = MEASURED[shape][numbers.x_planes - 1]
    assert 0.1 * measured < least < 0.9 * measured


def test_blocks_that_share_a_multiprocessor_multiply_in_turn(numbers):
    if numbers.x_planes == 2:
        pytest.skip("not for two planes, whose blocks are too large to share one")
    form, shape = numbers.form, planner.make_shape(512, 8, 1, 1, 4)
    assert shape.resident(form, CLUSTERS) == (15, 30)
    floors = {
        N: gpu.floor((N, 1000, 1, 512), form, 1, shape, CLUSTERS) for N in (4, 60, 64, 120, 124)
    }
    # what memory takes beside is little
    assert floors[60] == pytest.approx(floors[4], rel=0.1)
    assert floors[120] == pytest.approx(floors[64], rel=0.1)
    assert 1.3 * floors[60] < floors[64] < 2 * floors[60]
    assert 1.8 * floors[120] < floors[124] < 2.2 * floors[120]
