"""The C++ library for other systems, where their compiler is installed: pip install ziglang.

The first run of this compiler takes some minutes.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from cpp_build import ROOT

KERNELS = ROOT / "src/quant_gru/kernels"
RUNTIME = ROOT / "src/quant_gru/kernel_runtime/native"
GPU = ("compiler", "cubin_cache", "device", "driver", "sha256", "shared_library", "whole_files")
# Each system and each processor once.
SYSTEMS = {"x86_64-windows-gnu": "-DQG_X86", "aarch64-macos": "-DQG_NEON_DOT"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_sources_compile(system: str, tmp_path: Path) -> None:
    """The sources of the library compile with Clang for other systems."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang")
    folders = (
        ROOT / "cpp/include",
        ROOT / "cpp/src",
        ROOT / "src",
        ROOT / "src/quant_gru",
        KERNELS,
    )
    includes = [f"-I{path}" for path in folders]
    sources = [
        path for name in ("cpu/core", "cuda/host/**") for path in KERNELS.glob(f"{name}/*.cpp")
    ]
    sources += [*ROOT.glob("cpp/src/**/*.cpp"), *(RUNTIME / f"{name}.cpp" for name in GPU)]
    options = ["-target", system, "-std=c++17", "-O0", "-g0", SYSTEMS[system], *includes]
    options.append("-fno-sanitize=all")  # code that is not run needs none
    command = [sys.executable, "-m", "ziglang", "c++", *options]
    for source in [*sources, KERNELS / "cpu/isa/portable.cpp"]:
        subprocess.run([*command, "-c", source, "-o", tmp_path / "object.o"], check=True)
