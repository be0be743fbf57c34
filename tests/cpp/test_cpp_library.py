"""The C++ library: it builds as a project of its own, passes its tests and is found by others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cpp_build import CMAKE, CTEST, NEEDS_TOOLS, OPTIONS, ROOT, run
from make_golden import frozen_gru, saved

from quant_gru import FrozenQuantGRU, __version__

MODEL = ROOT / "cpp/tests/gru.safetensors"
pytestmark = NEEDS_TOOLS


def test_own_tests(build: Path) -> None:
    run(str(CTEST), "--test-dir", build, "--output-on-failure")


def test_versions_agree() -> None:
    lists = (ROOT / "cpp/CMakeLists.txt").read_text(encoding="utf-8")
    assert f"project(quant_gru VERSION {__version__} " in lists


def test_the_model_of_the_tests_has_todays_format() -> None:
    assert saved(FrozenQuantGRU.load(MODEL)) == MODEL.read_bytes()


CONSUMER = """cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C CXX)
find_package(quant_gru 0.1 REQUIRED)
foreach(source {sources})
  get_filename_component(name ${{source}} NAME_WE)
  add_executable(${{name}} ${{source}})
  target_link_libraries(${{name}} PRIVATE quant_gru::quant_gru)
endforeach()
"""


@pytest.mark.parametrize("shared", ["OFF", "ON"])
def test_the_installed_package(build: Path, tmp_path: Path, shared: str) -> None:
    """A project finds the installed library, static or shared, and runs the examples."""
    prefix, source = tmp_path / "prefix", tmp_path / "consumer"
    run(str(CMAKE), "--install", build, "--prefix", prefix)
    source.mkdir()
    for name in ("cpp", "cpp_passes"):
        page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
        (source / f"{name}.cpp").write_text(page.split("```cpp")[1].split("```")[0])
    sources = f"{ROOT / 'cpp/examples/run_model.c'} cpp.cpp cpp_passes.cpp"
    (source / "CMakeLists.txt").write_text(CONSUMER.format(sources=sources))
    options = (f"-DCMAKE_PREFIX_PATH={prefix}", f"-DBUILD_SHARED_LIBS={shared}")
    run(str(CMAKE), "-S", source, "-B", tmp_path / "build", *options)
    run(str(CMAKE), "--build", tmp_path / "build")
    printed = run(tmp_path / "build/run_model", MODEL, "3")
    y, _ = FrozenQuantGRU.load(MODEL)(torch.zeros(3, 1, 4))
    assert [float(line) for line in printed.split()] == pytest.approx(y[-1, 0].tolist(), rel=1e-5)
    gru = frozen_gru(40, 64)
    gru.save(tmp_path / "gru.safetensors")
    last = float(run(tmp_path / "build/cpp", folder=tmp_path))
    assert last == pytest.approx(float(gru(torch.zeros(100, 1, 40))[0][-1, 0, -1]), rel=1e-5)
    plain = torch.nn.GRU(40, 64, bias=False)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.fill_(0.01)
        y, _ = plain(torch.ones(50, 8, 40))
    last = float(run(tmp_path / "build/cpp_passes"))
    assert last == pytest.approx(float(y[-1, -1, -1]), rel=1e-5)


def test_add_subdirectory(tmp_path: Path) -> None:
    """A project that adds the folder gets the targets, and nothing is installed or tested."""
    text = CONSUMER.format(sources=ROOT / "cpp/examples/run_model.c")
    found = f'add_subdirectory("{ROOT / "cpp"}" quant_gru)'
    text = text.replace("find_package(quant_gru 0.1 REQUIRED)", found)
    (tmp_path / "CMakeLists.txt").write_text(text)
    run(str(CMAKE), "-S", tmp_path, "-B", tmp_path / "build", *OPTIONS)
    targets = run(str(CMAKE), "--build", tmp_path / "build", "--target", "help")
    assert "quant_gru_static" in targets
    assert "golden_test" not in targets


def test_rust(build: Path, tmp_path: Path) -> None:
    """The Rust example gives Python's result."""
    # the command of rustup exists without a compiler behind it; another one may follow
    folders = os.environ["PATH"].split(os.pathsep)
    found = [each for folder in folders if (each := shutil.which("rustc", path=folder))]
    rustc = next((r for r in found if not subprocess.run([r, "--version"]).returncode), None)
    if rustc is None:
        pytest.skip("needs rustc")
    program = tmp_path / "program"
    link = ("-L", str(build), "-l", "gru_quant_shared", "-C", f"link-arg=-Wl,-rpath,{build}")
    run(rustc, ROOT / "cpp/examples/run_model.rs", *link, "-o", program)
    usage = subprocess.run([program, MODEL], capture_output=True, text=True)
    assert usage.returncode == 2
    assert usage.stderr.startswith(f"usage: {program} FILE C H\n  FILE  a frozen GRU")
    printed = run(program, MODEL, "4", "6")
    y, _ = FrozenQuantGRU.load(MODEL)(torch.ones(1, 1, 4))
    assert [float(each) for each in printed.strip("[]\n").split(",")] == pytest.approx(
        y[0, 0].tolist(), rel=1e-6
    )
