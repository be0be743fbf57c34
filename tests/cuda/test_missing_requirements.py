"""What a GPU's executor needs, and what is said where it is missing; no GPU is needed here."""

import ast
import sys
import types
import warnings

import pytest
import torch
from fake_driver import FakeDriver
from typer.testing import CliRunner

from quant_gru import QuantGRU, QuantGRUWarning
from quant_gru.cli import app
from quant_gru.kernel_runtime.cuda import compiler, driver
from quant_gru.kernel_runtime.errors import KernelError
from quant_gru.kernels import dispatch
from quant_gru.kernels.cuda import machine
from quant_gru.modules import gru as module

GPU = torch.device("cuda", 0)


@pytest.fixture
def without_pathfinder(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    compiler.native.cache_clear()
    compiler._nvrtc.cache_clear()


@pytest.fixture
def device(monkeypatch):
    """A GPU as far as PyTorch tells of it."""
    found = types.SimpleNamespace(capability=(9, 0), hip=None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found.capability)
    monkeypatch.setattr(driver, "_driver", FakeDriver().native)
    driver._missing.cache_clear()
    yield found
    driver._missing.cache_clear()


def gpu_line():
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("gpu ")]
    return line.split(maxsplit=1)[1]


def test_the_reference_on_a_gpu_is_said_once(without_pathfinder, device):
    install = 'reference executor.*cuda-pathfinder.*pip install "cuda-pathfinder"'
    with pytest.warns(QuantGRUWarning, match=install) as said:
        assert not dispatch.runs_on_gpu(GPU)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not dispatch.runs_on_gpu(GPU)
        assert not dispatch.runs_on_gpu(torch.device("cpu"))
        assert dispatch.executor_name(GPU) == "reference (PyTorch integers, cuda)"


@pytest.mark.parametrize(
    ("cuda", "package"),
    [("12.8", "-cu12==12"), ("13.0", "==13"), (None, "==13")],
    ids=["12", "13", "none"],
)
def test_nvrtc_alone_is_missing(device, monkeypatch, cuda, package):
    def load_nvidia_dynamic_lib(name):
        raise RuntimeError(f"Failure finding lib{name}\nand where it was looked for")

    pathfinder = types.SimpleNamespace(load_nvidia_dynamic_lib=load_nvidia_dynamic_lib)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    compiler.native.cache_clear()
    compiler._nvrtc.cache_clear()
    reason = driver.missing(GPU)
    assert f'pip install "nvidia-cuda-nvrtc{package}.*"' in reason
    assert reason.endswith("got RuntimeError: Failure finding libnvrtc")


def test_a_driver_that_is_too_old(device, monkeypatch):
    monkeypatch.setattr(driver, "_driver", FakeDriver(version=11080).native)
    assert driver.missing(GPU) == "Expected a driver of CUDA 12 or later, got 11.8"


@pytest.mark.skipif(torch.version.cuda is not None, reason="not for builds of torch with CUDA")
def test_without_a_driver():
    found = "libcuda.so.1 is a part of it"
    with pytest.raises(KernelError, match=f"driver of an NVIDIA GPU to be installed .{found}"):
        driver._driver()


def test_gpus_that_no_kernel_is_for(device, monkeypatch):
    monkeypatch.setattr(compiler, "missing", lambda: None)
    assert driver.available(GPU)
    driver._missing.cache_clear()
    device.capability = (7, 5)
    assert driver.missing(GPU) == "Expected compute capability 8.0 or later, got 7.5"
    assert not driver.available(GPU)
    driver._missing.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm 6.4" in driver.missing(GPU)


def test_info_says_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert gpu_line() == "none: this PyTorch has no CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu_line() == "none: PyTorch finds no device"


def test_info_of_a_gpu_without_kernels(without_pathfinder, device):
    line = gpu_line()
    assert line.startswith("NVIDIA Test (sm_90), reference (PyTorch integers, cuda): Expected cuda")
    assert "pip install" in line


def test_info_of_a_gpu(device, monkeypatch):
    monkeypatch.setattr(compiler, "missing", lambda: None)
    monkeypatch.setattr(compiler, "version", lambda: "13.0")
    monkeypatch.setattr(machine, "machine_of", lambda _: types.SimpleNamespace(arch="sm_90a"))
    assert gpu_line() == "NVIDIA Test, cuda (sm_90a, NVRTC 13.0)"


def test_the_end_of_a_calibration_loads_the_compiler(device, monkeypatch):
    loaded = []
    monkeypatch.setattr(machine, "machine_of", loaded.append)
    monkeypatch.setattr(compiler, "missing", lambda: "nothing")
    dispatch.load(GPU)
    driver._missing.cache_clear()
    monkeypatch.setattr(compiler, "missing", lambda: None)
    dispatch.load(torch.device("cpu"))
    assert not loaded
    dispatch.load(GPU)
    assert loaded == [GPU]
    seen = []
    monkeypatch.setattr(module, "load", seen.append)
    gru = QuantGRU(3, 4)
    gru.calibrate(torch.randn(5, 2, 3))
    assert not seen
    gru.finalize_calibration()
    assert seen == [torch.device("cpu")]


def test_importing_the_package_imports_nothing_of_cuda():
    for path in (each.__file__ for each in (driver, compiler, dispatch, machine)):
        with open(path, encoding="utf-8") as file:
            body = ast.parse(file.read()).body
        names = [node.module for node in body if isinstance(node, ast.ImportFrom)]
        names += [each.name for node in body if isinstance(node, ast.Import) for each in node.names]
        assert not [name for name in names if name and name.split(".")[0] == "cuda"], path
