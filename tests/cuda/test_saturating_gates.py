"""Gates in fractions of 256: equal to the definition wherever they are chosen."""

import ctypes
import math

import pytest
import torch
from gate_structs import CELL_C, SaturatedC, cell_of, saturated_of
from host_machine import COMPILER
from random_plans import random_case

from kept import calibrated_gru
from quant_gru import QuantConfig
from quant_gru.integer import cell as reference
from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernels._native import PLAIN
from quant_gru.kernels.cuda.plan import structure as frozen

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CaseC = structure(
    "CaseC",
    **dict.fromkeys(("Wx", "Rh", "h", "result"), ctypes.c_void_p),
    count=ctypes.c_int64,
    cell=CELL_C["float"],
    saturated=SaturatedC,
)
COUNT = 1000


def codes_of(q, shape, generator):
    """Codes of a quantizer, its ends more often."""
    found = torch.randint(q.lo, q.hi + 1, shape, generator=generator)
    ends = torch.rand(shape, generator=generator)
    return found.where(ends > 0.05, q.lo).where(ends < 0.95, q.hi)


def run(host, plan, Wx, Rh, h):
    """Codes of the next state; of the projections (3, count)."""
    q = plan.frozen.quantizers
    numbers, form = frozen.frozen_numbers(plan.frozen), frozen.form_of(plan)
    given = [
        (codes - q[name].zero_point).to(torch.float32).contiguous()
        for codes, name in ((Wx, "matmul.Wx"), (Rh, "matmul.Rh"), (h, "output.h"))
    ]
    result = torch.full(h.shape, -(10**6), dtype=torch.int32)
    record = CaseC(*(each.data_ptr() for each in given), result.data_ptr(), h.numel())
    record.cell, record.saturated = cell_of(numbers, "float"), saturated_of(numbers)
    kernel = Kernel.of(
        "saturated_case", "saturated_case", {**PLAIN, **form.products, "QG_POT": 0, "QG_ZONEOUT": 0}
    )
    host.launch(kernel, Grid((-(-h.numel() // 128), 1), 128, shared_bytes=3 * 1040), record)
    return result + q["output.h"].zero_point


def check(host, plan, seed):
    q, generator = plan.frozen.quantizers, torch.Generator().manual_seed(seed)
    Wx, Rh = (codes_of(q[n], (3, COUNT), generator) for n in ("matmul.Wx", "matmul.Rh"))
    h = codes_of(q["output.h"], (COUNT,), generator)
    expected = reference.gates(plan, Wx.flatten(), Rh.flatten(), h)
    assert torch.equal(run(host, plan, Wx, Rh, h).to(torch.int64), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "seeds"), [("half_even", 240), ("half_away", 60), ("half_up", 40), ("floor", 40)]
)
def test_random_plans(host, rule, seeds):
    """Widths up to 8 bits, zero points at the ends, scales far from each other."""
    chosen = 0
    for seed in range(seeds):
        plan = random_case(seed, "w8a8", rule).plan
        if frozen.form_of(plan).saturated:
            chosen += 1
            check(host, plan, seed)
    assert chosen > seeds / 6


def calibrated(config):
    return calibrated_gru(6, 9, config, data=(6, 4))


@pytest.mark.parametrize("fused", [(), ("op.rRh", "op.old_contrib", "op.new_contrib")], ids=str)
def test_what_calibration_gives_is_saturated(host, fused):
    config = QuantConfig.int8()
    for name in fused:
        config = config.replace(name, bitwidth=None)
    plan = calibrated(config)._plan().cells[0][0]
    assert frozen.form_of(plan).saturated
    check(host, plan, 1)


def test_other_plans_are_not():
    int8 = QuantConfig.int8()
    for config in (
        int8.replace_globals(scale_kind="free"),
        int8.replace("gate.r_pre", bitwidth=9),
        int8.replace("op.old_contrib", bitwidth=10),
        int8.replace("matmul.Rh", bitwidth=12),
        QuantConfig.w8a16(),
    ):
        plan = calibrated(config)._plan().cells[0][0]
        assert not frozen.form_of(plan).saturated


def test_sums_of_too_many_bits_are_not_saturated():
    """A projection in steps far below those of its sum: 256 of these would leave 24 bits."""
    gru = calibrated(QuantConfig.int8())
    sum_scale = gru._plan().cells[0][0].frozen.quantizers["gate.z_pre"].scale
    for below, expected in ((13, True), (16, False)):
        gru.adjust_quant_config("Rh", exp2_inv=below - round(math.log2(sum_scale)))
        plan = gru._plan().cells[0][0]
        assert (frozen.frozen_numbers(plan.frozen).native.saturated() is not None) == expected
