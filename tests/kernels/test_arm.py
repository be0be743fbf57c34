"""The kernels for 64-bit Arm against the reference, on an emulated processor.

The kernels are compiled into a small program, `arm/main.cpp`, that runs as on a real machine.
For this, `pip install ziglang unicorn`: a compiler with its libraries, and an emulator. The first
run compiles the C++ library, too, which takes some minutes; the compiler keeps it in its cache.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quant_gru
from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer import reference
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels.cpu import plan_packing

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "arm"))
from random_plans import random_case

pytest.importorskip("ziglang", reason="needs ziglang, to compile for Arm")
Machine = pytest.importorskip("machine", reason="needs unicorn, to emulate Arm").Machine

HERE = Path(__file__).parent
KERNELS = Path(quant_gru.__file__).parent / "kernels"
VARIANTS = ("neon-dot", "portable")
SWEEP = {"w8a8": 160, "w8a16": 160, "w16a16": 100, "mixed": 100}
BATCH = 20
SHAPES = [(1, 1, 1, 1), (2, 1, 40, 64), (5, 3, 33, 70), (2, 26, 7, 36), (2, 5, 70, 45)]


@dataclass(frozen=True)
class Job:
    """A plan and what it is run on: codes, or real values."""

    plan: CellPlan
    x: Tensor
    h0: Tensor
    lengths: Tensor | None = None
    reverse: bool = False


def packed(value: Any, arrays: dict[int, Tensor]) -> bytes:
    """A value in the form that `arm/nanobind/nanobind.h` reads; numbers in `arrays` are arrays."""
    if isinstance(value, dict):
        kind = "d"
        content = b"".join(packed(part, arrays) for pair in value.items() for part in pair)
    elif isinstance(value, str):
        kind, content = "s", value.encode()
    elif isinstance(value, float):
        kind, content = "f", struct.pack("<d", value)
    elif isinstance(value, list):
        kind, content = "l", struct.pack(f"<{len(value)}q", *value)
    elif isinstance(value, int) and value in arrays:
        return packed(arrays[value], arrays)
    elif isinstance(value, int):
        kind, content = "i", struct.pack("<q", value)
    else:
        assert isinstance(value, Tensor)
        kind, content = "a", value.contiguous().numpy().tobytes()
    return struct.pack("<qq", ord(kind), len(content)) + content + bytes(-len(content) % 8)


def packed_job(job: Job) -> bytes:
    numbers = plan_packing.pack(job.plan)
    keep = numbers.pop("keep")
    T, N, _ = job.x.shape
    fields = {
        "T": T,
        "N": N,
        "reverse": job.reverse,
        "real": job.x.is_floating_point(),
        "x": job.x,
        "h0": job.h0,
        "numbers": numbers,
    }
    if job.lengths is not None:
        fields["lengths"] = job.lengths
    content = packed(fields, {tensor.data_ptr(): tensor for tensor in keep})
    return struct.pack("<q", len(content)) + content


def expected(job: Job) -> tuple[Tensor, Tensor]:
    """The output and the last state by the reference."""
    plan, x, h0 = job.plan, job.x, job.h0
    real = x.is_floating_point()
    if real:
        x, h0 = plan.x.quantize(x), plan.h.quantize(h0)
    found = reference.run(plan, x, h0, job.lengths, job.reverse)
    return tuple(plan.h.dequantize(codes) for codes in found) if real else found


def check(program: Path, variant: str, jobs: list[Job], results: list[tuple[Tensor, Tensor]]):
    """Runs jobs in one program and compares; the kinds of kernels that ran them."""
    given = struct.pack("<q", len(jobs)) + b"".join(packed_job(job) for job in jobs)
    written = bytearray(Machine(program, [variant], given).run())
    kinds = set()
    for i, (job, theirs) in enumerate(zip(jobs, results, strict=True)):
        kind, in_float, nan = struct.unpack_from("<qqq", written)
        del written[:24]
        kinds.add((("fused", "general", "wide")[kind], "float32" if in_float else "float64"))
        assert bool(nan) == bool(job.x.isnan().any() or job.h0.isnan().any())
        for wanted in theirs:
            size = wanted.numel() * wanted.element_size()
            found = torch.frombuffer(written[:size], dtype=wanted.dtype).view(wanted.shape)
            del written[:size]
            # the outputs of a job with NaN are of no use
            assert nan or torch.equal(found, wanted), f"job {i}, {variant}"
    assert not written
    return kinds


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as a program for Arm, compiled with the options of CMakeLists.txt."""
    lists = HERE.parents[1] / "CMakeLists.txt"
    match = re.search(r"set\(exact (.*)\)", lists.read_text(encoding="utf-8"))
    assert match
    folder = tmp_path_factory.mktemp("arm")
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    options = [*match[1].split(), "-std=c++17", "-O3", "-fno-sanitize=all", "-DQG_NEON_DOT"]
    options += [f"-I{HERE / 'arm'}", f"-I{KERNELS}"]
    names = ["core/layer", "core/variants", "core/wide", "isa/portable", "isa/neon_dot"]
    objects = []
    for source in [HERE / "arm" / "main.cpp", *(KERNELS / f"cpu/{name}.cpp" for name in names)]:
        cpu = "generic+v8_2a+dotprod" if source.stem == "neon_dot" else "generic"
        objects.append(folder / f"{source.stem}.o")
        command = [*compiler, f"-mcpu={cpu}", *options, "-c", str(source), "-o", str(objects[-1])]
        subprocess.run(command, check=True)
    result = folder / "kernels"
    subprocess.run([*compiler, "-static", "-s", *map(str, objects), "-o", str(result)], check=True)
    return result


def as_real(job: Job, seed: int) -> Job:
    """The same with real values: between the codes, far beyond them, and NaN."""
    generator = torch.Generator().manual_seed(seed)

    def real(quantizer, codes):
        noise = torch.rand(codes.shape, generator=generator) - 0.5
        values = quantizer.dequantize(codes) + noise * quantizer.scale
        place = int(torch.randint(values.numel(), (), generator=generator))
        values.view(-1)[place] = [1e30, -torch.inf, torch.inf, torch.nan][seed // 2 % 4]
        return values

    x, h0 = real(job.plan.x, job.x), real(job.plan.h, job.h0)
    # NaN in one of them has to be found
    h0 = h0.nan_to_num(0) if seed // 8 % 2 else h0
    return Job(job.plan, x, h0, job.lengths, job.reverse)


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
            check(program, variant, jobs, results)


def quantized(config: QuantConfig, C: int, H: int) -> CellPlan:
    gru = QuantGRU(C, H, config=config).eval()
    gru.calibrate(torch.randn(6, 4, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru._plan().cells[0][0]


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
        ("general", "float32"),
    ),
}


@pytest.mark.parametrize("name", KERNEL_OF)
def test_blocks_of_all_sizes(program: Path, name: str) -> None:
    """Units and rows that fill several blocks, and those that are left over."""
    config, kernel = KERNEL_OF[name]
    jobs = [random_job(quantized(config, C, H), T, N) for T, N, C, H in SHAPES]
    results = [expected(job) for job in jobs]
    for variant in VARIANTS:
        assert check(program, variant, jobs, results) == {kernel}


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
        check(program, variant, jobs, [expected(job) for job in jobs])


def test_detection(program: Path) -> None:
    """Without the dot product instructions, the portable kernels remain."""
    assert Machine(program, []).run().decode().split() == list(VARIANTS)
    assert Machine(program, [], dot_product=False).run().decode().split() == ["portable"]
    job = random_job(quantized(QuantConfig.int8(), 3, 4), 1, 1)
    given = struct.pack("<q", 1) + packed_job(job)
    with pytest.raises(RuntimeError, match="runs here, got neon-dot"):
        Machine(program, ["neon-dot"], given, dot_product=False).run()
