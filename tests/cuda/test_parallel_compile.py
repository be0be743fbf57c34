"""Kernels compiled ahead: at once, one time each; errors come where the kernel is loaded."""

import _thread
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from fake_driver import FakeDriver
from host_machine import Host

from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.integer.call_form import CallForm
from quant_gru.kernel_runtime.cuda import driver
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.sources import RUNTIME
from quant_gru.kernel_runtime.errors import KernelError
from quant_gru.kernels.cuda import planned_launches
from quant_gru.kernels.cuda.forward.stack import stack_of

GRID = Grid((1, 1), 32)
WAIT = 20  # seconds until a test fails instead of waiting for ever
NEEDS_PROCESSORS = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")


class Compiler:
    """Records what it is asked for; each call waits until `together` calls have come."""

    def __init__(self, together=1):
        self.asked, self.broken, self.threads, self.most = [], set(), 0, 0
        self._barrier = threading.Barrier(together, timeout=WAIT)
        self._lock = threading.Lock()

    def __call__(self, source, macros, arch):
        with self._lock:
            self.asked.append((source, macros, arch))
            self.threads += 1
            self.most = max(self.most, self.threads)
        self._barrier.wait()
        with self._lock:
            self.threads -= 1
        if source in self.broken:
            raise KernelError(f"Expected {source}")
        return source.encode()


class Opened:
    """A GPU whose kernels a compiler of the test compiles."""

    def __init__(self, compile_):
        self._driver = FakeDriver()
        self.native = self._driver.device(compile_)

    def expect(self, source, **macros):
        self.native.expect(source, macros)

    def load(self, source, function="f", **macros):
        """The machine code that is loaded."""
        self.native.load(source, function, macros, GRID)
        return self._driver.modules[-1]


@NEEDS_PROCESSORS
def test_all_that_is_expected_is_compiled_at_once():
    nvrtc = Compiler(together=2)
    gpu = Opened(nvrtc)
    for name in "abab":
        gpu.expect(name, N=name)
    assert [gpu.load(name, N=name) for name in "ba"] == [b"b", b"a"]
    found = sorted(nvrtc.asked, key=lambda each: each[0])
    assert found == [("a", {"N": "a"}, "sm_90a"), ("b", {"N": "b"}, "sm_90a")]


def test_as_many_threads_as_processors_compile():
    nvrtc = Compiler()
    gpu = Opened(nvrtc)
    names = [str(i) for i in range(8 * (os.cpu_count() or 1))]
    for name in names:
        gpu.expect(name)
    assert [gpu.load(name) for name in names] == [name.encode() for name in names]
    assert sorted(each[0] for each in nvrtc.asked) == sorted(names)
    # and the one that loads
    assert nvrtc.most <= (os.cpu_count() or 1) + 1


def test_functions_of_one_source_share_a_compilation():
    nvrtc = Compiler()
    gpu = Opened(nvrtc)
    gpu.expect("a")
    for function in ("f", "g"):
        assert gpu.load("a", function) == b"a"
    gpu.expect("a")
    assert len(nvrtc.asked) == 1


def test_errors_come_with_the_load_and_go():
    nvrtc = Compiler()
    nvrtc.broken.add("a")
    gpu = Opened(nvrtc)
    gpu.expect("a")
    gpu.expect("b")
    for _ in range(2):
        with pytest.raises(KernelError, match="Expected a"):
            gpu.load("a")
    assert gpu.load("b") == b"b"
    nvrtc.broken.clear()
    assert gpu.load("a") == b"a"


def test_what_is_expected_after_an_error_is_compiled_again():
    nvrtc = Compiler()
    nvrtc.broken.add("a")
    gpu = Opened(nvrtc)
    gpu.expect("a")
    finish_threads()
    nvrtc.broken.clear()
    gpu.expect("a")
    assert gpu.load("a") == b"a"


def finish_threads():
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(WAIT)


def test_without_a_thread_a_kernel_is_compiled_when_it_is_loaded(monkeypatch):
    nvrtc = Compiler()
    gpu = Opened(nvrtc)

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", start)
        gpu.expect("a")
        assert not nvrtc.asked
        assert gpu.load("a") == b"a"
    assert gpu.load("b") == b"b"
    assert len(nvrtc.asked) == 2


def test_threads_may_outlive_their_gpu():
    begun, goes_on = threading.Event(), threading.Event()

    def compile_(source, macros, arch):
        begun.set()
        assert goes_on.wait(WAIT)
        return b"code"

    gpu = Opened(compile_)
    gpu.expect("a")
    assert begun.wait(WAIT)
    del gpu
    goes_on.set()
    finish_threads()


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_a_wait_for_the_compiler_can_be_interrupted():
    begun, goes_on = threading.Event(), threading.Event()

    def compile_(source, macros, arch):
        begun.set()
        assert goes_on.wait(WAIT)
        return b"code"

    gpu = Opened(compile_)
    gpu.expect("a")
    assert begun.wait(WAIT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(0.2, _thread.interrupt_main)
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu.load("a")
    finally:
        signal.signal(signal.SIGINT, before)
        goes_on.set()
        interrupt.join()
    assert gpu.load("a") == b"code"


@pytest.mark.slow
def test_exit_waits_for_the_compiler(tmp_path):
    """Threads of autograd are not Python's: what they start would be left behind."""
    script = """
import threading
from functools import partial
from fake_driver import FakeDriver
from quant_gru.kernel_runtime.cuda import compiler
from quant_gru.kernel_runtime.cuda.sources import RUNTIME
driver = FakeDriver()
gpu = driver.device(partial(compiler.machine_code, RUNTIME))
begin = threading.Thread(target=gpu.expect, args=["probe", {}], daemon=True)
begin.start()
begin.join()
"""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, RUNTIME.cache.variable: str(tmp_path), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


class Device(driver.Device):
    """A device whose kernels a compiler of the test compiles."""

    def __init__(self, compile_):
        self._opened = Opened(compile_)
        self.native, self.loaded = self._opened.native, []
        self.has_clusters = True

    def _ready(self, kernel, grid):
        self.loaded.append(self._opened.load(kernel.source))
        raise KernelError("Expected a GPU")


@NEEDS_PROCESSORS
def test_a_device_begins_with_what_is_prepared_and_loads_at_a_join():
    device = Device(Compiler(together=2))
    kernels = [Kernel.of(name, name, {}) for name in "ab"]
    prepared = [device.prepare(kernel, GRID, None) for kernel in kernels]
    assert not device.loaded
    # without the other on its way, the first would wait in vain
    for each, code in zip(prepared, (b"a", b"b"), strict=True):
        with pytest.raises(KernelError, match="a GPU"):
            device.join([each])
        assert device.loaded.pop() == code


class Started:
    """A launch, as `driver.Prepared` adds it; it counts."""

    def __init__(self, host) -> None:
        self.count, self._place = 0, len(host.functions) + 1
        host.functions[self._place] = self._start

    def _start(self):
        self.count += 1

    def __call__(self, launches):
        launches.add(self._place, Grid((1, 1), 1), 0)


def test_launches_are_loaded_once_when_they_are_first_started(tmp_path):
    host = Host(tmp_path)
    device = Device(Compiler())
    device.native = host.native()
    launches, failing = [Started(host), Started(host)], [True]
    loads = []

    def load():
        loads.append(len(loads))
        if failing.pop() if failing else False:
            raise QuantGRUError("Expected a warm-up run")
        return launches

    prepared = driver.Prepared(device, load)
    assert not loads
    with pytest.raises(QuantGRUError, match="warm-up"):
        prepared.start(7)
    for _ in range(2):
        prepared.start(7)
    assert len(loads) == 2
    assert [each.count for each in launches] == [2, 2]
    both = device.join([prepared, prepared])
    both.start(8)
    assert len(loads) == 2
    assert [each.count for each in launches] == [4, 4]


class Watched(Host):
    """A GPU on which nothing runs; knows what has been asked of it in turn."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.asked: list[tuple[str, Kernel]] = []

    def launch(self, kernel, grid, arguments):
        self.asked.append(("launched", kernel))

    def expect(self, kernel):
        self.asked.append(("expected", kernel))

    def prepare(self, kernel, grid, arguments):
        self.asked.append(("prepared", kernel))
        return super().prepare(kernel, grid, arguments)


@pytest.mark.parametrize(("layers", "config"), [(1, "int8"), (2, "w8a16")])
def test_a_schedule_begins_with_its_recurrence(tmp_path, layers, config):
    """All that is compiled in advance is launched, and what takes longest begins first."""
    gru = QuantGRU(20, 32, num_layers=layers, config=getattr(QuantConfig, config)()).eval()
    gru.calibrate(torch.randn(4, 2, 20))
    gru.finalize_calibration()
    machine = Watched(tmp_path)
    stack = stack_of(gru._plan(), machine)
    assert stack is not None
    assert stack.schedule(50, 16, CallForm()) is not None
    expected = [kernel for how, kernel in machine.asked if how == "expected"]
    prepared = [kernel for how, kernel in machine.asked if how == "prepared"]
    assert machine.asked[0] == ("expected", next(k for k in prepared if k.function == "recurrent"))
    assert set(expected) <= set(prepared)
    assert {k.function for k in expected} == {"recurrent", "project_reals"}


def test_the_library_of_products_is_loaded_while_kernels_are_compiled(tmp_path, monkeypatch):
    gru = QuantGRU(20, 32, config=QuantConfig.int16()).eval()
    gru.calibrate(torch.randn(4, 2, 20))
    gru.finalize_calibration()
    machine, order = Watched(tmp_path), []
    join, multiply = machine.join, planned_launches.multiply_bytes
    monkeypatch.setattr(
        planned_launches, "multiply_bytes", lambda *a: order.append("product") or multiply(*a)
    )
    monkeypatch.setattr(machine, "join", lambda launches: order.append("join") or join(launches))
    planned_launches.load_gemm.cache_clear()
    stack = stack_of(gru._plan(), machine)
    for T in (50, 60):
        assert stack.schedule(T, 16, CallForm()) is not None
    assert order == ["product", "join", "join", "join", "join"]
