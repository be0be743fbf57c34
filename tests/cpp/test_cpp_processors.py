"""The C++ library on other processors, where their compilers and emulators are installed.

On Debian: apt-get install g++-aarch64-linux-gnu g++-riscv64-linux-gnu qemu-user.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cpp_build import CMAKE, CTEST, ROOT, run


@pytest.mark.parametrize("processor", ["aarch64", "riscv64"])
def test_emulated_processors(processor: str, tmp_path: Path) -> None:
    """The library passes its own tests."""
    tools = (f"{processor}-linux-gnu-g++", f"qemu-{processor}")
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    run(
        str(CMAKE),
        "-B",
        tmp_path,
        "cpp",
        "-DQUANT_GRU_OPTIMIZATION=-O1",
        f"-DCMAKE_PROJECT_INCLUDE={Path(__file__).with_name('precompiled.cmake')}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={processor}",
        f"-DCMAKE_C_COMPILER={processor}-linux-gnu-gcc",
        f"-DCMAKE_CXX_COMPILER={processor}-linux-gnu-g++",
        f"-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-{processor};-L;/usr/{processor}-linux-gnu",
        folder=ROOT,
    )
    run(str(CMAKE), "--build", tmp_path, "--target", "test_programs")
    run(str(CTEST), "--test-dir", tmp_path, "--output-on-failure")
