"""Published models, and the C++ library; a test that lacks one says so and is skipped."""

from __future__ import annotations

import fcntl
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
from real_common import Missing, Published  # noqa: E402

torch.set_num_threads(1)  # before fixtures of sessions and modules, too


@pytest.fixture(scope="session")
def published() -> Callable[[type[Published]], Published]:
    """Makes a published model of its class."""

    def make(kind: type[Published]) -> Published:
        try:
            return kind()
        except Missing as error:
            pytest.skip(f"needs what `make test-real` installs: {error}")

    return make


@pytest.fixture(scope="session")
def library() -> Library:
    """The C interface of the C++ library, whose build stays for the next run."""
    folder = ROOT / "build/real_cpp"
    folder.mkdir(parents=True, exist_ok=True)
    if CMAKE is None:
        pytest.skip("needs cmake")
    parts = ("TESTS", "EXAMPLES", "CALIBRATION", "INSTALL")
    options = ["-DQUANT_GRU_INSTRUCTION_SETS=portable"]
    options += [f"-DQUANT_GRU_{part}=OFF" for part in parts]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker waits, and then finds the build made
        run(CMAKE, "-B", folder, "cpp", *options, folder=ROOT)
        run(CMAKE, "--build", folder)
    return Library(folder / "libgru_quant_shared.so")
