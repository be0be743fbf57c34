"""The kernels for the CPU compile without Python.

Every instruction set runs in test_cpu_executor.py, and in a C++ program in tests/cpp.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest
from layer_program import KERNELS

COMPILER = shutil.which("g++")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]
OPTIONS = ["-std=c++17", "-Wno-psabi", f"-I{KERNELS}", f"-I{KERNELS.parent}"]
FILES = [*KERNELS.glob("cpu/core/*.cpp"), *KERNELS.glob("cpu/training/*.cpp")]
HEADERS = [*KERNELS.glob("cpu/core/*.hpp"), *KERNELS.glob("cpu/training/*.hpp")]


def test_headers_compile_alone() -> None:
    """No file includes a header of Python or of the bindings; tests/cpp builds without Python."""
    for path in [*FILES, *HEADERS, *KERNELS.glob("cpu/isa/*.*")]:
        assert not re.search(r"#include .(Python|nanobind|bindings)", path.read_text()), path
    sources = "".join(f'#include "{path}"\n' for path in HEADERS)
    architecture = ["-DQG_X86"] if platform.machine() in ("x86_64", "AMD64") else []
    command = [str(COMPILER), *OPTIONS, *architecture, "-DQG_TRAINING", "-fsyntax-only"]
    subprocess.run([*command, "-x", "c++", "-"], input=sources.encode(), check=True)
