"""The kernels for the CPU without Python: they compile alone, and run layers in a C++ program."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from layer_program import KERNELS, SOURCES, Job, as_real, check, exact_flags, expected
from random_plans import KINDS, random_case

COMPILER = shutil.which("g++")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]
OPTIONS = [*exact_flags(), "-std=c++17", "-Wno-psabi", f"-I{KERNELS}", f"-I{KERNELS.parent}"]
FILES = [*KERNELS.glob("cpu/core/*.cpp"), *KERNELS.glob("cpu/training/*.cpp")]
HEADERS = [*KERNELS.glob("cpu/core/*.hpp"), *KERNELS.glob("cpu/training/*.hpp")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program with the portable kernels."""
    path = tmp_path_factory.mktemp("core") / "run_layers"
    objects = []
    command = [str(COMPILER), *OPTIONS, "-O1", "-pthread"]
    running = []
    for source in SOURCES:
        objects.append(path.with_name(f"{source.stem}.o"))
        compile_one = [*command, "-c", str(source), "-o", str(objects[-1])]
        running.append(subprocess.Popen(compile_one))
    assert [each.wait() for each in running] == [0] * len(running)
    subprocess.run([*command, *map(str, objects), "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_layers(program: Path, kind: str) -> None:
    jobs = []
    for seed in range(8):
        case = random_case(30_000 + seed, kind)
        job = Job(case.plan, case.x, case.h0, case.lengths, case.reverse)
        jobs.append(as_real(job, seed) if seed % 2 else job)

    def run(given: bytes) -> bytes:
        command = [str(program), "portable"]
        return subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True).stdout

    check(run, jobs, [expected(job) for job in jobs])


def test_files_compile_alone() -> None:
    """No file includes a header of Python or of the bindings."""
    for path in [*FILES, *HEADERS, *KERNELS.glob("cpu/isa/*.*")]:
        assert not re.search(r"#include .(Python|nanobind|bindings)", path.read_text()), path
    sources = "".join(f'#include "{path}"\n' for path in HEADERS)
    architecture = ["-DQG_X86"] if platform.machine() in ("x86_64", "AMD64") else []
    command = [str(COMPILER), *OPTIONS, *architecture, "-DQG_TRAINING", "-fsyntax-only"]
    subprocess.run([*command, "-x", "c++", "-"], input=sources.encode(), check=True)
    subprocess.run([*command, *map(str, FILES)], check=True)
