"""Calls and steps that repeat with equal addresses: launches become graphs, bits stay."""

import copy
import ctypes
import dataclasses
import threading

import pytest
import torch
from bits import assert_same_bits
from fake_driver import FUNCTIONS
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from quant_gru import QuantConfig, QuantGRU
from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda import driver
from quant_gru.kernels.cuda import machine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STACKS = [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}]
STEPS = 12
CALLED = []  # graphs may call them later


@pytest.fixture
def calls(monkeypatch):
    """Names of the driver's functions, "begin" and "start", as graphs are recorded and started."""
    found, library = [], ctypes.CDLL("libcuda.so.1")
    addresses = {
        name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in FUNCTIONS
    }

    def counted(function, name, *types):
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *types)
        address = addresses[function]

        def call(*arguments):
            found.append(name)
            return kind(address)(*arguments)

        CALLED.append(kind(call))
        addresses[function] = ctypes.cast(CALLED[-1], ctypes.c_void_p).value

    counted("cuStreamBeginCapture_v2", "begin", ctypes.c_void_p, ctypes.c_int)
    counted("cuGraphLaunch", "start", ctypes.c_void_p, ctypes.c_void_p)
    native = _native.Driver(addresses)
    monkeypatch.setattr(driver, "_driver", lambda: native)
    driver._device.cache_clear()
    yield found
    driver._device.cache_clear()


def made(C, H, config="int8", **options):
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=getattr(QuantConfig, config)(), **options).cuda()
    gru.calibrate(torch.randn(10, 8, C, device="cuda"))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def step(gru, x, hx=None):
    """Outputs and gradients; gradients of weights are at the parameters."""
    gru.zero_grad()
    packed = isinstance(x, PackedSequence)
    leaf = (x.data if packed else x).detach().requires_grad_()
    y, h_n = gru(PackedSequence(leaf, *x[1:]) if packed else leaf, hx)
    y = y.data if packed else y
    torch.autograd.backward((y, h_n), (torch.cos(y.detach()), torch.sin(h_n.detach())))
    return [y.detach(), h_n.detach(), leaf.grad, *(p.grad for p in gru.parameters())]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def on_host(tensors):
    """Copies; what they take on the GPU does not change the addresses that follow."""
    return [t.detach().to("cpu", copy=True) for t in tensors]


def check(pristine, kept):
    """Compare what was kept, weights, inputs and results of steps, with first steps of copies."""
    for weights, x, found in kept:
        gru = copy.deepcopy(pristine)
        with torch.no_grad():
            for p, w in zip(gru.parameters(), weights, strict=True):
                p.copy_(w)
        same(found, on_host(step(gru, x)))


@pytest.mark.parametrize("options", STACKS, ids=str)
@pytest.mark.parametrize("config", ["int8", "int16"])
def test_training(calls, config, options):
    """Three batches in turn, each in its own memory, while an optimizer moves the weights."""
    gru, kept = made(24, 40, config, **options).train(), []
    pristine = copy.deepcopy(gru)
    optimizer = torch.optim.SGD(gru.parameters(), 0.05)
    batches = [torch.randn(size, 6, 24, device="cuda") for size in (9, 9, 6)]
    for _ in range(STEPS):
        for x in batches:
            x.copy_(torch.randn(x.shape))
            weights = on_host(gru.parameters())
            kept.append((weights, *on_host([x]), on_host(step(gru, x))))
        optimizer.step()
    assert calls.count("start") >= 2 * STEPS
    check(pristine, [(weights, x.cuda(), found) for weights, x, found in kept])


def test_inputs_change_where_they_are(calls):
    gru = made(24, 40, num_layers=2, bidirectional=True).eval()
    x, hx = torch.randn(9, 6, 24, device="cuda"), torch.randn(4, 6, 40, device="cuda")
    with torch.no_grad():
        for _ in range(STEPS):
            x.normal_()
            hx.normal_()
            same(gru(x, hx), copy.deepcopy(gru)(x, hx))
    assert "start" in calls


def test_strides_change_where_an_input_is(calls):
    gru = made(8, 40, num_layers=2, bidirectional=True).eval()
    memory = torch.randn(8 * 6 * 6, device="cuda")
    views = [memory.view(6, 6, 8), memory.view(6, 6, 8).transpose(0, 1)]
    with torch.no_grad():
        expected = [copy.deepcopy(gru)(view) for view in views]
        for _ in range(STEPS):
            for view, each in zip(views, expected, strict=True):
                for _ in range(3):
                    same(gru(view), each)
    assert "start" in calls


def test_packed_rows(calls):
    """Lengths differ between calls of the same steps and rows."""
    gru, kept = made(8, 40, num_layers=2).train(), []
    pristine = copy.deepcopy(gru)
    weights = on_host(gru.parameters())
    for i in range(4 * STEPS):
        rows = [torch.randn(T, 8) for T in ((5, 9, 2), (9, 4, 2))[i % 2]]
        packed = pack_sequence(rows, enforce_sorted=False)
        kept.append((weights, packed, on_host(step(gru, packed.to("cuda")))))
        del packed
    assert "start" in calls
    check(pristine, [(weights, x.to("cuda"), found) for weights, x, found in kept])


def test_weights_are_moved(calls):
    """A write to `parameter.data` gives weights another address."""
    gru = made(24, 40).train()
    x = torch.randn(9, 6, 24, device="cuda")
    for _ in range(3):
        for _ in range(STEPS):
            step(gru, x)
        before = gru.weight_ih_l0.data
        gru.weight_ih_l0.data = before * 0.5
        same(step(gru, x), step(copy.deepcopy(gru), x))
        before.zero_()
    assert "start" in calls


@pytest.mark.parametrize("is_packed", [False, True])
def test_two_streams(calls, is_packed):
    gru = made(24, 40).train()
    x = torch.randn(9, 6, 24, device="cuda")
    x = pack_padded_sequence(x, [9, 9, 7, 4, 4, 1]) if is_packed else x
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    expected = step(copy.deepcopy(gru), x)
    for _ in range(STEPS):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                same(step(gru, x), expected)
            torch.cuda.current_stream().wait_stream(stream)
    assert "start" in calls


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current(calls):
    gru = made(24, 40).to("cuda:1").train()
    x = torch.randn(9, 6, 24, device="cuda:1")
    expected = step(copy.deepcopy(gru), x)
    for _ in range(STEPS):
        same(step(gru, x), expected)
    assert torch.cuda.current_device() == 0
    assert "start" in calls


def test_a_graph_of_the_caller_has_the_launches(calls):
    """A capture between steps that repeat; its replays read and write its own tensors."""
    gru = made(24, 40, num_layers=2, bidirectional=True).train()
    x = torch.randn(9, 6, 24, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(STEPS):
            step(gru, x)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        assert "start" in calls
        calls.clear()
        with torch.cuda.graph(graph, stream=side):
            captured = step(gru, x)
        assert not calls
        for _ in range(4):
            x.normal_()
            graph.replay()
            kept = [t.clone() for t in captured]
            same(kept, step(copy.deepcopy(gru), x))
            same(step(gru, x), kept)
    torch.cuda.current_stream().wait_stream(side)


def test_graphs_are_recorded_while_another_thread_captures(calls):
    """A capture in mode "global" forbids other threads to allocate, but not to record."""
    capturing, done = threading.Event(), threading.Event()
    errors = []

    def capture():
        try:
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            a = torch.zeros(4, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="global")
                a += 1
                capturing.set()
                done.wait(60)
                a += 1
                graph.capture_end()
                graph.replay()
            torch.cuda.synchronize()
            assert a.tolist() == [2, 2, 2, 2]
        except BaseException as error:
            errors.append(error)
        finally:
            capturing.set()

    gru = made(24, 40, num_layers=2, bidirectional=True).eval()
    x = torch.randn(9, 6, 24, device="cuda")
    with torch.no_grad():
        expected = [t.clone() for t in gru(x)]
        found = gru(x)
        del found
        thread = threading.Thread(target=capture)
        thread.start()
        capturing.wait(60)
        assert not calls
        for _ in range(STEPS):
            found = gru(x)
            del found
        done.set()
        assert {"begin", "start"} <= set(calls)
        thread.join()
        same(gru(x), expected)
    assert not errors


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_training_loop_starts_graphs(calls, is_packed):
    """Those of the update of weights, the forward and the backward, from the third step on."""
    gru = made(16, 32).train()
    x, grad = torch.randn(10, 8, 16, device="cuda"), torch.randn(10, 8, 32, device="cuda")
    if is_packed:
        x = pack_padded_sequence(x, range(10, 2, -1))
        grad = grad.flatten(0, 1)[: len(x.data)]
    optimizer = torch.optim.SGD(gru.parameters(), 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        y = gru(x)[0]
        (y.data if is_packed else y).backward(grad)
        del y
        optimizer.step()
    assert calls.count("start") >= 75
    assert 3 <= calls.count("begin") <= 8


def test_graphs_can_be_turned_off(calls, monkeypatch):
    sources = dataclasses.replace(machine.SOURCES, records_graphs=False)
    monkeypatch.setattr(machine, "SOURCES", sources)
    gru = made(24, 40).train()
    x = torch.randn(9, 6, 24, device="cuda")
    for _ in range(STEPS):
        step(gru, x)
    assert not calls
