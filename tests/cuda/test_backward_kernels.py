"""The CUDA backward on a GPU against the float64 yardstick."""

import pytest
import torch
from backward_cases import (
    BOUNDS,
    both_directions,
    errors,
    moved,
    outputs,
    plans_of,
    random_gradients,
    random_tape,
)
from random_plans import random_case

from quant_gru import QuantConfig, QuantGRUError
from quant_gru.integer.backward import Gradients, Tape, Wanted
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward import layer
from quant_gru.kernels.cuda.backward.launch_plan import VARIABLES
from quant_gru.kernels.cuda.machine import machine_of
from quant_gru.kernels.cuda.plan.tensors import numbers_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:RNN module weights"),
]

BACK_SHAPE, BACK_GRID = VARIABLES
SWEEP = {"w8a8": 60, "w8a16": 40, "w16a16": 40, "mixed": 40, "wide": 5}


def check(tapes, precision, wanted=None, seed=0):
    given = [random_gradients(tape, seed + i) for i, tape in enumerate(tapes)]
    out, last = zip(*given, strict=True)
    found = layer.backward(tapes, out, last, wanted, precision)
    for got, tape, each in zip(found, tapes, given, strict=True):
        worst = errors(got, tape, *each, wanted)
        assert all(error < BOUNDS[precision] for error in worst.values()), worst
    return found


def values(gradients):
    return [
        getattr(gradients, name)
        for name in Gradients.__dataclass_fields__
        if getattr(gradients, name) is not None
    ]


@pytest.mark.parametrize("kind", SWEEP)
def test_random_plans(kind):
    for seed in range(SWEEP[kind]):
        case = random_case(seed, kind)
        out = outputs(case.plan, case.x, case.h0, case.lengths, case.reverse).cuda()
        lengths = None if case.lengths is None else case.lengths.cuda()
        plan = moved(case.plan, "cuda")
        tape = Tape(plan, case.x.cuda(), case.h0.cuda(), out, lengths, case.reverse)
        check([tape], "fp32", seed=seed)


@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
@pytest.mark.parametrize("H", [1, 3, 17, 64, 100, 128, 192, 256, 320, 512, 768, 1000, 1024])
def test_sizes(H, config):
    """From one unit to more than a cluster's registers hold; small and large batches."""
    (plan,) = plans_of(33, H, getattr(QuantConfig, config)(), 2.0, "cuda")
    for precision in BOUNDS:
        for N, T, lengths in ((1, 20, False), (5, 12, True), (70, 6, False)):
            tape = random_tape(plan, T, N, lengths=lengths, reverse=lengths, device="cuda")
            check([tape], precision)


@pytest.mark.parametrize("factor", [0.3, 1, 3])
@pytest.mark.parametrize("precision", BOUNDS)
def test_long_sequences(factor, precision):
    (plan,) = plans_of(64, 128, None, factor, "cuda")
    check([random_tape(plan, 150, 20, device="cuda")], precision)


@pytest.mark.parametrize("H", [96, 256, 512])
def test_every_shape_of_the_planner(monkeypatch, H):
    (plan,) = plans_of(16, H, device="cuda")
    clusters = machine_of(torch.device("cuda")).clusters()
    exact = {}
    for shape in _native.possible_back_shapes(H, 1, 1, clusters):
        if shape.rows in (2, 4) and shape.tiles > 1:
            continue
        wanted = f"{shape.blocks},{shape.tiles},{shape.split},{shape.rows}"
        monkeypatch.setenv(BACK_SHAPE, wanted)
        N = 2 * shape.rows + 1
        if N not in exact:
            exact[N] = random_tape(plan, 7, N, device="cuda")
        check([exact[N]], "bf16")


@pytest.mark.parametrize("N", [5, 64, 100])
@pytest.mark.parametrize("H", [96, 608, 800, 1024, 1536])
def test_the_whole_gpu(monkeypatch, H, N):
    """Some of the ways to have all blocks there at once, and the planner's own."""
    clusters = machine_of(torch.device("cuda")).clusters()
    shapes = _native.possible_back_grids(H, N, clusters)
    (plan,) = plans_of(16, H, device="cuda")
    tape = random_tape(plan, 9, N, lengths=True, held=True, device="cuda")
    for shape in shapes[:: max(1, len(shapes) // 4)]:
        wanted = ",".join(
            str(getattr(shape, name))
            for name in ("blocks", "tiles", "columns", "warps", "parked", "chunk", "ahead")
        )
        monkeypatch.setenv(BACK_GRID, wanted)
        (first,) = check([tape], "bf16")
        for _ in range(3):
            (again,) = check([tape], "bf16")
            assert all(map(torch.equal, values(first), values(again)))
    monkeypatch.delenv(BACK_GRID, raising=False)
    check([tape], "bf16")


def test_the_whole_gpu_is_taken_in_turns():
    """Launches that need all of it, on two streams at once, many times."""
    (plan,) = plans_of(16, 1024, device="cuda")
    tape = random_tape(plan, 6, 64, device="cuda")
    out, last = random_gradients(tape)
    (first,) = layer.backward([tape], [out], [last])
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found += layer.backward([tape], [out], [last])
    torch.cuda.synchronize()
    for each in found:
        assert all(map(torch.equal, values(first), values(each)))


@pytest.mark.parametrize("precision", BOUNDS)
def test_both_directions_with_held_units(precision):
    plans = plans_of(20, 48, device="cuda", bidirectional=True)
    tape = random_tape(plans[0], 11, 6, lengths=True, held=True, device="cuda")
    tapes = both_directions(plans, tape)
    check(tapes, precision)
    check(tapes, precision, Wanted(x=False, br=False))


@pytest.mark.parametrize("H", [64, 256, 512, 1024])
def test_the_same_bits_again(H):
    (plan,) = plans_of(40, H, device="cuda")
    tape = random_tape(plan, 30, 70, device="cuda")
    given = random_gradients(tape)
    first, *others = (
        layer.backward([tape], [given[0]], [given[1]], None, "bf16")[0] for _ in range(4)
    )
    for other in others:
        assert all(map(torch.equal, values(first), values(other)))


@pytest.mark.parametrize("H", [128, 768, 1024])
def test_a_graph_replays(H):
    (plan,) = plans_of(24, H, device="cuda")
    tape = random_tape(plan, 9, 40, device="cuda")
    out, last = random_gradients(tape)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer.backward([tape], [out], [last])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (got,) = layer.backward([tape], [out], [last])
    for seed in (1, 2):
        for to, new in zip((out, last), random_gradients(tape, seed), strict=True):
            to.copy_(new)
        graph.replay()
        assert max(errors(got, tape, out, last).values()) < BOUNDS["bf16"]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_cold_plan_in_a_graph_says_to_warm_up(monkeypatch):
    (plan,) = plans_of(8, 32, device="cuda")
    tape = random_tape(plan, 3, 2, device="cuda")
    out, last = random_gradients(tape)
    numbers_of(plan)
    machine = machine_of(tape.x.device)
    machine.clusters()
    monkeypatch.setattr(machine, "_loaded", {})
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(QuantGRUError, match="warm-up"), torch.cuda.graph(graph):
        layer.backward([tape], [out], [last])
    torch.cuda.synchronize()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device():
    (plan,) = plans_of(24, 64, device="cuda")
    tape = random_tape(plan, 9, 20, lengths=True, device="cuda")
    out, last = random_gradients(tape)
    layer.backward([tape], [out], [last])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.backward([tape], [out], [last])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_products_rounded_by_a_users_setting():
    """'fp32' keeps its word where float32 products are allowed to be rounded."""
    (plan,) = plans_of(40, 64, device="cuda")
    tape = random_tape(plan, 20, 30, device="cuda")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        check([tape], "fp32")
        check([tape], "tf32")
    finally:
        torch.set_float32_matmul_precision(before)


def test_many_launches_stay_equal():
    """Exchange between blocks under changing timing: the device full, and again and again."""
    (plan,) = plans_of(16, 256, device="cuda")
    tape = random_tape(plan, 40, 230, device="cuda")
    out, last = random_gradients(tape)
    (first,) = layer.backward([tape], [out], [last])
    for _ in range(30):
        (again,) = layer.backward([tape], [out], [last])
        assert all(map(torch.equal, values(first), values(again)))
