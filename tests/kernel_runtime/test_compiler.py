"""Sources are compiled without a GPU, and compiled kernels are kept safely on disk."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from quant_gru.kernel_runtime.cuda import compiler, disk_cache
from quant_gru.kernel_runtime.cuda.disk_cache import DiskCache
from quant_gru.kernel_runtime.cuda.sources import RUNTIME, Sources
from quant_gru.kernel_runtime.errors import KernelError, raised_as

CACHE = RUNTIME.cache
pytestmark = pytest.mark.skipif(not compiler.available(), reason="needs NVRTC")


def machine_code(name, macros, arch):
    return compiler.machine_code(RUNTIME, name, macros, arch)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE.variable, str(tmp_path / "cache"))


def test_errors_become_those_of_a_package():
    class Error(Exception):
        pass

    cause = OSError()
    with pytest.raises(Error, match="Expected a") as found, raised_as(Error):
        raise KernelError("Expected a") from cause
    assert found.value.__cause__ is cause
    with pytest.raises(KeyError), raised_as(Error):
        raise KeyError


def test_an_error_carries_the_compilers_log():
    with pytest.raises(KernelError, match=r"(?s)NVRTC .* broken.cu .*undefined_name"):
        compiler.compile_source(RUNTIME, "broken", "int x = undefined_name;", ("-arch=sm_90",))


def test_a_package_gets_its_error_and_its_cache(tmp_path, monkeypatch):
    class Error(Exception):
        pass

    cache = DiskCache("ANOTHER_CACHE", "another")
    monkeypatch.setenv(cache.variable, str(tmp_path / "another"))
    sources = Sources(tmp_path, error=Error, cache=cache)
    (tmp_path / "broken.cu").write_text("int x = undefined_name;")
    with pytest.raises(Error, match=r"(?s)NVRTC .* broken.cu .*undefined_name"):
        compiler.machine_code(sources, "broken", {}, "sm_90a")
    assert compiler.machine_code(sources, "probe", {}, "sm_90a") == machine_code(
        "probe", {}, "sm_90a"
    )
    assert len(list(cache.entries())) == len(list(CACHE.entries())) == 1


def test_the_second_time_comes_from_disk(monkeypatch):
    first = machine_code("probe", {}, "sm_90a")
    monkeypatch.setattr(compiler, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert machine_code("probe", {}, "sm_90a") == first


@pytest.mark.parametrize("damage", [b"", b"short", None, "content", "other"])
def test_a_damaged_entry_is_compiled_again(damage):
    code = machine_code("probe", {}, "sm_90a")
    (path,) = CACHE.entries()
    whole = path.read_bytes()
    if damage == "other":  # one of another kernel, whole
        machine_code("probe", {}, "sm_80")
        (other,) = (each for each in CACHE.entries() if each != path)
        path.write_bytes(other.read_bytes())
    elif damage is None:
        path.write_bytes(whole[:-1])
    elif damage == "content":
        path.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    else:
        path.write_bytes(damage)
    assert machine_code("probe", {}, "sm_90a") == code
    assert path.read_bytes() == whole


def test_the_key_has_everything_that_decides(monkeypatch, tmp_path):
    for macros, arch in (({}, "sm_90a"), ({"A": 1}, "sm_90a"), ({"A": 2}, "sm_90a"), ({}, "sm_80")):
        machine_code("probe", macros, arch)
    assert len(list(CACHE.entries())) == 4
    text, options = RUNTIME.path_of("probe").read_text(), compiler._options()
    (tmp_path / "other.cu").write_text(text)
    (tmp_path / "other.cuh").write_text("\n")
    header = (("other.cuh", tmp_path / "other.cuh"),)
    others = {
        "version": (RUNTIME, {"version": lambda: "99.9"}),
        "options": (RUNTIME, {"_options": lambda: (*options, "-DANYTHING")}),
        "headers": (Sources(tmp_path, header), {}),
    }
    for count, (name, (sources, patches)) in enumerate(others.items(), 5):
        with monkeypatch.context() as patched:
            for each, other in patches.items():
                patched.setattr(compiler, each, other)
            compiler.machine_code(sources, "probe", {}, "sm_90a")
        assert len(list(CACHE.entries())) == count, name
    (tmp_path / "other.cu").write_text(text + "\n")
    compiler.machine_code(Sources(tmp_path), "other", {}, "sm_90a")
    machine_code("probe", {}, "sm_90a")
    assert len(list(CACHE.entries())) == 8
    assert disk_cache.key(["ab", "c"]) != disk_cache.key(["a", "bc"])


def test_processes_may_write_at_once():
    program = (
        "from quant_gru.kernel_runtime.cuda import compiler;"
        "from quant_gru.kernel_runtime.cuda.sources import RUNTIME;"
        "print(len(compiler.machine_code(RUNTIME, 'probe', {}, 'sm_90a')))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    sizes = {process.communicate()[0] for process in running}
    assert len(sizes) == 1
    (path,) = CACHE.entries()
    assert CACHE.load(path.stem) is not None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE.variable, str(tmp_path / "file" / "cache"))
    assert machine_code("probe", {}, "sm_90a").startswith(b"\x7fELF")
    assert not list(CACHE.entries())


def test_where_the_cache_lies(monkeypatch, tmp_path):
    assert CACHE.folder() == tmp_path / "cache"
    monkeypatch.delenv(CACHE.variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CACHE.folder() == tmp_path / "kernel-runtime"


@pytest.mark.parametrize("base", [None, "", "/caches", "relative/caches"])
@pytest.mark.parametrize(
    ("platform", "module", "name"),
    [("linux", "unix", "Unix"), ("darwin", "macos", "MacOS"), ("win32", "windows", "Windows")],
)
def test_the_folder_is_that_of_platformdirs(monkeypatch, base, platform, module, name):
    pytest.importorskip("platformdirs", minversion="4.14")
    windows = importlib.import_module("platformdirs.windows")
    kind = getattr(importlib.import_module(f"platformdirs.{module}"), name)
    # Windows itself is asked for LOCALAPPDATA elsewhere
    monkeypatch.setattr(windows, "get_win_folder", windows.get_win_folder_from_env_vars)
    monkeypatch.delenv(CACHE.variable)
    monkeypatch.setenv("LOCALAPPDATA", "/Users/me/AppData/Local")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if base is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    expected = kind("kernel-runtime", appauthor=False).user_cache_dir
    monkeypatch.setattr(sys, "platform", platform)
    assert CACHE.folder() == Path(expected)


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(CACHE.variable)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    CACHE.store("name", b"code")
    assert CACHE.load("name") is None
    with pytest.raises(KernelError, match=f"Expected {CACHE.variable} or HOME to be set"):
        CACHE.clear()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    with pytest.raises(KernelError, match=f"Expected {CACHE.variable} or LOCALAPPDATA to be set"):
        CACHE.clear()


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler.version.cache_clear()
    assert not compiler.available()
    with pytest.raises(KernelError, match=r'pip install "cuda-bindings==\d+\.\*"'):
        compiler.version()
