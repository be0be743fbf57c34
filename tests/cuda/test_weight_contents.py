"""Writes to weights on a GPU that raise no version: the kernel on the host, and calls on a GPU."""

import copy
import ctypes
import warnings

import pytest
import torch
from host_machine import COMPILER

from kept import calibrated_gru
from quant_gru import QuantGRUWarning
from quant_gru.execution import prepared_call
from quant_gru.kernels import dispatch
from quant_gru.kernels.cuda.forward import stack
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.cuda.weights.contents import Contents

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
C, H = 8, 96
FIRST, EVERY = 8, 16  # looks follow each of the first calls, then every 16th


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def quantized(hidden_size=H, **options):
    return calibrated_gru(C, hidden_size, **options)


def flag(contents):
    return ctypes.c_int32.from_address(contents.found).value


def look(contents, part=0):
    contents._part.move(part)
    for each in contents._launches:
        each.start(0)
    return flag(contents) == contents.mark


@emulated
@pytest.mark.parametrize("size", [1, 3, 4, 127, 4096, 4097, 12292])
def test_every_byte_is_compared(host, size):
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (5, size, 4100)]
    for tensor in tensors:
        last = len(tensor) - 1
        for at in {0, min(1, last), last // 2, max(last - 1, 0), last}:
            contents = Contents(tensors, host)
            assert not look(contents)
            tensor[at] += 1
            assert look(contents)


@emulated
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int8])
def test_equal_numbers_of_other_bits_differ(host, dtype):
    """Bits are compared: a zero of the other sign is a write, too."""
    weight = torch.zeros(33, 5, dtype=dtype)
    contents = Contents([weight], host)
    if dtype.is_floating_point:
        weight[32, 4] = -0.0
    else:
        weight[32, 4] = -1
    assert look(contents)


@emulated
def test_parts_read_everything_in_turn(host):
    """Each look reads spread chunks of all tensors, all looks together every chunk once."""
    tensors = [torch.zeros(n, dtype=torch.uint8) for n in (3 * 4096 + 1, 7, 6 * 4096)]
    chunks = [(t, at) for t in tensors for at in range(0, len(t), 4096)]
    assert Contents(tensors, host).parts == 1
    for tensor, at in chunks:
        contents = Contents(tensors, host, most_bytes=2 * 4096)
        assert contents.parts == -(-len(chunks) // 2)
        tensor[at] += 1
        seen = [look(contents, part) for part in range(contents.parts)]
        index = next(i for i, (t, a) in enumerate(chunks) if t is tensor and a == at)
        assert seen.index(True) == index % contents.parts


@emulated
def test_more_tensors_than_a_launch_takes(host):
    tensors = [torch.zeros(9, dtype=torch.int8) for _ in range(130)]
    for index in (0, 63, 64, 129):
        contents = Contents(tensors, host)
        assert not look(contents)
        tensors[index][8] = 1
        assert look(contents)


@emulated
def test_flags_are_shared_but_marks_are_not(host, monkeypatch):
    monkeypatch.setattr("quant_gru.kernels.cuda.weights.contents._FLAGS", 1)
    tensor = torch.zeros(4)
    first, second = (Contents([tensor], host) for _ in range(2))
    assert first.found == second.found
    tensor[0] = 1
    assert look(first)
    assert flag(second) != second.mark
    assert look(second)
    assert flag(first) != first.mark
    assert look(first)


def prepared_of(gru, host, monkeypatch):
    """Calls of a GPU, on the host."""
    plan, own = gru._plan(), list(gru._parameters.values())
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,4")
    monkeypatch.setattr(dispatch.CPU, "stack_of", lambda _, plan: stack.Stack(plan, host))
    found = []

    def contents_of(_, weights):
        found.append(Contents(weights, host))
        return found[-1]

    monkeypatch.setattr(dispatch.CPU, "contents_of", contents_of)
    return prepared_call.prepare(lambda: plan, [own], own, own[0].dtype), found[0]


def run(prepared, gru, x):
    return prepared.start(gru._parameters.values(), x, None, None, gru.batch_first)


def looks(host):
    return sum(function == "contents" for function, _ in host.launched)


@pytest.mark.slow
@emulated
def test_looks_follow_the_first_calls_and_then_every_16th(host, monkeypatch):
    gru, x = quantized(), torch.randn(2, 3, C)
    prepared, _ = prepared_of(gru, host, monkeypatch)
    before, seen = looks(host), []
    for _ in range(FIRST + 3 * EVERY):
        assert run(prepared, gru, x) is not None
        seen.append(looks(host) - before)
        before += seen[-1]
    expected = [int(call < FIRST or call % EVERY == 0) for call in range(len(seen))]
    assert seen == expected
    # calls that native code leaves to Python count, too
    general = x.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(EVERY):
        run(prepared, gru, general)
    assert looks(host) - before == 1


@emulated
def test_calls_without_native_code_look_when_the_guard_is_asked(host, monkeypatch):
    gru = quantized()
    prepared, _ = prepared_of(gru, host, monkeypatch)
    before, own = looks(host), gru._parameters.values()
    assert all(prepared.holds(own) for _ in range(FIRST + EVERY))
    assert looks(host) - before == FIRST + 1


@emulated
def test_nothing_is_launched_during_capture(host, monkeypatch):
    gru, x = quantized(), torch.randn(2, 3, C)
    prepared, _ = prepared_of(gru, host, monkeypatch)
    monkeypatch.setattr(prepared_call, "capturing", lambda device: True)
    before = looks(host)
    run(prepared, gru, x)
    assert prepared.holds(gru._parameters.values())
    assert looks(host) == before


@emulated
def test_a_found_write_ends_the_prepared_call_with_one_warning(host, monkeypatch):
    """The sample of the CPU would see this write hundreds of calls later."""
    gru, x = quantized(), torch.randn(2, 3, C)
    prepared, contents = prepared_of(gru, host, monkeypatch)
    own = gru._parameters.values()
    for _ in range(6):
        assert run(prepared, gru, x) is not None
    gru.weight_hh_l0.data[7, 40] += 4.0
    assert run(prepared, gru, x) is not None
    assert flag(contents) == contents.mark
    assert run(prepared, gru, x) is None
    with pytest.warns(QuantGRUWarning, match=r"eval\(\) or train\(\)") as found:
        assert not prepared.holds(own)
    assert len(found) == 1


@emulated
def test_a_recorded_write_is_no_silent_one(host, monkeypatch, recwarn):
    gru, x = quantized(), torch.randn(2, 3, C)
    prepared, contents = prepared_of(gru, host, monkeypatch)
    assert run(prepared, gru, x) is not None
    gru.weight_hh_l0[7, 40] += 4.0
    ctypes.c_int32.from_address(contents.found).value = contents.mark
    assert not prepared.holds(gru._parameters.values())
    assert not recwarn.list


@emulated
def test_a_failed_look_is_an_error(host, monkeypatch):
    gru, x = quantized(), torch.randn(2, 3, C)
    prepared, _ = prepared_of(gru, host, monkeypatch)
    run(prepared, gru, x)
    launch = host.launch

    def fail(kernel, *rest):
        if kernel.function == "contents":
            raise RuntimeError("no launch")
        launch(kernel, *rest)

    monkeypatch.setattr(host, "launch", fail)
    with pytest.raises(RuntimeError, match="no launch"):
        run(prepared, gru, x)


def written(gru):
    for w in gru.parameters():
        w.data.mul_(0.9)


def one_element(gru):
    """Large and small in turn."""
    gru.weight_hh_l0.data[7, 40] = -4.0 - gru.weight_hh_l0.data[7, 40]


def calls_until_equal(gru, x, expected, most):
    """How many calls give other results first."""
    for call in range(most):
        y = gru(x)[0]
        torch.cuda.synchronize()
        if torch.equal(y, expected):
            return call
    raise AssertionError(f"the write was not seen by {most} calls")


@on_gpu
@pytest.mark.parametrize("write", [written, one_element])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gpu_sees_silent_writes(write, options, dtype):
    gru = quantized(**options).cuda().to(dtype)
    x = torch.randn(4, 2, C, device="cuda", dtype=dtype)
    gru(x)
    # one call starts the look that finds the write
    for warm, most in ((2, 2), (40, EVERY + 1), (300, EVERY + 1)):
        for _ in range(warm):
            gru(x)
        torch.cuda.synchronize()
        write(gru)
        expected = copy.deepcopy(gru)(x)[0]
        with pytest.warns(QuantGRUWarning, match="PyTorch records") as found:
            assert calls_until_equal(gru, x, expected, most) <= most
        assert len(found) == 1
        for _ in range(20):
            assert torch.equal(gru(x)[0], expected)


@on_gpu
def test_a_gpu_sees_a_write_between_any_two_calls():
    """A soft-update loop, as in reinforcement learning."""
    gru, x = quantized().cuda(), torch.randn(4, 2, C, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantGRUWarning)
        gru(x)
        last = gru(x)[0]
        for _ in range(5):
            for _ in range(3):
                written(gru)
                y = gru(x)[0]
                torch.cuda.synchronize()
            assert not torch.equal(y, last)
            last = y
        # two calls after the last write
        expected = copy.deepcopy(gru)(x)[0]
        assert calls_until_equal(gru, x, expected, 3) <= 2


@on_gpu
def test_a_gpu_sees_writes_to_integers_of_a_frozen_module():
    gru = quantized().cuda()
    frozen, x = gru.freeze(), torch.randn(4, 2, C, device="cuda")
    for _ in range(40):
        frozen(x)
    torch.cuda.synchronize()
    frozen.R_l0.data.zero_()
    expected = copy.deepcopy(frozen)(x)[0]
    with pytest.warns(QuantGRUWarning, match="PyTorch records"):
        calls_until_equal(frozen, x, expected, EVERY + 1)


@on_gpu
def test_a_gpu_sees_writes_to_a_plan_without_native_calls():
    """Operators of more than 16 bits have no prepared launches."""
    gru = quantized(hidden_size=20)
    gru.adjust_quant_config("output.h", bitwidth=24)
    gru, x = gru.cuda(), torch.randn(4, 2, C, device="cuda")
    for _ in range(20):
        gru(x)
    torch.cuda.synchronize()
    written(gru)
    expected = copy.deepcopy(gru)(x)[0]
    with pytest.warns(QuantGRUWarning, match="PyTorch records"):
        calls_until_equal(gru, x, expected, EVERY + 1)


@on_gpu
def test_a_gpu_sees_eval_at_once(recwarn):
    gru, x = quantized().cuda(), torch.randn(4, 2, C, device="cuda")
    for _ in range(20):
        gru(x)
    one_element(gru)
    gru.eval()
    assert torch.equal(gru(x)[0], copy.deepcopy(gru)(x)[0])
    for _ in range(100):
        gru(x)
    gru.weight_hh_l0.mul_(0.5)
    gru(x)
    assert not [each for each in recwarn if issubclass(each.category, QuantGRUWarning)]


@on_gpu
def test_a_captured_call_has_no_looks():
    gru, x = quantized().cuda(), torch.randn(4, 2, C, device="cuda")
    for _ in range(3):
        gru(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gru(x)[0]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, gru(x)[0])


@on_gpu
@pytest.mark.parametrize("streams", [2, 4])
def test_streams_take_turns_without_false_finds(streams, recwarn):
    gru, x = quantized().cuda(), torch.randn(4, 2, C, device="cuda")
    expected, every = gru(x)[0], [torch.cuda.Stream() for _ in range(streams)]
    torch.cuda.synchronize()
    for turn in range(200):
        with torch.cuda.stream(every[turn % streams]):
            y = gru(x)[0]
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
    assert not [each for each in recwarn if issubclass(each.category, QuantGRUWarning)]
