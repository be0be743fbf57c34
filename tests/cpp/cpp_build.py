"""Builds of the C++ library.

By default a build has the options of a user who gives none. QUANT_GRU_CPP_OPTIONS sets options, for
example `-DQUANT_GRU_INSTRUCTION_SETS=portable`, which builds faster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = os.environ.get("QUANT_GRU_CPP_OPTIONS", "").split()
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
CMAKE, CTEST = (shutil.which(name, path=TOOLS) for name in ("cmake", "ctest"))
NEEDS_TOOLS = pytest.mark.skipif(
    CMAKE is None or shutil.which("make") is None or shutil.which("g++") is None,
    reason="needs cmake, make and g++",
)
ENVIRONMENT = {"CMAKE_BUILD_PARALLEL_LEVEL": "2"}
if shutil.which("ccache"):
    ENVIRONMENT |= {f"CMAKE_{language}_COMPILER_LAUNCHER": "ccache" for language in ("C", "CXX")}


def run(*command: str | Path, folder: Path | None = None) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
