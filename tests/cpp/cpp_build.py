"""Builds of the C++ library.

By default a build has the portable kernels only. QUANT_GRU_CPP_OPTIONS replaces the options, for
example by `-DQUANT_GRU_INSTRUCTION_SETS=all`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = os.environ.get(
    "QUANT_GRU_CPP_OPTIONS", "-DQUANT_GRU_INSTRUCTION_SETS=portable -DQUANT_GRU_OPTIMIZATION=-O2"
)
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
CMAKE, CTEST, NINJA = (shutil.which(name, path=TOOLS) for name in ("cmake", "ctest", "ninja"))
NEEDS_TOOLS = pytest.mark.skipif(
    CMAKE is None or shutil.which("g++") is None, reason="needs cmake and g++"
)


def run(*command: str | Path, folder: Path | None = None) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [str(each) for each in command], cwd=folder, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def configure(source: Path, build: Path, *options: str) -> None:
    """Configure a project, with ccache where it is installed."""
    more: Sequence[str] = []
    if shutil.which("ccache"):
        more = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", "-DCMAKE_C_COMPILER_LAUNCHER=ccache"]
    if NINJA:
        more = [*more, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}"]
    run(str(CMAKE), "-S", source, "-B", build, *more, *options)
