"""Whole calls of a QuantGRU on a GPU against the CPU's: values, NaN, graphs, prepared calls."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_pairs import equal, of_random_ranges, pair
from projection_blocks import COLUMNS, MOST_SHARED
from torch.utils._python_dispatch import TorchDispatchMode

from quant_gru import FrozenQuantGRU, QuantConfig, QuantGRU
from quant_gru.execution.prepared_call import prepare
from quant_gru.integer.call_form import FLOATS
from quant_gru.kernels._native import Warpgroups
from quant_gru.kernels.cuda.plan import tensors
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.projection import select

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

nan = float("nan")
CONFIGS = ["int8", "w8a16", "int16"]


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def prepared(gru):
    own = gru._parameters.values()
    found = prepare(gru._plan, [list(own)], own, torch.float32)
    return lambda x, hx=None: found.start(own, x, hx, None, gru.batch_first)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("H", [20, 256, 1100])
@pytest.mark.parametrize("rows", [(5, 1), (30, 33)])
def test_layers_directions_and_nan(config, H, rows):
    T, N = rows
    if H > 1000:
        T = 3
    cpu, gpu = pair(16, H, config, num_layers=2, bidirectional=True)
    x, hx = torch.randn(T, N, 16), torch.randn(4, N, H)
    equal(gpu(x.cuda()), cpu(x))
    x[T // 2, N // 2, 3] = nan
    equal(gpu(x.cuda()), cpu(x))
    equal(gpu(x.cuda(), hx.cuda()), cpu(x, hx))
    hx[2, 0, 1] = nan
    equal(gpu(x.cuda(), hx.cuda()), cpu(x, hx))
    lengths = torch.randint(1, T + 1, (N,))
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, h_n = cpu(packed, hx)
    y_gpu, h_gpu = gpu(packed.to("cuda"), hx.cuda())
    equal((y_gpu.data, h_gpu), (y.data, h_n))


@pytest.mark.parametrize("module", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [(7, 5, 12), (40, 200, 130)])
def test_dtypes_and_packed_rows(module, dtype, rows):
    T, N, C = rows
    cpu, gpu = (each.to(module) for each in pair(C, 64, num_layers=2, bidirectional=True))
    x, hx = torch.randn(T, N, C).mul(3).to(dtype), torch.randn(4, N, 64).to(dtype)
    lengths = torch.randint(1, T + 1, (N,))
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    for first in (x, packed):
        for states in (None, hx):
            y, h_n = cpu(first, states)
            for _ in range(2):
                y_gpu, h_gpu = gpu(first.to("cuda"), None if states is None else states.cuda())
                assert (y_gpu[0].dtype, h_gpu.dtype) == (module, module)
                given = (y_gpu, y) if first is x else (y_gpu.data, y.data)
                equal((given[0], h_gpu), (given[1], h_n))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("C", [48, 126, 256, 380])
@pytest.mark.parametrize("H", [33, 256, 320])
@pytest.mark.parametrize("planes", [1, 2])
def test_projections_by_groups_of_warps(monkeypatch, columns, C, H, planes):
    """In all parts, with rows that do not fill a block, and NaN."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    config = QuantConfig.int8() if planes == 1 else QuantConfig.w8a16()
    cpu, gpu = pair(C, H, config.replace("input.x", is_symmetric=C % 4 == 0))
    for parts in (1, 2, 4):
        sizes = -(-H // 16) * 16, -(-C // 16) * 16, planes
        block = Warpgroups(columns // planes, parts, *sizes)
        if parts > -(-H // 64) or block.shared_bytes > MOST_SHARED:
            continue
        monkeypatch.setattr(select.POLICY, "reals", block)
        # sizes of each are its own: launches of others are kept
        for T, N in ((5, 80 + parts), (3, 64 + parts), (37 + parts, 1)):
            x = torch.randn(T, N, C)
            equal(gpu(x.cuda()), cpu(x))
            x[T // 2, N // 2, C // 2] = nan
            equal(gpu(x.cuda()), cpu(x))


@pytest.mark.parametrize("name", ["weight_ih_l0", "bias_hh_l1_reverse"])
def test_weights_that_are_not_finite(name):
    cpu, gpu = pair(16, 32, num_layers=2, bidirectional=True)
    x = torch.randn(4, 3, 16)
    gpu(x.cuda())
    for gru in (cpu, gpu):
        getattr(gru, name).view(-1)[-1] = torch.inf
    equal(gpu(x.cuda()), cpu(x))


@pytest.mark.parametrize("batch_first", [False, True])
def test_prepared_calls_notice_changes(batch_first):
    cpu, gpu = pair(16, 64, bidirectional=True, batch_first=batch_first)
    run = prepared(gpu)
    for shape in ((9, 40, 16), (3, 7, 16), (9, 40, 16)):
        x = torch.randn(shape)
        hx = torch.randn(2, x.shape[0 if batch_first else 1], 64)
        x[1, 2, 3] = nan
        equal(run(x.cuda()), cpu(x))
        equal(run(x.cuda(), hx.cuda()), cpu(x, hx))
    assert run(x) is None
    assert run(x.cuda().int()) is None
    assert run(x.cuda()[..., :9]) is None
    own = gpu._parameters.values()
    assert not prepare(gpu._plan, [[torch.zeros(1, device="cuda")]], own, torch.float32).holds(own)
    gpu.weight_ih_l0.mul_(1.5)
    assert run(x.cuda()) is None


def test_a_frozen_gru_has_prepared_calls():
    cpu, gpu = pair(16, 64, num_layers=2)
    frozen, plain = gpu.freeze(), cpu.freeze()
    again = FrozenQuantGRU.from_state_dict(frozen.state_dict())
    for module in (frozen, again, plain.cuda()):
        assert {buffer.device.type for buffer in module.buffers()} == {"cuda"}
        for N in (3, 20):
            x = torch.randn(7, N, 16)
            equal(module(x.cuda()), cpu(x))
            assert module._plans.prepared.holds(module._buffers.values())
            equal(module(x.cuda()), cpu(x))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("N", [1, 40])
def test_graphs_and_no_waiting(N):
    cpu, gpu = pair(16, 128, num_layers=2)
    run = prepared(gpu)
    for T in (1, 10):
        x = torch.randn(T, N, 16, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(x)
            gpu(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(x)
            gpu(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for engine in (run, gpu):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = engine(x)
            for _ in range(2):
                x.normal_()
                x[0, 0, 0] = nan
                graph.replay()
                equal(got, cpu(x.cpu()))


@pytest.mark.parametrize("activation", ["pwl", "quadratic"])
@pytest.mark.parametrize("config", ["w8a16", "int16"])
def test_directions_whose_tables_are_read_in_different_ways(config, activation):
    """They share a launch of kernels that neither of them takes alone."""
    config = getattr(QuantConfig, config)().replace_globals(activation=activation)
    differ = 0
    for seed in range(8):
        cpu = of_random_ranges(16, 64, config, seed, num_layers=2)
        gpu = copy.deepcopy(cpu).cuda()
        for T, N in ((12, 3), (30, 33)):
            x, hx = torch.randn(T, N, 16), torch.randn(4, N, 64)
            x[T // 2, N // 2, 3] = nan
            equal(gpu(x.cuda(), hx.cuda()), cpu(x, hx))
        one, other = (numbers_of(cell).form for cell in gpu._plan().cells[0])
        differ += one != other
    assert differ


@pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:The CUDA Graph is empty")
def test_packed_sequences_do_not_wait_and_are_not_captured():
    """Where rows stand is worked out on the host, which a replay would not do."""
    cpu, gpu = pair(16, 64, bidirectional=True)
    x, lengths = torch.randn(30, 17, 16), torch.randint(1, 31, (17,))
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    on_gpu = packed.to("cuda")
    expected, expected_h = cpu(packed)
    gpu(on_gpu)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got, h_n = gpu(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    equal((got.data, h_n), (expected.data, expected_h))
    with (
        pytest.raises(ValueError, match="a tensor while a CUDA graph is captured, got a Packed"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        gpu(on_gpu)
    got, h_n = gpu(on_gpu)
    equal((got.data, h_n), (expected.data, expected_h))


@pytest.mark.parametrize("config", ["int8", "w8a16"])
def test_many_rows_that_are_new_while_a_graph_is_captured(config):
    """What their projection takes is made by the graph, too."""
    cpu, gpu = pair(64, 256, config)
    gpu(torch.randn(50, 64, 64, device="cuda"))  # whose kernels others take, too
    x = torch.randn(52, 64, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gpu(x)
    for _ in range(2):
        x.normal_()
        graph.replay()
        equal(got, cpu(x.cpu()))


_COLD = """
import torch
from gpu_pairs import equal, pair

with torch.no_grad():
    cpu, gpu = pair(16, 64)
    x = torch.randn(20, 5, 16, device="cuda")
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            gpu(x)
    except ValueError as error:
        print(error)
    equal(gpu(x), cpu(x.cpu()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gpu(x)
    x.normal_()
    graph.replay()
    equal(got, cpu(x.cpu()))
print("done")
"""


def test_a_cold_plan_in_a_capture_is_an_error_and_no_more(tmp_path):
    """It says to warm up; then calls and captures are as they are."""
    here = Path(__file__).parent
    env = os.environ | {"QUANT_GRU_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _COLD], cwd=here, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    error, last = done.stdout.split("done")
    assert error.startswith("Expected a warm-up run with these shapes before a CUDA graph"), error
    assert last == "\n"


def test_threads_and_streams():
    from concurrent.futures import ThreadPoolExecutor

    cpu, gpu = pair(16, 256)
    run = prepared(gpu)
    inputs = [torch.randn(50, 9, 16) for _ in range(4)]
    expected = [cpu(x) for x in inputs]
    run(inputs[0].cuda())
    torch.cuda.synchronize()

    def work(index):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            x = inputs[index].cuda()
            results = [run(x) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(4) as pool:
        for index, results in enumerate(pool.map(work, range(4))):
            for got in results:
                equal(got, expected[index])


@pytest.mark.parametrize("layers", [1, 2])
def test_numbers_are_there_on_other_streams(monkeypatch, layers):
    """The first call makes them, late; no other one waits for the device, or reads them before."""
    start = tensors.start

    def late(*given):
        torch.cuda._sleep(1 << 29)
        start(*given)

    for T, N in ((7, 5), (9, 300)):
        _, other = pair(16, 64, num_layers=layers)
        cpu, gpu = pair(16, 64, num_layers=layers)
        x = torch.randn(T, N, 16)
        given, expected = x.cuda(), cpu(x)
        other(given)  # kernels are compiled
        torch.cuda.synchronize()
        streams, results = [torch.cuda.Stream() for _ in range(3)], []
        with monkeypatch.context() as patch:
            patch.setattr(tensors, "start", late)
            for stream in (*streams, *streams):
                with torch.no_grad(), torch.cuda.stream(stream):
                    results.append(gpu(given))
        assert not streams[0].query()
        torch.cuda.synchronize()
        for got in results:
            equal(got, expected)


class _Leaving(TorchDispatchMode):
    """The most numbers that an operation brings from the GPU to the host at once."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and isinstance(result, torch.Tensor):
            if first.is_cuda and not result.is_cuda:
                self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile"])
def test_calibration_stays_on_the_gpu(method):
    torch.manual_seed(0)
    plain = torch.nn.GRU(16, 64, num_layers=2)
    x = torch.randn(200, 20, 16)
    found = []
    for device in ("cpu", "cuda"):
        gru = QuantGRU(16, 64, num_layers=2)
        gru.load_state_dict(plain.state_dict())
        gru.calibration_method = method
        gru.to(device)
        with _Leaving() as leaving:
            gru.calibrate(x.to(device))
        # histograms may leave, what they count does not: 200 * 20 * 64 numbers of each operator
        assert leaving.most < 20_000
        gru.finalize_calibration()
        gru.use_quantization = True
        found.append(gru(x.to(device))[0].cpu())
    # cuDNN and the CPU sum in different orders, which may move a scale to its neighbour
    assert (found[0] - found[1]).norm() < 0.1 * found[0].norm()
