"""GPUs in native code: what the driver must have, contexts, and what loading a kernel sets."""

import pytest
import torch
from fake_driver import ANY_CLUSTER, HERE, OTHER, SHARED, FakeDriver

from quant_gru.kernel_runtime.cuda import compiler, driver
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.sources import Sources
from quant_gru.kernel_runtime.errors import KernelError

KERNEL = Kernel.of("probe", "probe", {})
GRID = Grid((8, 1), 32)


class Error(Exception):
    """The error of a package."""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A driver; `device` opens its GPU, whose package has errors of its own."""
    monkeypatch.setattr(compiler, "native", lambda sources: None)
    monkeypatch.setattr(compiler, "machine_code", lambda sources, name, *_: name.encode())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    found = FakeDriver()
    monkeypatch.setattr(driver, "_driver", found.native)
    sources = Sources(tmp_path, error=Error)
    found.open = lambda: driver.machine_of(torch.device("cuda", 0), sources)
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 11080}, r"Expected a driver of CUDA 12 or later, got 11\.8"),
        ({"without": ("cuLaunchKernelEx",)}, "have the function cuLaunchKernelEx, got an older"),
    ],
)
def test_a_driver_that_is_too_old(change, message):
    with pytest.raises(KernelError, match=message):
        FakeDriver(**change).native()


def test_a_driver_without_a_gpu():
    fake = FakeDriver()
    fake.fails["cuInit"] = 100
    with pytest.raises(KernelError, match="Expected a GPU of NVIDIA, got 100"):
        fake.native()


@pytest.mark.parametrize(
    ("capability", "arch", "has_clusters"),
    [((8, 0), "sm_80", False), ((9, 0), "sm_90a", True), ((10, 0), "sm_100", True)],
)
def test_what_a_gpu_is(fake, capability, arch, has_clusters):
    fake.capability = capability
    device = fake.open()
    assert (device.arch, device.has_clusters) == (arch, has_clusters)
    expected = dict.fromkeys((2, 4, 8, 16), 30) if has_clusters else {}
    assert device.clusters() == {1: 132, **expected}
    assert fake.context == OTHER


def test_errors_are_those_of_the_package(fake):
    fake.capability = (7, 5)
    with pytest.raises(Error, match=r"compute capability 8\.0 or later, got 7\.5"):
        fake.open()
    fake.capability = (8, 0)
    device = fake.open()
    fake.fails["cuModuleLoadData"] = 719
    with pytest.raises(Error, match="the CUDA driver to succeed, got CUDA_ERROR_LAUNCH_FAILED"):
        device.launch(KERNEL, GRID, None)
    assert fake.context == OTHER
    with pytest.raises(Error, match="the CUDA driver to succeed, got 718"):
        device.raise_for(718)
    with pytest.raises(Error, match="cuBLASLt to succeed, got status 13"):
        device.raise_for(-13)


def test_nothing_is_loaded_in_a_capture(fake, monkeypatch):
    device = fake.open()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (device.clusters, lambda: device.launch(KERNEL, GRID, None)):
        with pytest.raises(
            Error, match=r"warm-up run .* a kernel that is not loaded yet \(probe\)"
        ):
            call()
    assert not fake.modules


def test_a_module_that_was_not_loaded_is_loaded_later(fake):
    device = fake.device()
    fake.fails["cuModuleLoadData"] = 719
    for _ in range(2):
        with pytest.raises(KernelError):
            device.load("probe", "probe", {}, GRID)
    del fake.fails["cuModuleLoadData"]
    assert device.load("probe", "probe", {}, GRID) == device.load("probe", "probe", {}, GRID)
    assert fake.modules == [b"probe"]


def test_functions_of_a_source_share_its_module():
    fake = FakeDriver()
    device = fake.device()
    found = {device.load("a", name, {"N": n}, GRID) for name in ("f", "g") for n in ("1", "2")}
    assert len(found) == 4
    assert fake.modules == [b"a", b"a"]


def test_a_function_keeps_the_shared_memory_of_all_that_launch_it():
    fake = FakeDriver()
    device = fake.device()
    large, small = (Grid((8, 1), 32, n, size) for n, size in ((1, 150_000), (4, 70_000)))
    for grid, expected in ((small, 70_000), (large, 150_000), (small, 150_000)):
        handle = device.load("probe", "probe", {}, grid)
        assert fake.attributes == {(handle, SHARED): expected}


def test_a_larger_launch_loads_again(fake):
    device = fake.open()
    for size in (1000, 500, 2000, 2000):
        device._ready(KERNEL, Grid((8, 1), 32, 1, size))
    assert fake.attributes == {(40, SHARED): 2000}
    assert fake.calls.count("cuModuleGetFunction") == 2


def test_large_clusters_are_allowed():
    fake = FakeDriver()
    device = fake.device()
    for cluster, expected in ((8, None), (16, 1)):
        handle = device.load("probe", "probe", {}, Grid((16, 1), 32, cluster))
        assert fake.attributes.get((handle, ANY_CLUSTER)) == expected


@pytest.mark.parametrize("before", [HERE, OTHER, None])
def test_loading_restores_the_context(before):
    fake = FakeDriver()
    device = fake.device()
    fake.context = before
    device.load("probe", "probe", {}, GRID)
    assert fake.context == before
    assert fake.calls.count("cuCtxSetCurrent") == 2 * (before != HERE)


def test_there_is_no_gpu_of_another_index():
    fake = FakeDriver()
    with pytest.raises(KernelError, match=r"index of a GPU to be in \[0, 1\), got 1"):
        driver._native.Device(fake.native(), 1, print, print, False)
