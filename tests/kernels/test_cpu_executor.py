"""The native executor against the reference: every code equal, over hundreds of random plans."""

import pytest
import torch
from native_runs import NATIVE, check
from random_plans import random_case

from kept import calibrated_gru
from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer import cell as reference
from quant_gru.kernels import _native, dispatch
from quant_gru.kernels.cpu import executor
from sweeps import batches

# Faults of one kind of arithmetic, of ties of one sign or of one limit show in the first 25 plans.
SWEEP = dict.fromkeys(("w8a8", "w8a16", "w16a16", "mixed", "wide", "few"), 50)
BATCH = 25


@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize(("kind", "first", "end"), batches(SWEEP, BATCH))
def test_random_plans(kind, first, end):
    for seed in range(first, end):
        case = random_case(seed, kind)
        check(case.plan, case.x, case.h0, case.lengths, case.reverse, [1 + seed % 2], seed)


@pytest.mark.parametrize("kind", SWEEP)
def test_scales_apart(kind):
    """Scales that do not fit the values: nearly all codes of an operator are its limits or zero."""
    for seed in range(12):
        case = random_case(seed, kind, ROUNDINGS[seed % len(ROUNDINGS)], apart=True)
        check(case.plan, case.x, case.h0, case.lengths, case.reverse, name=seed)


def quantized(config, C, H, **options):
    return calibrated_gru(C, H, config, data=(6, 4), seed=None, **options)


@pytest.mark.parametrize("config", ["int8", "w8a16"])
def test_threads_and_many_rows(config):
    """More rows than a pass takes, long enough for threads to start."""
    gru = quantized(getattr(QuantConfig, config)(), 40, 72)
    plan = gru._plan().cells[0][0]
    x = torch.randint(plan.x.lo, plan.x.hi + 1, (60, 37, 40)).to(plan.x.container)
    h0 = torch.randint(plan.h.lo, plan.h.hi + 1, (37, 72)).to(plan.h.container)
    lengths = torch.randint(1, 61, (37,))
    check(plan, x, h0, lengths, True, (1, 2, 5))


@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize("kind", SWEEP)
def test_rows_are_divided_among_threads(kind):
    for seed in range(8):
        case = random_case(seed, kind)
        N = case.x.shape[1]
        before = _native.threads_started()
        for threads in (1, 2, 5):
            executor.run(case.plan, case.x, case.h0, None, False, NATIVE[0], threads)
        assert _native.threads_started() - before == min(N, 2) + min(N, 5) - 2


def test_accumulators_beyond_32_bits():
    """Large 16-bit products over many features leave int32, and are summed in 64 bits."""
    gru = QuantGRU(700, 24, config=QuantConfig.int16()).eval()
    with torch.no_grad():
        gru.weight_ih_l0.fill_(0.5)
        gru.weight_ih_l0[::2] = -0.5
    gru.calibrate(torch.randn(3, 4, 700))
    gru.finalize_calibration()
    plan = gru._plan().cells[0][0]
    for fill in (plan.x.lo, plan.x.hi):
        x = torch.full((2, 3, 700), fill, dtype=plan.x.container)
        h0 = torch.full((3, 24), plan.h.hi, dtype=plan.h.container)
        check(plan, x, h0)


def test_empty_batch():
    plan = quantized(QuantConfig.int8(), 3, 4)._plan().cells[0][0]
    out, last = executor.run(plan, torch.zeros(5, 0, 3), torch.zeros(0, 4), None, False, NATIVE[0])
    assert out.shape == (5, 0, 4)
    assert last.shape == (0, 4)


def test_strided_and_wider_codes_are_taken():
    plan = quantized(QuantConfig.int8(), 3, 4)._plan().cells[0][0]
    x = torch.randint(-128, 128, (2, 5, 3)).transpose(0, 1)
    h0 = torch.zeros(2, 4, dtype=torch.int64)
    check(plan, x, h0)


def test_changed_weights_are_packed_again():
    gru = quantized(QuantConfig.int8(), 5, 6)
    x = torch.randn(4, 2, 5)
    for _ in range(3):
        with torch.no_grad():
            gru.weight_hh_l0.mul_(1.5)
            y = gru(x)[0]
        plan = gru._plan().cells[0][0]
        codes = reference.run(plan, plan.x.quantize(x), plan.h.quantize(torch.zeros(2, 6)))[0]
        assert torch.equal(y, plan.h.dequantize(codes))


def test_adjusted_scales_are_packed_again():
    gru = quantized(QuantConfig.int8(), 5, 6)
    x = torch.randn(4, 2, 5)
    with torch.no_grad():
        before = gru(x)[0]
        gru.adjust_quant_config("g_pre", exp2_inv=2)
        after = gru(x)[0]
    assert not torch.equal(before, after)


@pytest.mark.parametrize("choice", executor.choices())
def test_environment_chooses(monkeypatch, choice):
    gru = quantized(QuantConfig.int8(), 5, 6, num_layers=2, bidirectional=True)
    x = torch.randn(7, 3, 5)
    expected = gru(x)[0]
    monkeypatch.setenv(executor.VARIABLE, choice)
    assert choice in dispatch.executor_name("cpu")
    assert torch.equal(gru(x)[0], expected)


def test_environment_is_checked(monkeypatch):
    monkeypatch.setenv(executor.VARIABLE, "avx1024")
    with pytest.raises(QuantGRUError, match=r"QUANT_GRU_CPU.*portable.*'avx1024'"):
        quantized(QuantConfig.int8(), 5, 6)(torch.randn(2, 3, 5))


def test_which_kernel_is_used():
    """A plan must not fall behind: 8-bit weights run fused, in float32 up to 8-bit activations, and
    up to 16 bits where scales are powers of two and lanes can shift by counts of their own."""
    w4 = QuantConfig.uniform(12, False).replace("W", bitwidth=4).replace("R", bitwidth=4)
    pwl = QuantConfig.int8().replace_globals(activation="pwl")
    expected = {
        "8": (QuantConfig.int8(), "fused, float32"),
        "8 free": (QuantConfig.int8().replace_globals(scale_kind="free"), "fused, float32"),
        "8 pwl": (pwl, "fused, float32"),
        "w8a16": (QuantConfig.w8a16(), "fused, {shifts}"),
        "w8a16 free": (QuantConfig.w8a16().replace_globals(scale_kind="free"), "fused, float64"),
        "w4a12": (w4, "fused"),
        "16": (QuantConfig.int16(), "general, float64"),
        "24": (QuantConfig.uniform(24, False), "wide"),
    }
    for name, (config, kind) in expected.items():
        plan = quantized(config, 16, 16)._plan().cells[0][0]
        for variant in NATIVE:
            can_shift = variant.startswith(("amx", "avx"))
            beginning = kind.format(shifts="float32, powers of two" if can_shift else "float64")
            assert executor.layer_of(plan, variant).kind.startswith(beginning), (name, variant)


SHAPES = [
    (1, 1, 1, 1),
    (2, 1, 40, 64),
    (18, 1, 40, 64),
    (7, 1, 7, 50),
    (9, 3, 65, 130),
    (3, 30, 7, 100),
    (40, 25, 130, 70),
    (8, 8, 3, 9),
    (8, 37, 33, 40),
    (9, 74, 4, 17),
    (8, 9, 4, 310),
]


# Each shape with both widths of codes, and with both kinds of scales.
@pytest.mark.parametrize(
    ("config", "kind", "T", "N", "C", "H"),
    [
        (config, kinds[i % 2], *shape)
        for i, shape in enumerate(SHAPES)
        for config, kinds in (("int8", ("pot", "free")), ("w8a16", ("free", "pot")))
    ],
)
def test_blocks_of_all_sizes(config, kind, T, N, C, H):
    """Units and rows that fill several blocks, and those that are left over."""
    config = getattr(QuantConfig, config)().replace_globals(scale_kind=kind)
    plan = quantized(config, C, H)._plan().cells[0][0]
    x = torch.randint(plan.x.lo, plan.x.hi + 1, (T, N, C)).to(plan.x.container)
    h0 = torch.randint(plan.h.lo, plan.h.hi + 1, (N, H)).to(plan.h.container)
    check(plan, x, h0)


@pytest.mark.parametrize("config", ["int8", "w8a16"])
@pytest.mark.parametrize("reverse", [False, True])
def test_one_row_of_many_steps(config, reverse):
    """A row whose steps are projected ahead, in blocks that are full or not, up to its length."""
    plan = quantized(getattr(QuantConfig, config)(), 17, 70)._plan().cells[0][0]
    for T in (4, 5, 8, 9, 14):
        x = torch.randint(plan.x.lo, plan.x.hi + 1, (T, 1, 17)).to(plan.x.container)
        h0 = torch.randint(plan.h.lo, plan.h.hi + 1, (1, 70)).to(plan.h.container)
        for lengths in (None, torch.tensor([T - 2])):
            check(plan, x, h0, lengths, reverse)


def test_one_far_from_the_width():
    """1 - z times g leaves float32 where the scale of z is set by hand."""
    gru = quantized(QuantConfig.int8(), 8, 16)
    gru.adjust_quant_config("z_out", bitwidth=4, exp2_inv=29)
    gru.adjust_quant_config("new_contrib", exp2_inv=6)
    plan = gru._plan().cells[0][0]
    x = torch.randint(-128, 128, (20, 8, 8))
    h0 = torch.randint(-128, 128, (8, 16))
    check(plan, x, h0)


def test_multipliers_that_no_rounded_double_can_be_scaled_by():
    """Rh of 2 bits beside Wx of 16: 1.5 * 2^52 times the larger multiplier is not a double."""
    config = QuantConfig.w8a16().replace_globals(scale_kind="free").replace("Rh", bitwidth=2)
    gru = quantized(config, 8, 16)
    s_pre = 4.524002724792808e-05
    seen = 0
    for step in range(24):
        for each in ("z_pre", "r_pre", "g_pre"):
            gru.adjust_quant_config(each, scale=s_pre)
        gru.adjust_quant_config("Rh", scale=s_pre * 2.0 ** (30 + step / 5))
        plan = gru._plan().cells[0][0]
        sums = [s for s in plan.frozen.sums.values() if len(s.multipliers) > 1]
        odd = any(M & 1 and M >= 1 << 51 for s in sums for M in s.multipliers)
        seen += odd and all(s.tier != "d" for s in sums)
        x = torch.randint(plan.x.lo, plan.x.hi + 1, (5, 8, 8))
        h0 = torch.randint(plan.h.lo, plan.h.hi + 1, (8, 16))
        check(plan, x, h0)
    assert seen


@pytest.mark.parametrize("frozen", [False, True])
def test_other_devices_are_errors(frozen):
    gru = quantized(QuantConfig.int8(), 3, 4)
    module = (gru.freeze() if frozen else gru).to("meta")
    with pytest.raises(QuantGRUError, match="device"):
        module(torch.randn(2, 3, 3))
    with pytest.raises(QuantGRUError, match="device"):
        module.forward_integer(torch.zeros(2, 3, 3, dtype=torch.int8))


def test_a_default_device_changes_nothing():
    gru = quantized(QuantConfig.int8(), 3, 4)
    x, hx = torch.randn(5, 2, 3), torch.zeros(1, 2, 4)
    with torch.no_grad():
        expected = gru(x, hx)[0]
        with torch.device("meta"):
            assert torch.equal(gru(x, hx)[0], expected)


def test_shapes_are_checked_before_addresses_are_taken():
    plan = quantized(QuantConfig.int8(), 3, 4)._plan().cells[0][0]
    x, h0 = torch.zeros(2, 5, 3), torch.zeros(5, 4)
    for bad in ((x[..., :2], h0, None), (x, h0[:3], None), (x, h0, torch.ones(4))):
        with pytest.raises(QuantGRUError, match="Expected x of 3 features"):
            executor.run(plan, *bad, False, NATIVE[0])


def test_a_frozen_gru_is_packed_once():
    frozen = quantized(QuantConfig.int8(), 3, 4).freeze()
    plans = [frozen._prepared().plan.cells[0][0] for _ in range(2)]
    assert plans[0].weights is plans[1].weights
