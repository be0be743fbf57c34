"""Runs layers in a program of C++ alone, `run_layers.cpp`, and compares with the reference."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quant_gru
from quant_gru.config import ACTIVATIONS
from quant_gru.integer import cell as reference
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels.cpu import plan_packing

HERE = Path(__file__).parent
KERNELS = Path(quant_gru.__file__).parent / "kernels"
CONTAINERS = ("int8", "uint8", "int16", "int32", "int64")  # as plan.hpp counts them
SUMS = ("gate.z_pre", "gate.r_pre", "op.rRh", "gate.g_pre")
SUMS += ("op.old_contrib", "op.new_contrib", "output.h", "zoneout")
TABLES = ("gate.z_out", "gate.r_out", "gate.g_out")
TABLE = ("segments", "degree", "shift", "segment_shift", "last", "zero", "lo", "hi")
TABLE += ("bounds", "coefficients")
MATRIX = ("bits", "codes", "bias", "M", "k")


@dataclass(frozen=True)
class Job:
    """A plan and what it is run on: codes, or real values."""

    plan: CellPlan
    x: Tensor
    h0: Tensor
    lengths: Tensor | None = None
    reverse: bool = False


def packed(*values: Any) -> bytes:
    """Words and arrays as `run_layers.cpp` reads them; None for an array without content."""
    parts = []
    for value in values:
        if isinstance(value, float):
            parts.append(struct.pack("<d", value))
        elif isinstance(value, int):
            parts.append(struct.pack("<q", value))
        else:
            content = b"" if value is None else value.contiguous().numpy().tobytes()
            parts.append(struct.pack("<q", len(content)) + content + bytes(-len(content) % 8))
    return b"".join(parts)


def packed_plan(plan: CellPlan) -> bytes:
    """The numbers of a plan, arrays in place of their addresses."""
    numbers = plan_packing.pack(plan)
    arrays = {tensor.data_ptr(): tensor for tensor in numbers["keep"]}

    def fields(d: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
        return [arrays.get(d[name], d[name]) for name in names]

    values = [numbers[name] for name in ("H", "one")]
    for name in ACTIVATIONS:
        values += numbers["quantizers"].get(name, (0, True, 1.0, 0))
    for name in SUMS:
        k, M = numbers["sums"].get(name, (0, []))
        values += [len(M), k, *[*M, 0, 0][:2]]
    for name in TABLES:
        values += fields(numbers["tables"][name], TABLE)
    for name, inputs in (("W", "C"), ("R", "H")):
        m = numbers[name]
        values += [CONTAINERS.index(m["kind"]), numbers[inputs], *fields(m, MATRIX)]
    return packed(*values)


def packed_job(job: Job) -> bytes:
    """A plan and its inputs, after their size."""
    T, N, _ = job.x.shape
    real = job.x.is_floating_point()
    inputs = packed(T, N, job.reverse, real, job.x, job.h0, job.lengths)
    content = packed_plan(job.plan) + inputs
    return struct.pack("<q", len(content)) + content


def expected(job: Job) -> tuple[Tensor, Tensor]:
    """The output and the last state by the reference."""
    plan, x, h0 = job.plan, job.x, job.h0
    real = x.is_floating_point()
    if real:
        x, h0 = plan.x.quantize(x), plan.h.quantize(h0)
    found = reference.run(plan, x, h0, job.lengths, job.reverse)
    return tuple(plan.h.dequantize(codes) for codes in found) if real else found


def check(
    run: Callable[[bytes], bytes], jobs: list[Job], results: list[tuple[Tensor, Tensor]]
) -> set[tuple[str, str]]:
    """Runs jobs in one program and compares; the kinds of kernels that ran them.

    Args:
        run: Gives what the program writes from what it reads.
        jobs: What is run.
        results: Their `expected`.
    """
    given = struct.pack("<q", len(jobs)) + b"".join(packed_job(job) for job in jobs)
    written = bytearray(run(given))
    kinds = set()
    for i, (job, theirs) in enumerate(zip(jobs, results, strict=True)):
        kind, in_float, nan, *bits = struct.unpack_from("<5q", written)
        del written[:40]
        w = job.plan.weights
        # 3 bits take 4; more than 4 take a byte
        assert kind or bits == [{1: 1, 2: 2, 3: 4, 4: 4}.get(n, 8) for n in (w.bits_W, w.bits_R)]
        kinds.add((("fused", "general", "wide")[kind], "float32" if in_float else "float64"))
        assert bool(nan) == bool(job.x.isnan().any() or job.h0.isnan().any())
        for wanted in theirs:
            size = wanted.numel() * wanted.element_size()
            found = torch.frombuffer(written[:size], dtype=wanted.dtype).view(wanted.shape)
            del written[:size]
            # the outputs of a job with NaN are of no use
            assert nan or torch.equal(found, wanted), f"job {i}"
    assert not written
    return kinds


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
