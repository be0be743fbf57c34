"""Sources are compiled without a GPU, and compiled kernels are kept safely on disk."""

import subprocess
import sys

import pytest

from kernel_runtime.cuda import compiler, disk_cache
from kernel_runtime.cuda.sources import RUNTIME, Sources
from kernel_runtime.errors import KernelError, raised_as

pytestmark = pytest.mark.skipif(not compiler.available(), reason="needs NVRTC")


def machine_code(name, macros, arch):
    return compiler.machine_code(RUNTIME, name, macros, arch)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))


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


def test_the_second_time_comes_from_disk(monkeypatch):
    first = machine_code("probe", {}, "sm_90a")
    monkeypatch.setattr(compiler, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert machine_code("probe", {}, "sm_90a") == first


@pytest.mark.parametrize("damage", [b"", b"short", None, "content", "other"])
def test_a_damaged_entry_is_compiled_again(damage):
    code = machine_code("probe", {}, "sm_90a")
    (path,) = disk_cache.entries()
    whole = path.read_bytes()
    if damage == "other":  # one of another kernel, whole
        machine_code("probe", {}, "sm_80")
        (other,) = (each for each in disk_cache.entries() if each != path)
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
    assert len(list(disk_cache.entries())) == 4
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
        assert len(list(disk_cache.entries())) == count, name
    (tmp_path / "other.cu").write_text(text + "\n")
    compiler.machine_code(Sources(tmp_path), "other", {}, "sm_90a")
    machine_code("probe", {}, "sm_90a")
    assert len(list(disk_cache.entries())) == 8
    assert disk_cache.key(["ab", "c"]) != disk_cache.key(["a", "bc"])


def test_processes_may_write_at_once():
    program = (
        "from kernel_runtime.cuda import compiler;"
        "from kernel_runtime.cuda.sources import RUNTIME;"
        "print(len(compiler.machine_code(RUNTIME, 'probe', {}, 'sm_90a')))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    sizes = {process.communicate()[0] for process in running}
    assert len(sizes) == 1
    (path,) = disk_cache.entries()
    assert disk_cache.load(path.stem) is not None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "file" / "cache"))
    assert machine_code("probe", {}, "sm_90a").startswith(b"\x7fELF")
    assert not list(disk_cache.entries())


def test_where_the_cache_lies(monkeypatch, tmp_path):
    assert disk_cache.folder() == tmp_path / "cache"
    monkeypatch.delenv(disk_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.folder() == tmp_path / "quant-gru"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk_cache.folder().parts[-2:] == (".cache", "quant-gru")


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(disk_cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(disk_cache.Path, "home", home)
    disk_cache.store("name", b"code")
    assert disk_cache.load("name") is None
    with pytest.raises(
        KernelError, match=f"Expected {disk_cache.VARIABLE}, XDG_CACHE_HOME or HOME"
    ):
        disk_cache.clear()


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler.version.cache_clear()
    assert not compiler.available()
    with pytest.raises(KernelError, match=r'pip install "cuda-bindings==\d+\.\*"'):
        compiler.version()
