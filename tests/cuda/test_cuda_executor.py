"""The CUDA executor on a GPU against the reference: every code equal."""

import pytest
import torch
from backward_cases import moved
from random_plans import random_case

from kept import kept
from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.integer import cell as reference
from quant_gru.kernels.cuda.boundary import boundary
from quant_gru.kernels.cuda.forward import executor
from quant_gru.kernels.cuda.machine import machine_of
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # calibration runs the directions of nn.GRU one by one
    pytest.mark.filterwarnings("ignore:RNN module weights"),
]

SWEEP = {"w8a8": 200, "w8a16": 120, "w16a16": 90, "mixed": 70, "wide": 30}


@kept
def quantized(C, H, config=None, **options):
    gru = QuantGRU(C, H, config=config or QuantConfig.int8(), **options).eval().cuda()
    gru.calibrate(torch.randn(12, 8, C, device="cuda"))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def codes(quantizer, *shape):
    found = torch.randint(quantizer.lo, quantizer.hi + 1, shape, device="cuda")
    return found.to(quantizer.container)


def same(got, expected):
    return all(
        ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu())
        for ours, theirs in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize("kind", SWEEP)
def test_random_plans(kind):
    for seed in range(SWEEP[kind]):
        case = random_case(seed, kind)
        expected = reference.run(case.plan, case.x, case.h0, case.lengths, case.reverse)
        lengths = None if case.lengths is None else case.lengths.cuda()
        plan = moved(case.plan, torch.device("cuda", torch.cuda.current_device()))
        got = executor.run(plan, case.x.cuda(), case.h0.cuda(), lengths, case.reverse)
        assert same(got, expected), f"seed {seed}"


@pytest.mark.parametrize("kind", SWEEP)
def test_random_plans_of_many_rows(kind):
    """The same plans with batches whose input projection is one product."""
    for seed in range(0, SWEEP[kind], 2):
        case = random_case(seed, kind)
        generator = torch.Generator().manual_seed(seed)
        x, h0 = of_many_rows(case.plan, 3 + seed % 4, 23 + 7 * (seed % 9), generator)
        expected = reference.run(case.plan, x, h0, None, case.reverse)
        plan = moved(case.plan, torch.device("cuda", torch.cuda.current_device()))
        got = executor.run(plan, x.cuda(), h0.cuda(), None, case.reverse)
        assert same(got, expected), f"seed {seed}"


def of_many_rows(plan, T, N, generator):
    """Codes of an input and of a first state."""
    return tuple(
        torch.randint(q.lo, q.hi + 1, shape, generator=generator).to(q.container)
        for q, shape in ((plan.x, (T, N, plan.input_size)), (plan.h, (N, plan.hidden_size)))
    )


@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
@pytest.mark.parametrize("H", [1, 3, 17, 64, 100, 128, 192, 256, 320, 512, 768, 1000, 1024, 1500])
def test_sizes(H, config):
    """From one unit to more than a cluster's registers hold; small and large batches."""
    plan = quantized(33, H, getattr(QuantConfig, config)())._plan().cells[0][0]
    for N, T in ((1, 9), (5, 20), (70, 3)):
        if N * T * H * H > 1e8 and H > 512:
            T = 2
        x, h0 = codes(plan.x, T, N, 33), codes(plan.h, N, H)
        lengths = torch.randint(1, T + 1, (N,), device="cuda")
        for given, reverse in ((None, False), (lengths, True)):
            got = executor.run(plan, x, h0, given, reverse)
            assert same(got, reference.run(plan, x, h0, given, reverse)), (N, T, reverse)


@pytest.mark.parametrize("H", [96, 256, 1024])
@pytest.mark.parametrize("config", ["int8", "w8a16"])
def test_every_shape_of_the_planner(monkeypatch, H, config):
    plan = quantized(16, H, getattr(QuantConfig, config)())._plan().cells[0][0]
    clusters = machine_of(torch.device("cuda")).clusters()
    form = numbers_of(plan).form
    for shape in planner.possible_shapes(form, H, clusters):
        wanted = f"{shape.blocks},{shape.split},{shape.spread},{shape.rows}"
        monkeypatch.setenv(planner.VARIABLE, wanted)
        N = 2 * shape.rows + 1
        x, h0 = codes(plan.x, 7, N, 16), codes(plan.h, N, H)
        assert same(executor.run(plan, x, h0), reference.run(plan, x, h0)), wanted


@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
def test_sizes_for_which_there_may_be_no_product_of_bytes(config):
    plan = quantized(16, 256, getattr(QuantConfig, config)())._plan().cells[0][0]
    x, h0 = codes(plan.x, 48, 263, 16), codes(plan.h, 263, 256)
    assert same(executor.run(plan, x, h0), reference.run(plan, x, h0))


def test_both_directions():
    plans = quantized(20, 48, bidirectional=True)._plan().cells[0]
    x, h0 = codes(plans[0].x, 11, 6, 20), codes(plans[0].h, 6, 48)
    lengths = torch.randint(1, 12, (6,), device="cuda")
    directions = [executor.Direction(plan, h0, bool(i)) for i, plan in enumerate(plans)]
    got = executor.run_directions(directions, x, lengths)
    for i, plan in enumerate(plans):
        assert same(got[i], reference.run(plan, x, h0, lengths, bool(i)))


@pytest.mark.parametrize("N", [1, 40])
def test_a_graph_replays(N):
    """Also one step at a time; new codes in the same memory give new results."""
    plan = quantized(24, 128)._plan().cells[0][0]
    for T in (1, 10):
        x, h0 = codes(plan.x, T, N, 24), codes(plan.h, N, 128)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            executor.run(plan, x, h0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = executor.run(plan, x, h0)
        for _ in range(2):
            x.copy_(codes(plan.x, T, N, 24))
            graph.replay()
            assert same(got, reference.run(plan, x, h0))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_cold_plan_in_a_graph_says_to_warm_up(monkeypatch):
    plan = quantized(8, 32)._plan().cells[0][0]
    x, h0 = codes(plan.x, 3, 2, 8), codes(plan.h, 2, 32)
    numbers_of(plan)
    machine = machine_of(x.device)
    monkeypatch.setattr(machine, "_loaded", {})
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(QuantGRUError, match="warm-up"), torch.cuda.graph(graph):
        executor.run(plan, x, h0)
    torch.cuda.synchronize()


def test_streams_do_not_meet():
    plan = quantized(24, 256)._plan().cells[0][0]
    inputs = [(codes(plan.x, 200, 9, 24), codes(plan.h, 9, 256)) for _ in range(2)]
    expected = [reference.run(plan, *each) for each in inputs]
    executor.run(plan, *inputs[0])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        got = []
        for stream, each in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(executor.run(plan, *each))
        torch.cuda.synchronize()
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device():
    gru = quantized(24, 64)
    plan = gru._plan().cells[0][0]
    x, h0 = codes(plan.x, 9, 20, 24), codes(plan.h, 20, 64)
    executor.run(plan, x, h0)
    with torch.no_grad():
        gru.weight_hh_l0.mul_(1.01)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        changed = gru._plan().cells[0][0]
        executor.run(changed, x, h0)
        boundary.quantize(plan.x, torch.randn(9, 20, 24, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_border():
    plan = quantized(24, 64, QuantConfig.w8a16())._plan().cells[0][0]
    x = 3 * torch.randn(9, 20, 24, device="cuda")
    x[0, 0, 0], x[1, 2, 3] = torch.inf, torch.nan
    found, nan = boundary.quantize(plan.x, x)
    assert torch.equal(found.to(torch.int64), plan.x.quantize(x))
    assert torch.equal(nan, x.isnan().any(-1))
    assert torch.equal(boundary.dequantize(plan.x, found), plan.x.dequantize(found))
    assert torch.equal(boundary.dequantize(plan.x, found, nan).isnan().any(-1), nan)


def test_many_launches_stay_equal():
    """Exchange between blocks under changing timing: the device full, and again and again."""
    plan = quantized(16, 256)._plan().cells[0][0]
    x, h0 = codes(plan.x, 40, 230, 16), codes(plan.h, 230, 256)
    expected = reference.run(plan, x, h0)
    for _ in range(50):
        assert same(executor.run(plan, x, h0), expected)
