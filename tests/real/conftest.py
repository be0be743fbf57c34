"""Published models, and the C++ library; what is missing skips a test, or fails it in CI."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
for folder in ("examples", "tests/cpp"):
    sys.path.insert(0, str(ROOT / folder))

from c_library import Library  # noqa: E402
from cpp_build import CMAKE, run  # noqa: E402
from real_models import Missing, Published  # noqa: E402

torch.set_num_threads(1)  # before fixtures of sessions and modules, too


@pytest.fixture(scope="session")
def published() -> Callable[[type[Published]], Published]:
    """Makes a published model of its class."""

    def make(kind: type[Published]) -> Published:
        try:
            return kind()
        except Missing as error:
            lacking(f"{error} (make test-real installs what these tests need)")

    return make


@pytest.fixture(scope="session")
def library() -> Library:
    """The C interface of the C++ library, whose build stays for the next run."""
    folder = ROOT / "build/real_cpp"
    folder.mkdir(parents=True, exist_ok=True)
    if CMAKE is None:
        lacking("Expected CMake to be installed, got none")
    parts = ("TESTS", "EXAMPLES", "CALIBRATION", "INSTALL")
    options = ["-DQUANT_GRU_INSTRUCTION_SETS=portable"]
    options += [f"-DQUANT_GRU_{part}=OFF" for part in parts]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker waits, and then finds the build made
        try:
            run(CMAKE, "-B", folder, "cpp", *options, folder=ROOT)
            run(CMAKE, "--build", folder)
        except (OSError, subprocess.SubprocessError) as error:
            lacking(f"Expected the C++ library to be built, got {error}")
    return Library(folder / "libgru_quant_shared.so")


def lacking(what: str) -> None:
    """Skip a test, which is a failure in continuous integration."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what)
