"""The C++ library on Arm, where its compiler and emulator are installed.

On Debian: apt-get install g++-aarch64-linux-gnu qemu-user. The kernels are also compared with the
reference: `tests/kernels/run_layers.cpp` is linked with the library.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from cpp_build import CMAKE, CTEST, ROOT
from cpp_build import run as run_tool
from layer_program import HERE, KERNELS, Job, as_real, check, expected, packed_job
from random_plans import random_case

from kept import calibrated_gru
from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer.plan import CellPlan

VARIANTS = ("neon-dot", "portable")
# Damaged files are read on this machine and under sanitizers.
PROGRAMS = ("golden", "json", "numbers", "model", "c_api", "quantization")
KINDS = ("w8a8", "w8a16", "w16a16", "mixed", "few")
SHAPES = [(1, 1, 1, 1), (2, 1, 40, 64), (5, 3, 33, 70), (2, 26, 7, 36), (2, 5, 70, 45)]
WITHOUT_DOT_PRODUCT = ("-cpu", "cortex-a53")


EMULATOR = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build of the library."""
    for tool in ("aarch64-linux-gnu-g++", EMULATOR[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    folder = tmp_path_factory.mktemp("aarch64")
    run_tool(
        str(CMAKE),
        "-B",
        folder,
        "cpp",
        "-DQUANT_GRU_OPTIMIZATION=-O1",
        "-DQUANT_GRU_EXAMPLES=OFF",
        f"-DCMAKE_PROJECT_INCLUDE={Path(__file__).with_name('precompiled.cmake')}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
        f"-DCMAKE_CROSSCOMPILING_EMULATOR={';'.join(EMULATOR)}",
        folder=ROOT,
    )
    run_tool(str(CMAKE), "--build", folder, "--target", *(f"{name}_test" for name in PROGRAMS))
    return folder


def test_own_tests(built: Path) -> None:
    chosen = ("-R", f"^({'|'.join(PROGRAMS)})", "--no-tests=error")
    run_tool(str(CTEST), "--test-dir", built, "--output-on-failure", *chosen)


# ----------------------------------------------------------------------------------------- kernels


def run(program: Path, variant: str, given: bytes, *options: str) -> bytes:
    """What the program of layers writes from what it reads."""
    command = [*EMULATOR, *options, program, *filter(None, [variant])]
    done = subprocess.run(command, input=given, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr.decode()}")
    return done.stdout


@pytest.fixture(scope="module")
def program(built: Path) -> Path:
    """The kernels as a program for Arm."""
    options = ("-std=c++17", "-O1", "-DQG_NEON_DOT", "-DQG_TRAINING", f"-I{KERNELS}")
    sources = (HERE / "run_layers.cpp", built / "libgru_quant_static.a")
    run_tool("aarch64-linux-gnu-g++", *options, *sources, "-pthread", "-o", built / "run_layers")
    return built / "run_layers"


@pytest.mark.parametrize("kind", KINDS)
def test_random_plans(program: Path, kind: str) -> None:
    jobs = []
    for seed in range(24):
        case = random_case(20_000 + seed, kind)
        job = Job(case.plan, case.x, case.h0, case.lengths, case.reverse)
        jobs.append(as_real(job, seed) if seed % 2 else job)
    results = [expected(job) for job in jobs]
    for variant in VARIANTS:
        check(partial(run, program, variant), jobs, results)


def quantized(config: QuantConfig, C: int, H: int) -> CellPlan:
    return calibrated_gru(C, H, config, data=(6, 4), seed=None)._plan().cells[0][0]


def random_job(plan: CellPlan, T: int, N: int) -> Job:
    x = torch.randint(plan.x.lo, plan.x.hi + 1, (T, N, plan.input_size))
    h0 = torch.randint(plan.h.lo, plan.h.hi + 1, (N, plan.hidden_size))
    return Job(plan, x.to(plan.x.container), h0.to(plan.h.container))


def with_bits(**bits: int) -> QuantConfig:
    config = QuantConfig.int8()
    for name, width in bits.items():
        config = config.replace(name.replace("_", ".", 1), bitwidth=width)
    return config


# a configuration for each kernel and lane, with input and state in one plane of bytes or two
KERNEL_OF = {
    "w8a8": (QuantConfig.int8(), ("fused", "float32")),
    "wide input": (with_bits(W=4, input_x=12), ("fused", "float32")),
    "w8a16": (QuantConfig.w8a16(), ("fused", "float64")),
    "wide state": (with_bits(output_h=16), ("fused", "float64")),
    "wide gates": (with_bits(gate_z_pre=16, gate_g_pre=16), ("fused", "float64")),
    "w16a16": (QuantConfig.int16(), ("general", "float64")),
    "wide tables": (
        with_bits(gate_z_pre=16, gate_r_pre=16).replace_globals(activation="pwl"),
        ("fused", "float64"),
    ),
}


@pytest.mark.parametrize("name", KERNEL_OF)
def test_blocks_of_all_sizes(program: Path, name: str) -> None:
    """Units and rows that fill several blocks, and those that are left over."""
    config, kernel = KERNEL_OF[name]
    jobs = [random_job(quantized(config, C, H), T, N) for T, N, C, H in SHAPES]
    results = [expected(job) for job in jobs]
    for variant in VARIANTS:
        assert check(partial(run, program, variant), jobs, results) == {kernel}


def test_accumulators_beyond_32_bits(program: Path) -> None:
    """Large 16-bit products over many features leave int32, and are summed in 64 bits."""
    gru = QuantGRU(700, 24, config=QuantConfig.int16()).eval()
    with torch.no_grad():
        gru.weight_ih_l0.fill_(0.5)
        gru.weight_ih_l0[::2] = -0.5
    gru.calibrate(torch.randn(3, 4, 700))
    gru.finalize_calibration()
    plan = gru._plan().cells[0][0]
    jobs = [
        Job(
            plan,
            torch.full((2, 3, 700), fill, dtype=plan.x.container),
            torch.full((3, 24), plan.h.hi, dtype=plan.h.container),
        )
        for fill in (plan.x.lo, plan.x.hi)
    ]
    for variant in VARIANTS:
        check(partial(run, program, variant), jobs, [expected(job) for job in jobs])


def test_detection(program: Path) -> None:
    """Without the dot product instructions, the portable kernels remain."""
    assert run(program, "", b"").decode().split() == list(VARIANTS)
    assert run(program, "", b"", *WITHOUT_DOT_PRODUCT).decode().split() == ["portable"]
    job = random_job(quantized(QuantConfig.int8(), 3, 4), 1, 1)
    given = struct.pack("<q", 1) + packed_job(job)
    with pytest.raises(RuntimeError, match="runs here, got neon-dot"):
        run(program, "neon-dot", given, *WITHOUT_DOT_PRODUCT)
