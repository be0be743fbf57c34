"""Sources are compiled without a GPU, and compiled kernels are kept safely on disk."""

import hashlib
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvrtc import FakeNvrtc

from quant_gru.kernel_runtime.cuda import compiler
from quant_gru.kernel_runtime.cuda.disk_cache import DiskCache
from quant_gru.kernel_runtime.cuda.sources import RUNTIME, Sources
from quant_gru.kernel_runtime.errors import KernelError, raised_as

CACHE = RUNTIME.cache
NEEDS_NVRTC = pytest.mark.skipif(compiler.missing() is not None, reason="needs NVRTC")


def machine_code(name, macros, arch, sources=RUNTIME):
    return compiler.machine_code(sources, name, macros, arch)


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


@NEEDS_NVRTC
def test_a_package_gets_its_error_and_its_cache(tmp_path, monkeypatch):
    class Error(Exception):
        pass

    cache = DiskCache("ANOTHER_CACHE", "another")
    monkeypatch.setenv(cache.variable, str(tmp_path / "another"))
    sources = Sources(tmp_path, error=Error, cache=cache)
    (tmp_path / "broken.cu").write_text("int x = undefined_name;")
    with pytest.raises(Error, match=r"(?s)NVRTC .* broken.cu .*undefined_name"):
        machine_code("broken", {}, "sm_90a", sources)
    assert machine_code("probe", {}, "sm_90a", sources) == machine_code("probe", {}, "sm_90a")
    assert len(list(cache.entries())) == len(list(CACHE.entries())) == 1


@NEEDS_NVRTC
def test_the_second_time_comes_from_disk():
    machine_code("probe", {}, "sm_90a")
    (path,) = CACHE.entries()
    CACHE.store(path.stem, b"stored")
    assert machine_code("probe", {}, "sm_90a") == b"stored"


@NEEDS_NVRTC
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
    (tmp_path / "one.cu").write_text("source")
    (tmp_path / "a.cuh").write_text("header")

    def key(macros=(), arch="sm_90a", version=(13, 0), **texts):
        for name, text in {"one.cu": "source", "a.cuh": "header", **texts}.items():
            (tmp_path / name).write_text(text)
        nvrtc = FakeNvrtc(version=version)
        monkeypatch.setattr(compiler, "_nvrtc", lambda: nvrtc.addresses)
        sources = Sources(tmp_path, (("a.cuh", tmp_path / "a.cuh"),))
        assert machine_code("one", dict(macros), arch, sources) == b"one"
        given = "one", {name: str(value) for name, value in dict(macros).items()}, arch
        found = compiler.native(sources).key_of(*given)
        for _, options in nvrtc.asked:  # if it was not cached
            assert found == _key_of(sources, "one", options, version)
        return found

    keys = [
        key(),
        key({"A": 1}),
        key({"A": 2}),
        key({"A": 1, "B": 2}),
        key(arch="sm_80"),
        key(version=(13, 1)),
        key(version=(12, 3)),  # without --minimal
        key(**{"one.cu": "other"}),
        key(**{"a.cuh": "other"}),
    ]
    assert len(set(keys)) == len(keys) == len(list(CACHE.entries()))
    assert key() == keys[0]


def _key_of(sources, name, options, version):
    """Each part behind its length."""
    headers = {k: v for k, v in sorted(sources.texts.items()) if not k.endswith(".cu")}
    number = "{}.{}".format(*version)
    parts = (sources.texts[f"{name}.cu"], *headers, *headers.values(), *options, number)
    encoded = [part.encode() for part in parts]
    text = b"".join(len(each).to_bytes(8, "little") + each for each in encoded)
    return hashlib.sha256(text).hexdigest()


def test_options(monkeypatch):
    common = ["--device-as-default-execution-space", "--std=c++17", "--fmad=false"]
    for version, minimal in (((12, 3), []), ((12, 4), ["--minimal"]), ((13, 0), ["--minimal"])):
        nvrtc = FakeNvrtc(version=version)
        monkeypatch.setattr(compiler, "_nvrtc", lambda nvrtc=nvrtc: nvrtc.addresses)
        machine_code("probe", {"B": "x", "A": 1}, "sm_80", Sources(Path(__file__).parent))
        end = ["--gpu-architecture=sm_80", "-DA=1", "-DB=x"]
        assert nvrtc.asked == [("probe", [*common, *minimal, *end])]


def test_errors_of_nvrtc(monkeypatch, tmp_path):
    nvrtc = FakeNvrtc(broken=True)
    monkeypatch.setattr(compiler, "_nvrtc", lambda: nvrtc.addresses)
    sources = Sources(tmp_path)
    # the log may have any bytes, and ends in a null byte
    with pytest.raises(KernelError, match=r"NVRTC 13.0 to compile probe.cu with .*\nundefined .$"):
        machine_code("probe", {}, "sm_80", sources)
    with pytest.raises(KernelError, match=r"name of a source, got 'missing\.cu'"):
        machine_code("missing", {}, "sm_80", sources)
    assert not list(CACHE.entries())


def test_what_is_logged(monkeypatch, caplog, tmp_path):
    nvrtc = FakeNvrtc()
    monkeypatch.setattr(compiler, "_nvrtc", lambda: nvrtc.addresses)
    sources = Sources(tmp_path)
    with caplog.at_level(logging.DEBUG, "quant_gru"):
        machine_code("probe", {}, "sm_80", sources)
        machine_code("probe", {}, "sm_80", sources)
        monkeypatch.setenv(CACHE.variable, os.devnull)
        machine_code("probe", {}, "sm_80", sources)
    compiled = r"compiled probe.cu for sm_80 in \d+\.\d s: 5 bytes"
    expected = [
        ("INFO", compiled),
        ("DEBUG", rf"cached [0-9a-f]{{64}} in '{tmp_path / 'cache'}'"),
        ("DEBUG", r"probe.cu for sm_80: cached as [0-9a-f]{64}"),
        ("INFO", compiled),
        ("INFO", f"compiled kernels are not cached: '{os.devnull}': .+"),
    ]
    assert len(caplog.records) == len(expected)
    for record, (level, message) in zip(caplog.records, expected, strict=True):
        assert record.levelname == level
        assert re.fullmatch(message, record.getMessage())


@pytest.mark.slow
@NEEDS_NVRTC
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


@NEEDS_NVRTC
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
def test_the_folder_is_that_of_platformdirs(monkeypatch, base):
    platformdirs = pytest.importorskip("platformdirs", minversion="4.14")
    monkeypatch.delenv(CACHE.variable)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if base is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    expected = platformdirs.user_cache_dir("kernel-runtime", appauthor=False)
    assert CACHE.folder() == Path(expected)


@pytest.mark.skipif(os.name == "nt", reason="needs bytes in names of files")
def test_a_folder_with_any_name(monkeypatch, tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff \xc3\xa9")
    monkeypatch.setenv(CACHE.variable, str(folder))
    CACHE.store("name", b"code")
    assert CACHE.load("name") == b"code"
    assert [path.name for path in CACHE.entries()] == ["name.cubin"]
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write it"):
        assert CACHE.load("name") is None


@pytest.mark.skipif(os.name == "nt", reason="Windows has no list of users")
def test_without_a_variable_the_list_of_users_has_the_home(monkeypatch):
    for name in (CACHE.variable, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    try:
        home = Path.home()
    except RuntimeError:  # nor has it this user
        CACHE.store("name", b"code")
        assert CACHE.load("name") is None
        with pytest.raises(KernelError, match=f"Expected {CACHE.variable} or HOME to be set"):
            CACHE.clear()
    else:
        caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
        assert CACHE.folder() == home / caches / "kernel-runtime"


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ImportError("none", name="cuda.pathfinder"), '"cuda-pathfinder"'),
        (ImportError("none", name="cuda"), '"cuda-pathfinder"'),
        (RuntimeError("none"), r'"nvidia-cuda-nvrtc(-cu12)?==\d+\.\*"'),
    ],
)
def test_an_error_says_what_to_install(error, package):
    found = compiler.missing_package(error)
    kind = type(error).__name__
    assert re.fullmatch(
        rf"Expected [\w-]+ to be installed \(pip install {package}\), got {kind}: none", str(found)
    )


def test_without_its_search_nvrtc_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    compiler.native.cache_clear()
    compiler._nvrtc.cache_clear()
    assert compiler.missing() is not None
    with pytest.raises(KernelError, match='pip install "cuda-pathfinder"'):
        compiler.version()
