"""The CUDA kernels on the host, thread by thread, against the reference: no GPU needed.

All but memory ordering between threads is tested here: layouts, padding, exchange between blocks,
the split of sums, the gate arithmetic and its tables.
"""

import math
from dataclasses import replace

import pytest
import torch
from backward_cases import outputs
from derived import exact_of
from host_machine import COMPILER
from projection_blocks import keep_few_weights
from random_plans import random_case

from kept import kept
from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer import cell as reference
from quant_gru.integer.plan import Seam, _between
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.random import events
from quant_gru.kernels import dispatch
from quant_gru.kernels._native import WeightStationary
from quant_gru.kernels.cuda.boundary import boundary
from quant_gru.kernels.cuda.forward import executor
from quant_gru.kernels.cuda.plan import structure
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.projection.select import POLICY
from quant_gru.kernels.cuda.recurrence import planner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]

# kind, first seed, seeds, blocks, split, spread, rows
SWEEP = [
    ("w8a8", 0, 3, "1,1,1,8"),
    ("w8a8", 3, 2, "2,2,1,8"),
    ("w8a8", 5, 2, "4,1,2,4"),
    ("w8a8", 7, 2, "1,1,1,1"),
    ("w8a8", 9, 3, "2,2,1,16"),
    ("w8a16", 0, 2, "1,1,1,4"),
    ("w8a16", 2, 2, "2,2,1,2"),
    ("w8a16", 4, 2, "2,2,1,16"),
    ("w16a16", 0, 2, "2,1,2,8"),
    ("w16a16", 2, 2, "1,1,1,2"),
    ("mixed", 0, 2, "1,1,1,8"),
    ("wide", 0, 4, None),
]


def same(got, expected):
    return all(
        ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        for ours, theirs in zip(got, expected, strict=True)
    )


@kept
def quantized(config, C, H, **options):
    gru = QuantGRU(C, H, config=config, **options).eval()
    gru.calibrate(torch.randn(12, 4, C))
    gru.finalize_calibration()
    return gru._plan().cells[0]


def codes(quantizer, *shape):
    return torch.randint(quantizer.lo, quantizer.hi + 1, shape).to(quantizer.container)


@pytest.mark.parametrize(("kind", "first", "count", "shape"), SWEEP)
def test_random_plans(host, monkeypatch, kind, first, count, shape):
    if shape:
        monkeypatch.setenv(planner.VARIABLE, shape)
    for seed in range(first, first + count):
        case = random_case(seed, kind)
        expected = reference.run(case.plan, case.x, case.h0, case.lengths, case.reverse)
        got = executor.run(case.plan, case.x, case.h0, case.lengths, case.reverse, machine=host)
        assert same(got, expected), f"seed {seed}"


# Each rule in two kernels, each kernel with two rules or more.
RULES = [rule for rule in ROUNDINGS if rule != "half_even"]
KINDS = ("w8a8", "w8a16", "w16a16", "wide")


@pytest.mark.parametrize(
    ("rule", "kind"),
    [(rule, KINDS[(i + j) % 4]) for i, rule in enumerate(RULES) for j in (0, 1)],
)
def test_rules_of_rounding(host, rule, kind):
    for seed in range(2):
        case = random_case(seed, kind, rule)
        expected = reference.run(case.plan, case.x, case.h0, case.lengths, case.reverse)
        got = executor.run(case.plan, case.x, case.h0, case.lengths, case.reverse, machine=host)
        assert same(got, expected), f"seed {seed}"


@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "w16a16"])
def test_scales_apart(host, kind):
    """Scales that do not fit the values: nearly all codes of an operator are its limits or zero."""
    for seed in range(6):
        case = random_case(seed, kind, apart=True)
        expected = reference.run(case.plan, case.x, case.h0, case.lengths, case.reverse)
        got = executor.run(case.plan, case.x, case.h0, case.lengths, case.reverse, machine=host)
        assert same(got, expected), f"seed {seed}"


def test_results_beside_ties_of_any_multiplier(host, monkeypatch):
    """623 * M is a unit less than half of 2^34. Multipliers of sums are powers of two."""
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,4")
    (plan,) = quantized(QuantConfig.int8().replace_globals(rounding="half_away"), 5, 32)
    part, rows = plan.weights, 96
    assert plan.shift_Br == 0
    Rh = replace(
        part.Rh, multipliers=(torch.full((rows,), 13788017),), shift=torch.full((rows,), 34)
    )
    biases = torch.tensor([-623, 623, -624, 624], dtype=part.Br.dtype).repeat(rows // 4)
    plan = replace(plan, weights=replace(part, R=torch.zeros_like(part.R), Br=biases, Rh=Rh))
    assert numbers_of(plan).form.saturated
    x, h0 = codes(plan.x, 6, 8, 5), codes(plan.h, 8, 32)
    assert same(executor.run(plan, x, h0, machine=host), reference.run(plan, x, h0))


@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
def test_a_product_of_bytes_projects_the_input(host, monkeypatch, config):
    """More rows than the small kernel takes, C and H of no tile, unsigned codes."""
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,8")
    chosen = getattr(QuantConfig, config)()
    for name in ("input.x", "output.h"):
        chosen = chosen.replace(name, is_unsigned=True, is_symmetric=False)
    (plan,) = quantized(chosen, 21, 20)
    x, h0 = codes(plan.x, 6, 13, 21), codes(plan.h, 13, 20)
    lengths = torch.randint(1, 7, (13,))
    host.launched.clear()
    got = executor.run(plan, x, h0, lengths, machine=host)
    projected = ["finish"] if config == "int16" else ["project_bytes"]
    assert [name for name, _ in host.launched] == ["split", *projected, "recurrent"]
    assert same(got, reference.run(plan, x, h0, lengths))


@pytest.mark.parametrize(("bits", "unsigned"), [(7, True), (4, True), (8, True), (7, False)])
def test_bytes_that_need_no_copy(host, bits, unsigned):
    """A multiple of 16 features. Unsigned codes of 7 bits and fewer are in int8, as signed ones."""
    chosen = QuantConfig.int8().replace(
        "input.x", bitwidth=bits, is_unsigned=unsigned, is_symmetric=False
    )
    (plan,) = quantized(chosen, 32, 20)
    assert plan.x.container == (torch.uint8 if bits == 8 else torch.int8)
    x, h0 = codes(plan.x, 3, 64, 32), codes(plan.h, 64, 20)
    host.launched.clear()
    got = executor.run(plan, x, h0, machine=host)
    first = ["split"] if unsigned else []
    assert [name for name, _ in host.launched] == [*first, "project_bytes", "recurrent"]
    assert same(got, reference.run(plan, x, h0))


@pytest.mark.parametrize("config", ["int8", "w8a16"])
def test_many_rows_pass_by_weights_that_stay(host, monkeypatch, config):
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,8")
    keep_few_weights(monkeypatch, WeightStationary(1, 2, 2, 3, 1))
    (plan,) = quantized(getattr(QuantConfig, config)(), 21, 20)
    x, h0 = codes(plan.x, 9, 16, 21), codes(plan.h, 16, 20)
    host.launched.clear()
    got = executor.run(plan, x, h0, machine=host)
    assert [name for name, _ in host.launched] == ["split", "project_passing", "recurrent"]
    assert same(got, reference.run(plan, x, h0))


def test_both_directions_share_a_launch(host, monkeypatch):
    monkeypatch.setenv(planner.VARIABLE, "2,1,1,4")
    plans = quantized(QuantConfig.int8(), 5, 32, bidirectional=True)
    x = codes(plans[0].x, 5, 6, 5)
    h0 = codes(plans[0].h, 6, 32)
    directions = [executor.Direction(plan, h0, bool(i)) for i, plan in enumerate(plans)]
    host.launched.clear()
    got = executor.run_directions(directions, x, machine=host)
    assert [name for name, _ in host.launched].count("recurrent") == 1
    for i, plan in enumerate(plans):
        assert same(got[i], reference.run(plan, x, h0, None, bool(i)))


@pytest.mark.filterwarnings("ignore:Expected biases")
def test_accumulators_that_float32_does_not_hold(host, monkeypatch):
    """Large biases send the kernels through doubles."""
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,8")
    gru = QuantGRU(3, 16, config=QuantConfig.int8()).eval()
    with torch.no_grad():
        gru.weight_hh_l0.mul_(1e-4)
        gru.bias_hh_l0.uniform_(-3, 3)
        gru.weight_ih_l0.mul_(1e-4)
        gru.bias_ih_l0.uniform_(-3, 3)
    gru.calibrate(torch.randn(12, 4, 3))
    gru.finalize_calibration()
    plan = gru._plan().cells[0][0]
    numbers = numbers_of(plan)
    assert numbers.form.real == "float"
    assert exact_of(plan, host) == [[0, 0], [0, 0]]
    x, h0 = codes(plan.x, 9, 8, 3), codes(plan.h, 8, 16)
    assert same(executor.run(plan, x, h0, machine=host), reference.run(plan, x, h0))


@pytest.mark.filterwarnings("ignore:Expected biases")
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("shape", ["1,1,1,8", "2,2,1,8", "1,1,1,1", "2,2,1,16", "2,2,1,4"])
def test_codes_of_16_bits_in_float32(host, monkeypatch, shape, fits):
    """Extreme states and inputs; where int32 does not hold accumulators, through doubles."""
    monkeypatch.setenv(planner.VARIABLE, shape)
    gru = QuantGRU(7, 33, config=QuantConfig.w8a16()).eval()
    if not fits:
        with torch.no_grad():
            gru.weight_hh_l0.mul_(1e-7)
            gru.bias_hh_l0.uniform_(-3, 3)
    gru.calibrate(torch.randn(20, 8, 7) * 3)
    gru.finalize_calibration()
    plan = gru._plan().cells[0][0]
    numbers = numbers_of(plan)
    assert numbers.form.in_int32
    assert set(numbers.form.recurrence.tables) == {structure.COMPRESSED}
    assert exact_of(plan, host)[1] == [fits] * 2
    x, h0 = codes(plan.x, 6, 11, 7), codes(plan.h, 11, 33)
    h0[:2], x[:, 2] = plan.h.hi, plan.x.lo
    lengths = torch.randint(1, 7, (11,))
    got = executor.run(plan, x, h0, lengths, machine=host)
    assert host.launched[-1][1]["QG_POT"] == 1
    assert same(got, reference.run(plan, x, h0, lengths))


@pytest.mark.parametrize(
    ("config", "bits", "real"),
    [("int8", 12, "float"), ("int8", 16, "double"), ("w8a16", 8, "double")],
)
def test_gate_sums_beyond_the_magic_number(host, monkeypatch, config, bits, real):
    """Negative sums that float32 holds, but whose bits are no ordered integers."""
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,8")
    gru = QuantGRU(5, 16, config=getattr(QuantConfig, config)()).eval()
    gru.calibrate(torch.randn(20, 8, 5))
    gru.finalize_calibration()
    scale = gru.get_quant_config("Wx")["scale"]
    for gate in ("z_pre", "r_pre", "g_pre"):  # in steps far below those of W x
        gru.adjust_quant_config(gate, exp2_inv=bits - round(math.log2(scale)))
    plan = gru._plan().cells[0][0]
    assert numbers_of(plan).form.real == real
    x, h0 = codes(plan.x, 6, 11, 5), codes(plan.h, 11, 16)
    x[:2], x[2:4] = plan.x.lo, plan.x.hi
    assert same(executor.run(plan, x, h0, machine=host), reference.run(plan, x, h0))


def test_int32_holds_sums_of_halves_alone(host, monkeypatch):
    """Rows of large weights of one sign, and states that are extreme, too."""
    monkeypatch.setenv(planner.VARIABLE, "16,2,1,8")
    H = 520
    gru = QuantGRU(3, H, config=QuantConfig.w8a16()).eval()
    with torch.no_grad():
        signs = torch.randint(0, 2, (3 * H, 1)) * 2.0 - 1
        gru.weight_hh_l0.copy_(signs * torch.empty(3 * H, H).uniform_(0.0300, 0.0312))
    gru.calibrate(torch.randn(2, 2, 3))
    gru.finalize_calibration()
    plan = gru._plan().cells[0][0]
    assert exact_of(plan, host)[1] == [0, 1]
    x, h0 = codes(plan.x, 2, 5, 3), codes(plan.h, 5, H)
    h0[0], h0[1], h0[2, 256:], h0[3, :256] = plan.h.hi, plan.h.lo, plan.h.lo, plan.h.hi
    assert same(executor.run(plan, x, h0, machine=host), reference.run(plan, x, h0))


@pytest.mark.parametrize(
    ("config", "shape", "H"),
    [("int8", "4,1,1,4", 460), ("w8a16", "8,1,1,8", 510), ("w8a16", "16,2,1,16", 1020)],
)
def test_weights_that_leave_few_registers(host, monkeypatch, config, shape, H):
    """Products of no gate come late, those of high bytes before those of low ones; biases and
    multipliers are read at every step."""
    monkeypatch.setenv(planner.VARIABLE, shape)
    (plan,) = quantized(getattr(QuantConfig, config)(), 3, H)
    x, h0 = codes(plan.x, 3, 9, 3), codes(plan.h, 9, H)
    got = executor.run(plan, x, h0, machine=host)
    assert (host.launched[-1][1]["LATE"], host.launched[-1][1]["TIGHT"]) == (0, 1)
    assert host.launched[-1][1]["BULK"] == (H > 460)
    assert same(got, reference.run(plan, x, h0))


@pytest.mark.parametrize(
    ("config", "shape"), [("int8", "2,1,1,8"), ("w8a16", "2,2,1,16"), ("w8a16", "2,1,1,1")]
)
def test_states_go_in_one_piece(host, monkeypatch, config, shape):
    monkeypatch.setenv(planner.VARIABLE, shape)
    (plan,) = quantized(getattr(QuantConfig, config)(), 3, 101)
    x, h0 = codes(plan.x, 6, 19, 3), codes(plan.h, 19, 101)
    lengths = torch.randint(1, 7, (19,))
    got = executor.run(plan, x, h0, lengths, machine=host)
    assert host.launched[-1][1]["BULK"] == 1
    assert same(got, reference.run(plan, x, h0, lengths))


def test_lines_in_doubles(host, monkeypatch):
    monkeypatch.setenv(planner.VARIABLE, "2,1,2,8")
    config = QuantConfig.int16().replace_globals(scale_kind="free")
    (plan,) = quantized(config, 7, 33)
    form = numbers_of(plan).form
    assert form.recurrence.real == "double"
    assert set(form.recurrence.tables) == {structure.COMPRESSED}
    x, h0 = codes(plan.x, 6, 11, 7), codes(plan.h, 11, 33)
    assert same(executor.run(plan, x, h0, machine=host), reference.run(plan, x, h0))


@pytest.mark.parametrize("kind", ["w8a8", "w8a16", "w16a16"])
def test_weights_that_fit_no_registers(host, monkeypatch, kind):
    monkeypatch.setattr(POLICY, "by_steps", True)
    for seed in range(2):
        case = random_case(seed, kind)
        host.launched.clear()
        got = executor.run(case.plan, case.x, case.h0, case.lengths, case.reverse, machine=host)
        assert host.launched[-1][0] == "step"
        expected = reference.run(case.plan, case.x, case.h0, case.lengths, case.reverse)
        assert same(got, expected), f"seed {seed}"


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("w8a8", "2,2,1,16"),
        ("w8a16", "2,2,1,16"),
        ("w8a8", "1,1,2,4"),
        ("w16a16", None),
        ("wide", None),
    ],
)
def test_units_that_keep_their_state(host, monkeypatch, kind, shape):
    if shape:
        monkeypatch.setenv(planner.VARIABLE, shape)
    else:
        monkeypatch.setattr(POLICY, "by_steps", True)
    for seed in range(2):
        case = random_case(seed, kind)
        held = torch.rand(*case.x.shape[:2], case.plan.hidden_size) < 0.4
        inputs = (case.plan, case.x, case.h0, case.lengths, case.reverse)
        out, last = executor.run(*inputs, machine=host, held=held)
        assert torch.equal(out, outputs(*inputs, held)), f"seed {seed}"
        assert torch.equal(last, out[0 if case.reverse else -1])


@pytest.mark.parametrize(
    ("config", "shape", "p"), [("int8", "2,2,1,8", 0.5), ("w8a16", "1,1,2,4", 0.13)]
)
def test_zoneout_in_every_kernel(host, monkeypatch, config, shape, p):
    """Interpolated states, by the persistent kernel, step by step, and in 128-bit integers."""
    (plan,) = quantized(getattr(QuantConfig, config)(), 5, 32, zoneout=p)
    x, h0 = codes(plan.x, 5, 9, 5), codes(plan.h, 9, 32)
    lengths = torch.randint(1, 6, (9,))
    held = torch.rand(5, 9, 32) < 0.4
    monkeypatch.setenv(planner.VARIABLE, shape)
    for stay in (None, held):
        got = executor.run(plan, x, h0, lengths, True, machine=host, held=stay)
        assert same(got, reference.run(plan, x, h0, lengths, True, stay))


@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        (QuantConfig.int8(), "step"),
        (QuantConfig.w8a16(), "step"),
        (QuantConfig.uniform(24, False), "generic"),
    ],
    ids=["int8", "w8a16", "24 bits"],
)
def test_zoneout_where_weights_do_not_fit_registers(host, monkeypatch, config, kernel):
    monkeypatch.setattr(POLICY, "by_steps", True)
    (plan,) = quantized(config, 5, 32, zoneout=0.13)
    x, h0 = codes(plan.x, 5, 9, 5), codes(plan.h, 9, 32)
    lengths, held = torch.randint(1, 6, (9,)), torch.rand(5, 9, 32) < 0.4
    host.launched.clear()
    for stay in (None, held):
        got = executor.run(plan, x, h0, lengths, True, machine=host, held=stay)
        assert same(got, reference.run(plan, x, h0, lengths, True, stay))
    assert kernel in {function for function, _ in host.launched}


def test_no_steps_and_no_rows(host):
    (plan,) = quantized(QuantConfig.int8(), 3, 4)
    h0 = codes(plan.h, 2, 4)
    out, last = executor.run(plan, torch.zeros(0, 2, 3), h0, machine=host)
    assert out.shape == (0, 2, 4)
    assert torch.equal(last, h0)
    out, last = executor.run(plan, torch.zeros(5, 0, 3), torch.zeros(0, 4), machine=host)
    assert out.shape == (5, 0, 4)
    assert last.shape == (0, 4)


def test_shapes_are_checked(host):
    (plan,) = quantized(QuantConfig.int8(), 3, 4)
    x, h0 = torch.zeros(2, 5, 3), torch.zeros(5, 4)
    for bad in ((x[..., :2], h0, None), (x, h0[:3], None), (x, h0, torch.ones(4))):
        with pytest.raises(QuantGRUError, match="Expected x of 3 features"):
            executor.run(plan, *bad, machine=host)


def test_numbers_are_packed_once_and_again_when_weights_change(host, monkeypatch):
    monkeypatch.setenv(planner.VARIABLE, "1,1,1,1")
    gru = QuantGRU(3, 16, config=QuantConfig.int8()).eval()
    gru.calibrate(torch.randn(12, 4, 3))
    gru.finalize_calibration()
    gru.use_quantization = True
    found = []
    for _ in range(2):
        with torch.no_grad():
            plan = gru._plan().cells[0][0]
        x, h0 = codes(plan.x, 2, 1, 3), codes(plan.h, 1, 16)
        assert same(executor.run(plan, x, h0, machine=host), reference.run(plan, x, h0))
        assert numbers_of(plan) is numbers_of(plan)
        found.append(numbers_of(plan))
        with torch.no_grad():
            gru.weight_hh_l0.mul_(1.5)
    assert found[0] is not found[1]
    assert found[0].frozen is found[1].frozen


@pytest.mark.parametrize(
    "quantizer",
    [
        Quantizer(8, True, 2.0**-5, 3),
        Quantizer(8, False, 2.0**-7, 200),
        Quantizer(16, False, 2.0**-12, 40000),
        Quantizer(13, True, float(torch.tensor(0.001)), -7),
    ],
    ids=lambda q: f"{q.bits} bits",
)
def test_border(host, quantizer):
    """Ties, infinities and NaN; rows with NaN are said, and become NaN again."""
    x = torch.randn(5, 3, 70) * 4
    x[2] = (torch.randint(-300, 300, (3, 70)) + 0.5) * quantizer.scale
    x[0, 0, 0], x[0, 1, 3], x[1, 2, 5] = torch.inf, -torch.inf, torch.nan
    codes_, nan = boundary.quantize(quantizer, x, host)
    assert codes_.dtype == quantizer.container
    assert torch.equal(codes_.to(torch.int64), quantizer.quantize(x))
    assert torch.equal(nan, x.isnan().any(-1))
    real = quantizer.dequantize(codes_)
    assert torch.equal(boundary.dequantize(quantizer, codes_, None, host), real)
    masked = boundary.dequantize(quantizer, codes_, nan, host)
    assert torch.equal(masked.isnan().any(-1), nan)
    assert torch.equal(masked[~nan], real[~nan])
    assert boundary.quantize(quantizer, x[:0], host)[0].shape == (0, 3, 70)


@pytest.mark.parametrize("bits", [8, 16])
def test_mask(host, bits):
    """Zeros where codes were clamped, at the limits, too; NaN stays; any order of rows."""
    quantizer = Quantizer(bits, True, 2.0 ** (3 - bits), 5)
    x = torch.randn(3, 5, 70).transpose(0, 1) * 4
    x[0] = (torch.arange(-105, 105).reshape(3, 70) * 0.5 + quantizer.hi - 5) * quantizer.scale
    x[1, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    grad = torch.randn(5, 3, 70)
    grad[2, 1, :4] = torch.nan
    expected = grad * quantizer.inside(x)
    assert 0.1 < (expected == 0).float().mean() < 0.9
    boundary.mask(quantizer, x, grad, host)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("directions", [1, 2])
def test_requantize(host, bits, directions):
    """From layer to layer as the definition has it, and gradients 0 where codes were clamped."""
    below = [Quantizer(bits, d == 0, 2.0 ** (1 - bits), 7 * d) for d in range(directions)]
    above = Quantizer(bits, False, 2.0**-bits, 1 << bits - 1)
    seam = Seam([_between(q, above) for q in below], below, above)
    states = [torch.randint(q.lo, q.hi + 1, (4, 3, 70)).to(q.container) for q in below]
    expected = dispatch.Executor().requantize(seam, states)
    got = boundary.requantize(seam, states, machine=host)
    assert got.dtype == above.container
    assert got.shape == (4, 3, 70 * directions)
    assert torch.equal(got, expected)
    grad = torch.randn(got.shape)
    grad[1, 2, :5] = torch.nan
    masked = dispatch.Executor().masked_requantized(seam, states, grad.clone())
    assert 0.1 < (masked == 0).float().mean() < 0.9
    boundary.requantize(seam, states, grad, host)
    torch.testing.assert_close(grad, masked, rtol=0, atol=0, equal_nan=True)
    none = [each[:0] for each in states]
    assert boundary.requantize(seam, none, machine=host).shape == (0, 3, 70 * directions)


def test_events(host):
    seed, shape = torch.tensor(-1234567890123456789), (3, 5, 300)
    found = boundary.events(seed, 0.3, shape, 7, host)
    assert torch.equal(found, events(seed, 0.3, shape, 7))
    assert boundary.events(seed, 1.0, shape, 7, host).all()
    assert boundary.events(seed, 0.5, (0, 5, 300), 7, host).shape == (0, 5, 300)
