"""Programs are built with the flags of pkg-config, from any prefix, shared and static."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cpp_build import CMAKE, NEEDS_TOOLS, ROOT, run

EXAMPLE, MODEL = ROOT / "cpp/examples/run_model.c", ROOT / "cpp/tests/gru.safetensors"
pytestmark = [
    NEEDS_TOOLS,
    pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config"),
]


@pytest.fixture
def prefix(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation that was moved after `cmake --install` to another prefix."""
    run(str(CMAKE), "--install", build, "--prefix", tmp_path / "before")
    moved = (tmp_path / "before").rename(tmp_path / "moved")
    folder = next(moved.glob("**/quant_gru.pc")).parent
    monkeypatch.setenv("PKG_CONFIG_PATH", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder.parent))
    return moved


def flags(*options: str) -> list[str]:
    return run("pkg-config", *options, "--cflags", "--libs", "quant_gru").split()


def test_the_shared_library(prefix: Path, tmp_path: Path) -> None:
    run("gcc", EXAMPLE, *flags(), "-o", tmp_path / "program")
    assert "libgru_quant_shared.so.1" in run("ldd", tmp_path / "program")
    assert run(tmp_path / "program", MODEL, "3")


def test_the_static_library(prefix: Path, tmp_path: Path) -> None:
    """A C compiler gets the C++ library and threads from Libs.private."""
    run("gcc", "-static", EXAMPLE, *flags("--static"), "-o", tmp_path / "static")
    for library in prefix.glob("**/*.so*"):
        library.unlink()
    run("gcc", EXAMPLE, *flags("--static"), "-o", tmp_path / "program")
    results = {run(tmp_path / name, MODEL, "3") for name in ("static", "program")}
    assert len(results) == 1
