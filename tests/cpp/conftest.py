"""The C++ library, built once per test run."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from c_access import Access
from c_library import Library
from cpp_build import CMAKE, OPTIONS, ROOT, run


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build, made by the commands of docs/cpp.md, with the half for GPUs."""
    # worker processes have temporary folders of their own inside that of the run
    workers = "PYTEST_XDIST_WORKER" in os.environ
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if workers else shared) / "cpp"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker waits, and then finds the build made
        run(str(CMAKE), "-B", folder / "build", "-DQUANT_GRU_CUDA=ON", *OPTIONS, folder=ROOT)
        run(str(CMAKE), "--build", folder / "build")
    return folder / "build"


@pytest.fixture(scope="session")
def access(build: Path) -> Access:
    """Functions of the library that have no C interface."""
    return Access(next((build / "cpp/tests").glob("libaccess.*")))


@pytest.fixture(scope="session")
def library(build: Path) -> Library:
    """The C interface."""
    return Library(build / "libgru_quant_shared.so")


@pytest.fixture
def small_parts(access: Access) -> Iterator[None]:
    """Passes divide work among threads however little it is."""
    access.native.set_thread_price(ctypes.c_double(1e-9))
    yield
    access.native.set_thread_price(ctypes.c_double(1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these tests need the library, which takes minutes to build."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
