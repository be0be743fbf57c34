"""Recurrences that start while their projection runs, on a GPU, against the CPU's calls."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_pairs import equal, pair
from projection_blocks import overlap_of

from quant_gru.kernels.cuda.machine import machine_of
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = [  # T, N, C, H
    (501, 32, 80, 256),
    (1001, 8, 64, 512),
    (133, 64, 256, 1024),
]


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def starts_early(gru, T, N):
    machine = machine_of(torch.device("cuda", 0))
    if len(machine.clusters()) == 1:
        pytest.skip("needs a GPU with clusters")
    numbers = numbers_of(gru._plan().cells[0][0])
    shape = planner.choose(numbers.form, gru.hidden_size, N, 1, machine.clusters())
    return overlap_of(machine, numbers, shape, T, N) is not None


@pytest.mark.parametrize("config", ["int8", "w8a16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_words_are_those_of_the_cpu(config, sizes):
    T, N, C, H = sizes
    cpu, gpu = pair(C, H, config)
    assert starts_early(gpu, T, N)
    x, hx = torch.randn(T, N, C), torch.randn(1, N, H)
    x[T // 2, N // 2, 3] = float("nan")
    expected = cpu(x, hx)
    for _ in range(3):
        equal(gpu(x.cuda(), hx.cuda()), expected)


def test_layers_and_graphs():
    T, N, C, H = SIZES[0]
    cpu, gpu = pair(C, H, num_layers=2)
    x = torch.randn(T, N, C, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        gpu(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [gpu(x) for _ in range(2)]
    for _ in range(3):
        x.normal_()
        graph.replay()
        expected = cpu(x.cpu())
        for each in got:
            equal(each, expected)
    for _ in range(20):
        graph.replay()
    equal(got[1], expected)


def test_streams_at_once():
    T, N, C, H = SIZES[0]
    _, gpu = pair(C, H)
    inputs = [torch.randn(T, N, C, device="cuda") for _ in range(3)]
    expected = [gpu(x) for x in inputs]
    torch.cuda.synchronize()

    def work(index):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            found = [gpu(inputs[index]) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(3) as pool:
        for index, found in enumerate(pool.map(work, range(3))):
            for got in found:
                equal(got, expected[index])


def test_steps_of_training():
    T, N, C, H = SIZES[0]
    cpu, gpu = (gru.train() for gru in pair(C, H))
    x = torch.randn(T, N, C)
    with torch.enable_grad():
        expected, _ = cpu(x)
        for _ in range(2):
            got, _ = gpu(x.cuda())
            equal([got.detach()], [expected.detach()])
            got.sum().backward()
