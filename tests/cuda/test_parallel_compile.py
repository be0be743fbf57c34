"""Kernels compiled ahead: at once, one time each; errors come where the code is asked for."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from host_machine import Host

from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.integer.call_form import CallForm
from quant_gru.kernel_runtime.cuda import compiler, driver
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.parallel_compile import ParallelCompiler
from quant_gru.kernel_runtime.cuda.sources import RUNTIME
from quant_gru.kernel_runtime.errors import KernelError
from quant_gru.kernels.cuda import planned_launches
from quant_gru.kernels.cuda.forward.stack import stack_of

A, B, C = (Kernel.of(name, name, {"N": i}) for i, name in enumerate("abc"))
WAIT = 20  # seconds until a test fails instead of waiting for ever


class Compiler:
    """Records what it is asked for; each call waits until `together` calls have come."""

    def __init__(self, monkeypatch, together=1):
        self.asked, self.broken = [], set()
        self._barrier = threading.Barrier(together, timeout=WAIT)
        monkeypatch.setattr(compiler, "machine_code", self)

    def __call__(self, sources, source, macros, arch):
        self.asked.append((source, macros, arch))
        self._barrier.wait()
        if source in self.broken:
            raise KernelError(f"Expected {source}")
        return source.encode()


def test_all_that_is_expected_is_compiled_at_once(monkeypatch):
    nvrtc = Compiler(monkeypatch, together=3)
    codes = ParallelCompiler("sm_90a", RUNTIME)
    for kernel in (A, B, C, A, B):
        codes.expect(kernel)
    assert [codes.take(kernel) for kernel in (C, A, B)] == [b"c", b"a", b"b"]
    assert sorted(each[0] for each in nvrtc.asked) == ["a", "b", "c"]
    assert all(each[2] == "sm_90a" for each in nvrtc.asked)
    assert {each[0]: each[1] for each in nvrtc.asked}["b"] == {"N": 1}


def test_functions_of_one_source_share_a_compilation(monkeypatch):
    nvrtc = Compiler(monkeypatch)
    codes = ParallelCompiler("sm_80", RUNTIME)
    codes.expect(A)
    codes.expect(Kernel.of("a", "other", {"N": 0}))
    assert codes.take(A) == b"a"
    assert len(nvrtc.asked) == 1


def test_errors_come_with_the_code_and_go(monkeypatch):
    nvrtc = Compiler(monkeypatch)
    nvrtc.broken.add("a")
    codes = ParallelCompiler("sm_80", RUNTIME)
    codes.expect(A)
    codes.expect(B)
    for _ in range(2):
        with pytest.raises(KernelError, match="Expected a"):
            codes.take(A)
    assert codes.take(B) == b"b"
    nvrtc.broken.clear()
    assert codes.take(A) == b"a"


def test_without_a_thread_code_is_compiled_when_it_is_taken(monkeypatch):
    nvrtc = Compiler(monkeypatch)
    codes = ParallelCompiler("sm_80", RUNTIME)

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", start)
        codes.expect(A)
        assert not nvrtc.asked
        assert codes.take(A) == b"a"
    assert codes.take(A) == b"a"
    assert len(nvrtc.asked) == 2


def test_exit_waits_for_the_compiler(tmp_path):
    """Threads of autograd are not Python's: what they start would be left behind."""
    script = """
import threading
from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernel_runtime.cuda.parallel_compile import ParallelCompiler
from quant_gru.kernel_runtime.cuda.sources import RUNTIME
codes = ParallelCompiler("sm_80", RUNTIME)
kernel = Kernel.of("probe", "probe", {})
begin = threading.Thread(target=codes.expect, args=[kernel], daemon=True)
begin.start()
begin.join()
"""
    environment = {**os.environ, RUNTIME.cache.variable: str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


class Device(driver.Device):
    """A device that loads nothing but waits for what has been compiled."""

    def __init__(self):
        self._compiler, self._modules, self.loaded = ParallelCompiler("sm_90a", RUNTIME), {}, []
        self.has_clusters = True

    def _ready(self, kernel, grid):
        self.loaded.append(self._compiler.take(kernel))
        raise KernelError("Expected a GPU")


def test_a_device_begins_with_what_is_prepared_and_loads_at_a_join(monkeypatch):
    Compiler(monkeypatch, together=2)
    device = Device()
    prepared = [device.prepare(kernel, Grid((1, 1), 32), None) for kernel in (A, B)]
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

    def add_to(self, launches):
        launches.add(self._place, Grid((1, 1), 1), 0)


def test_launches_are_loaded_once_when_they_are_first_started(tmp_path):
    host = Host(tmp_path)
    device = Device()
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
