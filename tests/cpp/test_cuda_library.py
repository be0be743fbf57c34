"""The CUDA half of the C++ library, without a GPU.

`cpp/tests/fake_cuda.cpp` stands in for the driver and NVRTC: kernels run on the host. The Python
package has its launches from the same code.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gate_structs
import pytest
import torch
from cpp_build import NEEDS_TOOLS
from cuda_library import KINDS, CudaAccess, CudaLibrary, Tensors, gpu_case
from cuda_library import nvrtc as nvrtc_of_package
from make_golden import frozen_gru, saved

from quant_gru import QuantConfig, QuantGRU
from quant_gru.kernel_runtime.cuda import compiler, disk_cache
from quant_gru.kernels._native import PLAIN
from quant_gru.kernels.cuda.machine import SOURCES
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = NEEDS_TOOLS
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels for the host are compiled."""
    return tmp_path_factory.mktemp("host_kernels")


@pytest.fixture
def fake(build: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Libraries that are opened meanwhile find the stand-in for a GPU."""
    path = str(build / "cpp/tests" / "libfake_cuda.so")
    for name in ("QUANT_GRU_CUDA_DRIVER", "QUANT_GRU_NVRTC"):
        monkeypatch.setenv(name, path)
    monkeypatch.setenv("QUANT_GRU_CACHE", os.devnull)
    return monkeypatch


@pytest.fixture
def on_host(fake: pytest.MonkeyPatch, build: Path, folder: Path) -> CudaLibrary:
    """The library with kernels that run on the host."""
    fake.setenv("FAKE_CUDA_HOST", str(folder))
    return CudaLibrary(build / "libgru_quant_shared.so")


@pytest.fixture
def planned(fake: pytest.MonkeyPatch, build: Path) -> CudaAccess:
    """Functions of the library, with launches that are only checked."""
    access = CudaAccess(build / "cpp/tests" / "libcuda_access.so")
    access.key_of_kernel("boundary/rows", "", "sm_90a")  # opens the stand-in for NVRTC
    return access


@pytest.fixture
def nvrtc(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaAccess:
    """A copy of the library that opens NVRTC, which needs no GPU."""
    found = nvrtc_of_package()
    if found is None:
        pytest.skip("needs NVRTC")
    monkeypatch.setenv("QUANT_GRU_NVRTC", str(found))
    monkeypatch.setenv("QUANT_GRU_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "libcuda_access.so"
    copy.write_bytes((build / "cpp/tests" / "libcuda_access.so").read_bytes())
    return CudaAccess(copy)


# ------------------------------------------------------------------------------ sources and NVRTC


def words(macros: Any) -> str:
    """Macros as `cuda_access.cpp` takes them."""
    return " ".join(f"{name}={value}" for name, value in dict(macros).items())


def test_embedded_headers_are_those_of_python(planned: CudaAccess) -> None:
    names = {each for each in planned.embedded_sources().split() if not each.endswith(".cu")}
    assert names == {each for each in SOURCES.texts if not each.endswith(".cu")}


def test_both_languages_share_the_cache(nvrtc: CudaAccess, tmp_path: Path) -> None:
    name, arch = "boundary/quantize_input", "sm_90a"
    key = compiler.native(SOURCES).key_of(name, {k: str(v) for k, v in PLAIN.items()}, arch)
    assert nvrtc.key_of_kernel(name, words(PLAIN), arch) == key
    size = int(nvrtc.compile_kernel(name, words(PLAIN), arch))
    cache = disk_cache.DiskCache("QUANT_GRU_CACHE", "quant-gru")
    code = cache.load(key)
    assert code is not None
    assert len(code) == size
    # what Python stored is what C++ loads
    cache.store(key, b"0" * 17)
    assert nvrtc.compile_kernel(name, words(PLAIN), arch) == "17"
    (tmp_path / "cache" / f"{key}.cubin").write_bytes(b"damaged" * 9)
    assert int(nvrtc.compile_kernel(name, words(PLAIN), arch)) == size


def test_a_folder_that_others_can_write_is_not_used(
    nvrtc: CudaAccess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in Python, tests/attacks/test_cache_attacks.py."""
    folder = tmp_path / "cache"
    before = os.umask(0)
    try:
        size = nvrtc.compile_kernel("boundary/rows", words(PLAIN), "sm_90a")
    finally:
        os.umask(before)
    (entry,) = folder.iterdir()
    assert (entry.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o664, 0o775)
    cache = disk_cache.DiskCache("QUANT_GRU_CACHE", "quant-gru")

    def loads_what_was_planted() -> bool:
        cache.store(entry.stem, b"0" * 17)
        return nvrtc.compile_kernel("boundary/rows", words(PLAIN), "sm_90a") == "17"

    assert loads_what_was_planted()
    entry.chmod(0o666)
    assert nvrtc.compile_kernel("boundary/rows", words(PLAIN), "sm_90a") == size
    assert loads_what_was_planted()
    folder.chmod(0o1777)
    for _ in range(2):
        assert nvrtc.compile_kernel("boundary/rows", words(PLAIN), "sm_90a") == size
    assert capfd.readouterr().err.count("is not used, because others can write it") == 1
    folder.chmod(0o755)
    entry.unlink()
    os.mkfifo(entry)
    assert nvrtc.compile_kernel("boundary/rows", words(PLAIN), "sm_90a") == size


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_small_kernels_compile(nvrtc: CudaAccess, arch: str) -> None:
    products = ("projection/byte_product", "projection/int_mm")
    for source in ("boundary/rows", *products):
        assert int(nvrtc.compile_kernel(source, words(PLAIN), arch)) > 0
    few, step = {**PLAIN, "WIDE": 1}, {**PLAIN, "REAL": "float"}
    kernels = [("projection/reals_few_rows", few), ("recurrence/per_step", step)]
    for rules in ((0, 0), (1, 1), (2, 3), (3, 2), (4, 1)):
        macros = {**PLAIN, "QG_RULE": rules[0], "QG_INPUT_RULE": rules[1]}
        kernels.append(("boundary/wide_border", macros))
    for source, macros in kernels:
        assert int(nvrtc.compile_kernel(source, words(macros), arch)) > 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_of_a_plan_compile(
    planned: CudaAccess, request: pytest.FixtureRequest, arch: str
) -> None:
    file = saved(frozen_gru(40, 64, layers=2))
    kernels = {line.source: line.macros for line in launches(planned, file, 30, 4)}
    nvrtc = request.getfixturevalue("nvrtc")  # only now: its cache is another one
    assert {"recurrence/persistent", "projection/codes_tiled"} <= set(kernels)
    for source, macros in kernels.items():
        assert int(nvrtc.compile_kernel(source, words(macros), arch)) > 0


def test_errors_of_nvrtc_name_source_and_options(nvrtc: CudaAccess) -> None:
    with pytest.raises(
        RuntimeError, match=r"to compile boundary/rows\.cu with .*-DPadding=1, got\n"
    ):
        nvrtc.compile_kernel("boundary/rows", "Padding=1", "sm_90a")
    with pytest.raises(RuntimeError, match=r"name of a source, got 'absent\.cu'"):
        nvrtc.compile_kernel("absent", "", "sm_90a")


# ------------------------------------------------------------------------------------ launch plans


@dataclass(frozen=True)
class Line:
    """A launch of the library."""

    source: str
    function: str
    grid: tuple[int, ...]
    macros: dict[str, str]
    arguments: bytes


def launches(access: CudaAccess, file: bytes, T: int, N: int) -> list[Line]:
    """The launches of a call."""
    sizes = (ctypes.c_size_t(len(file)), ctypes.c_int64(T), ctypes.c_int64(N))
    found = []
    for line in access.launches_of(file, *sizes).splitlines():
        source, function, grid, macros, arguments = line.split("|")
        pairs = dict(word.split("=") for word in macros.split())
        grid = tuple(map(int, grid.split()))
        found.append(Line(source, function, grid, pairs, bytes.fromhex(arguments)))
    return found


@pytest.mark.parametrize("config", [QuantConfig.int8(), QuantConfig.w8a16()], ids=["int8", "w8a16"])
def test_many_rows_use_all_projections(planned: CudaAccess, config: QuantConfig) -> None:
    used, overlaps = set(), 0
    for C, H, sizes in (
        (40, 64, ((1, 1), (9, 1), (100, 1), (100, 32), (20, 300))),
        (128, 256, ((20, 128), (64, 128), (8, 700))),
        (512, 256, ((400, 32),)),
        (400, 512, ((9, 64), (64, 128))),
    ):
        gru = QuantGRU(C, H, config=config)
        gru.calibrate(torch.randn(5, 4, C))
        gru.finalize_calibration()
        file = saved(gru.freeze())
        for T, N in sizes:
            found = launches(planned, file, T, N)
            used |= {each.source for each in found}
            overlaps += any("STRETCH" in each.macros for each in found)
    assert overlaps
    names = ("codes_tiled", "codes_weight_stationary", "reals_few_rows", "reals_tiled")
    assert {f"projection/{name}" for name in (*names, "reals_wgmma")} <= used


CELLS = {f"CellC<{name}>": gate_structs.CELL_C[name] for name in ("float", "double")}
SUMS = {f"SumC<{name}>": gate_structs.SUM_C[name] for name in ("float", "double")}
SHARED = {"TableC": gate_structs.TableC, **CELLS, **SUMS}


def test_layouts_are_those_of_python(planned: CudaAccess) -> None:
    described = {line.split()[0]: line.split()[1:] for line in planned.layouts().splitlines()}
    for name, structure in SHARED.items():
        size, *fields = described[name]
        assert ctypes.sizeof(structure) == int(size), name
        for each in fields:
            member, offset = each.split(":")
            assert getattr(structure, member).offset == int(offset), (name, member)


# ---------------------------------------------------------------------------------- runs and errors


@pytest.mark.parametrize(
    ("kind", "seed", "large"),
    [
        ("w8a8", 4, True),  # two layers, lengths, a batch of 64
        ("w8a16", 3, True),
        ("w16a16", 0, True),
        ("mixed", 3, True),  # two layers of two directions
        ("wide", 3, True),
        *((kind, seed, False) for kind in KINDS for seed in (10, 11)),
    ],
)
def test_codes_are_those_of_python(on_host: CudaLibrary, kind: str, seed: int, large: bool) -> None:
    case = gpu_case(seed, kind, large)
    call = on_host.prepare(case.file, case.T, case.N)
    tensors = Tensors(case.case, "cpu")
    for _ in range(1 if large else 2):  # the second run finds what the first one left behind
        tensors.forget()
        tensors.run(call)
        assert not tensors.differences(), f"{case.name}\n{call}"


# Seeds whose range of the input excludes 0, where the range may; few do. Of each kind, one has
# several layers or directions.
FAR = {
    "w8a8": (1, 5),
    "w8a16": (11, 24),
    "w16a16": (3, 17),
    "mixed": (7, 8),
    "wide": (7, 10),
    "few": (3, 6),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_of_inputs_that_exclude_0(on_host: CudaLibrary, kind: str) -> None:
    for seed in FAR[kind]:
        case = gpu_case(seed, kind, large=seed % 8 == 0, hidden=(3, 17), far=True)
        assert case.case.gru._plan().is_far
        tensors = Tensors(case.case, "cpu")
        call = on_host.prepare(case.file, case.T, case.N)
        tensors.run(call)
        assert not tensors.differences(), f"{case.name}\n{call}"


@pytest.mark.parametrize(("kind", "seed"), [("w8a8", 5), ("w8a16", 0), ("w16a16", 1), ("mixed", 2)])
def test_weights_that_do_not_fit_registers(
    fake: pytest.MonkeyPatch, build: Path, folder: Path, tmp_path: Path, kind: str, seed: int
) -> None:
    """A GPU without clusters computes larger GRUs step by step."""
    fake.setenv("FAKE_CUDA_ARCH", "80")
    fake.setenv("FAKE_CUDA_HOST", str(folder))
    copy = tmp_path / "library.so"
    copy.write_bytes((build / "libgru_quant_shared.so").read_bytes())
    case = gpu_case(seed, kind, large=True, hidden=(320, 330))
    call = CudaLibrary(copy).prepare(case.file, case.T, case.N)
    assert "recurrence/per_step" in str(call)
    tensors = Tensors(case.case, "cpu")
    tensors.run(call)
    assert not tensors.differences(), f"{case.name}\n{call}"


def test_steps_are_a_sequence(on_host: CudaLibrary) -> None:
    gru = frozen_gru(7, 20, layers=2)
    x = torch.randn(5, 3, 7)
    y, h_n = gru(x)
    call = on_host.prepare(saved(gru), 1, 3)
    states, step = torch.zeros(2, 3, 20), torch.empty(1, 3, 20)
    for t in range(5):
        call.run(x[t], step, states, states)  # in place
        assert torch.equal(step[0], y[t])
    assert torch.equal(states, h_n)


def test_runs_do_not_allocate(on_host: CudaLibrary, build: Path) -> None:
    driver = ctypes.CDLL(str(build / "cpp/tests" / "libfake_cuda.so"))
    before = driver.fake_allocations()
    call = on_host.prepare(saved(frozen_gru(7, 20)), 4, 3)
    prepared = driver.fake_allocations()
    assert prepared > before
    call.run(torch.randn(4, 3, 7), torch.empty(4, 3, 20))
    assert driver.fake_allocations() == prepared
    del call
    assert driver.fake_allocations() == before


def test_the_shape_of_the_recurrence_can_be_named(
    on_host: CudaLibrary, fake: pytest.MonkeyPatch
) -> None:
    file = saved(frozen_gru(7, 20))
    fake.setenv(planner.VARIABLE, "1,1,1,4")
    assert " NB=4 " in str(on_host.prepare(file, 3, 9))
    fake.setenv(planner.VARIABLE, "1,1,1,3")
    with pytest.raises(RuntimeError, match=r"Expected QUANT_GRU_CUDA_SHAPE to have .*'1,1,1,3'"):
        on_host.prepare(file, 3, 9)


def test_arguments_are_checked(on_host: CudaLibrary) -> None:
    file = saved(frozen_gru(7, 20))
    with pytest.raises(RuntimeError, match="Expected T to be at least 1, got 0"):
        on_host.prepare(file, 0, 1)
    with pytest.raises(RuntimeError, match="Expected T \\* N to be below 2\\^26"):
        on_host.prepare(file, 1 << 20, 1 << 20)
    with pytest.raises(RuntimeError, match=r"index of a GPU to be in \[0, 1\), got 1"):
        on_host.prepare(file, 1, 1, device=1)
    with pytest.raises(RuntimeError, match="Expected"):
        on_host.prepare(file[:100], 1, 1)


def test_old_gpus_are_refused(fake: pytest.MonkeyPatch, build: Path, tmp_path: Path) -> None:
    fake.setenv("FAKE_CUDA_ARCH", "75")
    copy = tmp_path / "libcuda_access.so"
    copy.write_bytes((build / "cpp/tests" / "libcuda_access.so").read_bytes())
    with pytest.raises(RuntimeError, match=r"capability 8\.0 or later, got 7\.5"):
        launches(CudaAccess(copy), saved(frozen_gru(7, 20)), 1, 1)


def test_without_a_driver(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANT_GRU_CUDA_DRIVER", "/absent/libcuda.so.1")
    copy = tmp_path / "library.so"
    copy.write_bytes((build / "libgru_quant_shared.so").read_bytes())
    message = re.escape("Expected the driver of an NVIDIA GPU to be installed (libcuda.so.1 is")
    with pytest.raises(RuntimeError, match=message):
        CudaLibrary(copy).prepare(saved(frozen_gru(7, 20)), 1, 1)
