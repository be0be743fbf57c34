"""The kernels for 64-bit Arm against the reference, on an emulated processor.

The kernels are compiled into a small program, `run_layers.cpp`, that runs as on a real machine.
For this, `pip install ziglang unicorn`: a compiler with its libraries, and an emulator. The first
run compiles the C++ library, too, which takes some minutes; the compiler keeps it in its cache.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from layer_program import KERNELS, SOURCES, Job, as_real, check, exact_flags, expected, packed_job
from random_plans import random_case

from kept import calibrated_gru
from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer.plan import CellPlan

pytestmark = pytest.mark.slow
pytest.importorskip("ziglang", reason="needs ziglang, to compile for Arm")
Machine = pytest.importorskip("machine", reason="needs unicorn, to emulate Arm").Machine

VARIANTS = ("neon-dot", "portable")
SWEEP = {"w8a8": 60, "w8a16": 60, "w16a16": 40, "mixed": 40, "few": 40}
BATCH = 20
SHAPES = [(1, 1, 1, 1), (2, 1, 40, 64), (5, 3, 33, 70), (2, 26, 7, 36), (2, 5, 70, 45)]


def run(program: Path, variant: str, given: bytes) -> bytes:
    return bytes(Machine(program, [variant], given).run())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as a program for Arm, compiled with the options of CMakeLists.txt."""
    folder = tmp_path_factory.mktemp("arm")
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    options = [*exact_flags(), "-std=c++17", "-O3", "-fno-sanitize=all", "-DQG_NEON_DOT"]
    options += [f"-I{KERNELS}"]
    objects = []
    for source in [*SOURCES, KERNELS / "cpu/isa/neon_dot.cpp"]:
        cpu = "generic+v8_2a+dotprod" if source.stem == "neon_dot" else "generic"
        objects.append(folder / f"{source.stem}.o")
        command = [*compiler, f"-mcpu={cpu}", *options, "-c", str(source), "-o", str(objects[-1])]
        subprocess.run(command, check=True)
    result = folder / "kernels"
    subprocess.run([*compiler, "-static", "-s", *map(str, objects), "-o", str(result)], check=True)
    return result


@pytest.mark.parametrize("kind", SWEEP)
def test_random_plans(program: Path, kind: str) -> None:
    for first in range(0, SWEEP[kind], BATCH):
        jobs = []
        for seed in range(first, first + BATCH):
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
    assert Machine(program, []).run().decode().split() == list(VARIANTS)
    assert Machine(program, [], dot_product=False).run().decode().split() == ["portable"]
    job = random_job(quantized(QuantConfig.int8(), 3, 4), 1, 1)
    given = struct.pack("<q", 1) + packed_job(job)
    with pytest.raises(RuntimeError, match="runs here, got neon-dot"):
        Machine(program, ["neon-dot"], given, dot_product=False).run()
