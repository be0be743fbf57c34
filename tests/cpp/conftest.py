"""The C++ library, built once per session. The build folder remains, so that later runs are short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from library import Library

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def library() -> Library:
    """The library with one instruction set."""
    build = ROOT / "build" / "cpp-access"
    tools = Path(sys.executable).parent
    options = [
        "-DQUANT_GRU_INSTRUCTION_SETS=portable",
        "-DQUANT_GRU_EXAMPLES=OFF",
        "-DCMAKE_BUILD_TYPE=Debug",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
    ]
    run(str(tools / "cmake"), "-S", str(ROOT / "cpp"), "-B", str(build), "-G", "Ninja", *options)
    run(str(tools / "cmake"), "--build", str(build), "--target", "access", "-j", "2")
    return Library(next(build.glob("tests/*access.*")))


def run(*command: str) -> None:
    """Run a command; its output is shown only on failure."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
