"""The C++ library, built once per session."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from c_access import Access
from cpp_build import CMAKE, OPTIONS, ROOT, configure, run


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build."""
    folder = tmp_path_factory.mktemp("cpp")
    configure(ROOT / "cpp", folder, "-DQUANT_GRU_CUDA=ON", *OPTIONS.split())
    run(str(CMAKE), "--build", folder, "--parallel")
    return folder


@pytest.fixture(scope="session")
def access(build: Path) -> Access:
    """Functions of the library that have no C interface."""
    return Access(next((build / "tests").glob("libaccess.*")))


@pytest.fixture
def small_parts(access: Access) -> Iterator[None]:
    """Passes divide work among threads however little it is."""
    access.native.set_thread_price(ctypes.c_double(1e-9))
    yield
    access.native.set_thread_price(ctypes.c_double(1))
