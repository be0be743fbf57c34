"""Clang compiles every source of the library: that of Debian 12, and a new one."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpp_build import ROOT, run

KERNELS = ROOT / "src/quant_gru/kernels"
FOLDERS = (ROOT / "cpp/include", ROOT / "cpp/src", ROOT / "src", ROOT / "src/quant_gru", KERNELS)
INCLUDES = [f"-I{path}" for path in FOLDERS]
RUNTIME = ROOT / "src/quant_gru/kernel_runtime/native"
GPU = ("compiler", "cubin_cache", "device", "driver", "sha256", "shared_library", "whole_files")
SOURCES = [
    *sorted(ROOT.glob("cpp/src/**/*.cpp")),
    *sorted(KERNELS.glob("cpu/core/*.cpp")),
    *sorted(KERNELS.glob("cpu/training/*.cpp")),
    *sorted(KERNELS.glob("cuda/host/**/*.cpp")),
    *(RUNTIME / f"{name}.cpp" for name in GPU),
    KERNELS / "cpu/isa/portable.cpp",
]


@pytest.mark.parametrize("compiler", ["clang++-14", "clang++-22"])
def test_sources_compile(compiler: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    command = [compiler, "-fsyntax-only", "-std=c++17", "-DQG_TRAINING", *INCLUDES]

    def compiled(source: Path) -> str:
        return run(*command, source)

    with ThreadPoolExecutor(2) as threads:
        assert len(list(threads.map(compiled, SOURCES))) > 70
