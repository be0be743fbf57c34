"""The C++ library, built once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
from c_access import Access
from cpp_build import CMAKE, OPTIONS, ROOT, configure, run


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build."""
    folder = tmp_path_factory.mktemp("cpp")
    configure(ROOT / "cpp", folder, "-DQUANT_GRU_CUDA=ON", *OPTIONS.split())
    run(str(CMAKE), "--build", folder)
    return folder


@pytest.fixture(scope="session")
def access(build: Path) -> Access:
    """Functions of the library that have no C interface."""
    return Access(next((build / "tests").glob("libaccess.*")))
