"""Recurrences that start while their projection runs, on the host: what is counted, and words."""

import pytest
import torch
from bits import assert_same_bits
from host_machine import COMPILER, Host, folder_of
from projection_blocks import STATIONARY, Projection, keep_few_weights, overlap_of

from kept import calibrated_gru
from quant_gru.integer.call_form import CallForm
from quant_gru.kernels._native import Overlap, WeightStationary
from quant_gru.kernels.cuda.forward import stack
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.projection.select import POLICY
from quant_gru.kernels.cuda.recurrence import planner

C, H = 21, 40
SMALL = WeightStationary(1, 2, 2, 3, 1)
FEW = {1: 12, 2: 6}  # clusters at once
RESIDENT = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}


class Noting(Host):
    """Notes what is prepared."""

    def __init__(self, folder, resident):
        super().__init__(folder, resident)
        self.prepared = []

    def prepare(self, kernel, grid, arguments):
        self.prepared.append((kernel.function, dict(kernel.macros).get("STRETCH", 0), grid))
        return super().prepare(kernel, grid, arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory)


@pytest.fixture
def small(monkeypatch):
    keep_few_weights(monkeypatch, SMALL)
    monkeypatch.setattr(POLICY, "overlap_steps", 1)
    monkeypatch.setattr(POLICY, "overlap_share", 1e9)


def quantized(config, C=C, H=H, **options):
    return calibrated_gru(C, H, config, seed=C + H, **options)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("config", "shape", "sizes"),
    [("int8", "2,1,1,4", (21, 12)), ("w8a16", "2,2,1,16", (17, 48))],
    ids=["int8", "w8a16"],
)
def test_calls_that_wait_for_time_chunks(folder, small, monkeypatch, config, shape, sizes):
    """Two layers; the last time chunk and the last tile are not whole; twice in the same memory."""
    monkeypatch.setenv(planner.VARIABLE, shape)
    host = Noting(folder, FEW)
    gru = quantized(config, num_layers=2)
    x, hx = torch.randn(*sizes, C), torch.randn(2, sizes[1], H)
    x[sizes[0] - 2, 3, 1] = float("nan")
    with torch.no_grad():
        ours = stack.Stack(gru._plan(), host)
        for given in (hx, -hx):
            for got, expected in zip(ours.run(x, given, None), gru(x, given), strict=True):
                assert_same_bits(got, expected)
    names = [name for name, _, _ in host.prepared]
    assert names == [
        "quantize_input",
        "project_passing",
        "recurrent",
        "requantize_layers",
        *names[1:3],
    ]
    for name, chunk, grid in host.prepared:
        assert chunk == (8 if name == "recurrent" else 0)
        assert grid.early == (name in ("recurrent", "project_passing"))
        assert grid.cluster == (2 if name in ("recurrent", "project_passing") else 1)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(("config", "N", "clusters"), [("int8", 12, 2), ("w8a16", 10, 6)])
def test_what_is_there_is_counted(folder, small, config, N, clusters):
    """All words as without overlap; counts of time chunks: rows, by groups of 16 units."""
    host, T = Host(folder, FEW), 21
    with torch.no_grad():
        plan = quantized(config)._plan().cells[0][0]
        numbers = numbers_of(plan)
    shape = planner.make_shape(H, 2, 1, 1, 2)
    words = shape.projected_words(numbers.form, T, N)
    rows = torch.randint(-128, 128, (numbers.x_planes, T, N, 32), dtype=torch.int8)
    both = Overlap(SMALL, 2, clusters)
    chunks = -(-T // both.chunk)
    counts = torch.zeros(both.chunks(T), dtype=torch.int32)
    found = []
    for ahead in (False, True):
        made = Projection(plan, shape, T, N, SMALL, both if ahead else None)
        assert not ahead or made.grid.blocks[0] % made.grid.cluster == 0
        found.append(torch.full((words,), -7, dtype=torch.int32))
        made.run(host, rows, found[-1], counts=counts)
    assert torch.equal(*found)
    whole = both.chunk * N * shape.units // 16
    last = (T % both.chunk) * N * shape.units // 16
    assert counts.tolist() == [whole] * (chunks - 1) + [last, 0]


def test_which_launches_wait_for_time_chunks(folder, small, monkeypatch):
    monkeypatch.setenv(planner.VARIABLE, "2,1,1,4")

    def chunks(sizes=(16, 12), **options):
        host = Noting(folder, FEW)
        ours = stack.Stack(quantized("int8", **options)._plan(), host)
        with torch.no_grad():
            ours.schedule(*sizes, CallForm(states=torch.float32))
        return [chunk for name, chunk, _ in host.prepared if name == "recurrent"]

    assert chunks(num_layers=2) == [8, 8]
    assert chunks(bidirectional=True) == [0]
    assert chunks((16, 24)) == [0]  # no room is left
    assert chunks((16, 10)) == [0]  # a tile is not whole
    monkeypatch.setattr(POLICY, "overlaps", False)
    assert chunks(num_layers=2) == [0, 0]
    monkeypatch.setattr(POLICY, "overlaps", True)
    monkeypatch.setattr(POLICY, "overlap_steps", 17)
    assert chunks() == [0]


class Hopper:
    arch = "sm_90a"

    def clusters(self):
        return RESIDENT


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((64, 200, 512, 1024), Overlap(STATIONARY[1], 16, 3)),
        ((64, 200, 256, 512), None),  # clusters share multiprocessors
        ((128, 200, 512, 1024), None),
        ((64, 20, 512, 1024), None),
        ((20, 1000, 64, 512), Overlap(STATIONARY[1], 8, 5, 16)),
        ((8, 1000, 256, 512), Overlap(STATIONARY[1], 8, 7)),
        ((32, 1000, 80, 256), Overlap(STATIONARY[1], 4, 14)),
        ((16, 200, 64, 128), None),
    ],
)
def test_the_recurrence_keeps_its_room(sizes, expected):
    N, T, features, units = sizes
    with torch.no_grad():
        numbers = numbers_of(quantized("int8", features, units)._plan().cells[0][0])
    shape = planner.choose(numbers.form, units, N, 1, RESIDENT)
    found = overlap_of(Hopper(), numbers, shape, T, N)
    assert found == expected
    if found:
        assert shape.tiles(N) + found.clusters <= RESIDENT[shape.blocks]
