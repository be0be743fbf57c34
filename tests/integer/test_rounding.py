"""Every rule of rounding against Python integers and fractions."""

import math
import random
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kept import kept
from quant_gru import ConfigError, QuantConfig, QuantGRU, QuantGRUError
from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer import cell as reference
from quant_gru.integer.qparams import make_qparams
from quant_gru.integer.quantizer import Quantizer, rounded
from quant_gru.integer.tables import build_table, float_table
from quant_gru.integer.weighted_sum import WeightedSum
from sweeps import first_of

SINGLE = [rule for rule in ROUNDINGS if rule != "double"]


def once(value, rule):
    """A fraction rounded by a rule of one step."""
    below = math.floor(value)
    rest = value - below
    if rule == "floor" or rest < Fraction(1, 2):
        return below
    if rest > Fraction(1, 2) or rule == "half_up":
        return below + 1
    even = below + below % 2
    return even if rule == "half_even" else below + (value > 0)


def by_rule(total, k, rule, multipliers):
    """total / 2^k by a rule, as docs/arithmetic.md defines it."""
    value = Fraction(total) / Fraction(2) ** k
    if rule != "double":
        return once(value, rule)
    if k <= 0:
        return int(value)
    bits = max(multipliers).bit_length()
    first = min(bits, k)
    step = once(Fraction(total, 1 << first), "half_up")
    return once(Fraction(step, 1 << (k - first)), "half_away")


def two_steps(v, M, exponent):
    """v * M * 2^exponent / 2^31 as 32-bit integers do it: a doubling high multiply, then a shift.

    M has 31 bits; a positive exponent shifts the operand first.
    """
    operand = v << max(exponent, 0)
    product = operand * M
    high = (product + (1 << 30)) >> 31
    right = max(-exponent, 0)
    if not right:
        return high
    mask = (1 << right) - 1
    threshold = (mask >> 1) + (high < 0)
    return (high >> right) + ((high & mask) > threshold)


sums = st.tuples(
    st.lists(st.integers(-(2**30), 2**30), min_size=1, max_size=3),
    st.lists(st.integers(0, 2**24 - 1), min_size=3, max_size=3),
    st.integers(-20, 70),
)


@pytest.mark.parametrize("tier", ["d", "e"])
@pytest.mark.parametrize("rule", ROUNDINGS)
@given(sums)
@example(([1, -3], [1 << 20, 1 << 20, 0], 22))
@example(([-1], [1, 0, 0], 1))
def test_sums(tier, rule, numbers):
    terms, multipliers, k = numbers
    multipliers = multipliers[: len(terms)]
    if not any(multipliers):
        multipliers[0] = 1
    lo, hi = -(2**31), 2**31 - 1
    s = WeightedSum(tuple(multipliers), k, 3, lo, hi, tier, rule)
    total = sum(v * M for v, M in zip(terms, multipliers, strict=True))
    expected = min(max(by_rule(total, k, rule, multipliers) + 3, lo), hi)
    assert s(*[torch.tensor([v]) for v in terms]).tolist() == [expected]


@pytest.mark.parametrize("rule", ROUNDINGS)
@given(st.integers(1, 40), st.integers(-1000, 1000), st.sampled_from([1, 3, 5, 1 << 15]))
def test_ties(rule, k, quotient, M):
    """Sums of M * v that are ties, and their neighbours."""
    totals = [(2 * quotient + 1 << k - 1) + d for d in (-1, 0, 1)]
    s = WeightedSum((1, M), k, 0, -(2**31), 2**31 - 1, "d", rule)
    terms = torch.tensor(totals), torch.zeros(3, dtype=torch.int64)
    assert s(*terms).tolist() == [by_rule(total, k, rule, (1, M)) for total in totals]


@given(st.integers(-(2**31), 2**31 - 1), st.integers(2**30, 2**31 - 1), st.integers(-31, 0))
@example(-3 << 20, 1 << 30, -5)
@example(6, 1 << 30, -1)
def test_double_is_that_of_fixed_point_multipliers(v, M, exponent):
    """A multiplier of 24 bits, as ours are, in the 31 bits of a doubling high multiply."""
    M = M >> 7 << 7
    ours = WeightedSum((M >> 7,), 24 - exponent, 0, -(2**31), 2**31 - 1, "d", "double")
    assert ours(torch.tensor([v])).tolist() == [two_steps(v, M, exponent)]


@given(st.integers(-(2**34), 2**34), st.integers(2**15, 2**16 - 2), st.integers(-20, 0))
@example(1 << 16, 1 << 15, 0)
def test_half_up_is_that_of_16x8_kernels(v, M, exponent):
    """Those of a 64-bit bias: a multiplier of 31 bits is rounded to 15, and the sum once."""
    of_15_bits = ((M << 15) + (1 << 15)) >> 16
    shift = 15 - exponent
    theirs = (v * of_15_bits + (1 << (shift - 1))) >> shift
    lo, hi = -(2**31), 2**31 - 1
    ours = WeightedSum((M + M % 2,), 16 - exponent, 0, lo, hi, "d", "half_up")
    assert int(ours(torch.tensor(v))) == max(lo, min(hi, theirs))


def test_rows_have_their_own_first_step():
    M, k = torch.tensor([3 << 22, 1 << 23, 5]), torch.tensor([30, 24, 5])
    v = torch.arange(-2000, 2000)[:, None] * 37 + torch.tensor([0, 1, 2])
    for rule in ROUNDINGS:
        got = WeightedSum((M,), k, 0, -(2**31), 2**31 - 1, "d", rule)(v)
        for column in range(3):
            m, shift = int(M[column]), int(k[column])
            expected = [by_rule(int(each) * m, shift, rule, (m,)) for each in v[:, column]]
            assert got[:, column].tolist() == expected


def float32s():
    bits = st.integers(0, 2**32 - 1)
    return bits.map(lambda b: struct.unpack("<f", struct.pack("<I", b))[0])


@pytest.mark.parametrize("rule", SINGLE)
@given(st.one_of(float32s(), st.integers(-9, 9).map(lambda n: n / 2), st.floats(-3, 3, width=32)))
@example(0.49999997)
@example(-0.49999997)
@example(-0.50000006)
@example(8388607.5)
@example(float("inf"))
@example(float("-inf"))
def test_real_values(rule, y):
    got = rounded(torch.tensor([y]), rule).item()
    if math.isnan(y) or math.isinf(y):
        assert math.isnan(got) if math.isnan(y) else got == y
    else:
        assert got == once(Fraction(y), rule)


@pytest.mark.parametrize("rule", SINGLE)
@pytest.mark.parametrize("bits", [8, 32])
def test_quantizer(rule, bits):
    q = Quantizer(bits, True, 0.5, -7, rounding=rule)
    real = torch.arange(-999, 999) / 8
    expected = [min(max(once(Fraction(2 * each), rule) - 7, q.lo), q.hi) for each in real.tolist()]
    assert q.quantize(real).tolist() == expected
    inside = [q.lo <= once(Fraction(2 * each), rule) - 7 <= q.hi for each in real.tolist()]
    assert q.inside(real).tolist() == inside


@pytest.mark.parametrize("rule", ROUNDINGS)
@pytest.mark.parametrize(
    ("activation", "bits"), first_of([("pwl", 8), ("quadratic", 12), ("exact", 16)], 2)
)
@pytest.mark.parametrize("function", ["sigmoid", "tanh"])
def test_tables(rule, activation, bits, function):
    """All codes: the polynomials are read by the rule, and stay as near to the function."""
    pre = Quantizer(bits, True, 16.0 * 2.0**-bits)
    tanh = function == "tanh"
    out = Quantizer(bits, tanh, 2.0 ** (1 - bits) if tanh else 2.0**-bits, 3)
    table = build_table(function, pre, out, activation, rounding=rule)
    codes = torch.arange(pre.lo, pre.hi + 1)
    bounds, rows = table.bounds.tolist(), table.coefficients.tolist()
    expected = []
    segment = 0
    for code in codes.tolist():
        q = min(max(code, bounds[0]), table.last)
        while segment + 1 < len(bounds) and bounds[segment + 1] <= q:
            segment += 1
        total = sum(c * (q - bounds[segment]) ** power for power, c in enumerate(rows[segment]))
        single = "half_up" if rule == "double" else rule
        y = once(Fraction(total, 1 << table.shift), single) + table.zero_point
        expected.append(min(max(y, table.lo), table.hi))
    found = table(codes)
    assert found.tolist() == expected
    plain = build_table(function, pre, out, activation)
    yardstick = torch.from_numpy(float_table(function, pre, out, codes.numpy()))
    assert (found - yardstick).abs().max() <= (plain(codes) - yardstick).abs().max() + 1
    assert abs((found - plain(codes)).double().mean()) < 0.01


@kept
def calibrated(rule, **fields):
    torch.manual_seed(0)
    config = QuantConfig.int8().replace_globals(rounding=rule, **fields)
    gru = QuantGRU(5, 7, num_layers=2, bidirectional=True, config=config)
    gru.calibrate(torch.randn(9, 4, 5))
    gru.finalize_calibration()
    return gru.eval()


@pytest.mark.parametrize("rule", ROUNDINGS)
def test_the_whole_plan_has_the_rule(rule):
    plan = calibrated(rule)._plan()
    sums = [each for layer in plan.between for halves in layer for each in halves]
    for layer in plan.cells:
        for cell in layer:
            assert cell.frozen.rounding == rule
            sums += [*cell.frozen.sums.values(), cell.weights.Wx, cell.weights.Rh]
            assert {table.rounding for table in cell.frozen.tables.values()} == {rule}
            border = "half_away" if rule == "double" else rule
            assert {cell.border.rounding, cell.x.rounding, cell.h.rounding} == {border}
    assert {each.rounding for each in sums} == {rule}


def test_rules_change_codes_and_nothing_else():
    codes = {rule: calibrated(rule).trace_codes(torch.ones(40, 2, 5)) for rule in ROUNDINGS}
    ends = {rule: tuple(found["output.h_l1"].flatten().tolist()) for rule, found in codes.items()}
    assert len(set(ends.values())) == len(ROUNDINGS)
    for rule in ROUNDINGS:
        assert torch.equal(codes[rule]["weight.W_l0"], codes["half_even"]["weight.W_l0"])


@pytest.mark.parametrize("rule", SINGLE)
def test_input_has_its_own_rule(rule):
    plan = calibrated("half_even", rounding_input=rule)._plan()
    cell = plan.cells[0][0]
    assert cell.frozen.rounding == "half_even"
    assert {cell.border.rounding, cell.h.rounding} == {rule}


def test_bad_rules():
    with pytest.raises(ConfigError, match=r"Expected rounding to be 'half_even', .*got 'nearest'"):
        QuantConfig(rounding="nearest")
    with pytest.raises(ConfigError, match=r"Expected rounding_input to be .*got 'double'"):
        QuantConfig(rounding_input="double")


def test_tables_of_another_rule_are_refused():
    qparams = calibrated("half_even")._state.cells[0]
    config = qparams.config.replace_globals(rounding="floor")
    with pytest.raises(QuantGRUError, match="Expected a table of rounding 'floor'"):
        make_qparams(config, qparams.quantizers, tables=qparams.tables)


@pytest.mark.parametrize("rule", ROUNDINGS)
def test_a_step_in_python_integers(rule):
    """One step of a cell, from the numbers of its plan."""
    cell = calibrated(rule)._plan().cells[0][0]
    rng = random.Random(0)
    x = [rng.randint(cell.x.lo, cell.x.hi) for _ in range(5)]
    h = [rng.randint(cell.h.lo, cell.h.hi) for _ in range(7)]
    record = reference.trace(cell, torch.tensor(x), torch.tensor(h))
    q = {name: each.zero_point for name, each in cell.frozen.quantizers.items()}

    def projected(weights, B, s, operand, zero):
        found = []
        (M,), k = s.multipliers, s.shift
        for row, b, m, shift in zip(*(t.tolist() for t in (weights, B, M, k)), strict=True):
            total = (sum(w * (v - zero) for w, v in zip(row, operand, strict=True)) + b) * m
            code = by_rule(total, shift, rule, (m,)) + s.zero_point
            found.append(min(max(code, s.lo), s.hi))
        return found

    w = cell.weights
    Wx = projected(w.W, w.Bw, w.Wx, x, q["input.x"])
    Rh = projected(w.R, w.Br, w.Rh, h, q["output.h"])
    assert record.codes["matmul.Wx"].tolist() == Wx
    assert record.codes["matmul.Rh"].tolist() == Rh

    def summed(name, *terms):
        s = cell.frozen.sums[name]
        total = sum(M * v for M, v in zip(s.multipliers, terms, strict=True))
        code = by_rule(total, s.shift, rule, s.multipliers) + s.zero_point
        return min(max(code, s.lo), s.hi)

    codes = {name: found.tolist() for name, found in record.codes.items()}
    for j in range(7):
        Wx_z, Wx_r, Wx_g = (Wx[j + 7 * gate] - q["matmul.Wx"] for gate in range(3))
        Rh_z, Rh_r, Rh_g = (Rh[j + 7 * gate] - q["matmul.Rh"] for gate in range(3))
        assert codes["gate.z_pre"][j] == summed("gate.z_pre", Wx_z, Rh_z)
        assert codes["gate.r_pre"][j] == summed("gate.r_pre", Wx_r, Rh_r)
        r = codes["gate.r_out"][j] - q["gate.r_out"]
        rRh = summed("op.rRh", r * Rh_g)
        assert codes["op.rRh"][j] == rRh
        assert codes["gate.g_pre"][j] == summed("gate.g_pre", Wx_g, rRh - q["op.rRh"])
        z = codes["gate.z_out"][j] - q["gate.z_out"]
        g = codes["gate.g_out"][j] - q["gate.g_out"]
        old = summed("op.old_contrib", z * (h[j] - q["output.h"]))
        new = summed("op.new_contrib", (cell.frozen.one - z) * g)
        assert codes["output.h"][j] == summed(
            "output.h", old - q["op.old_contrib"], new - q["op.new_contrib"]
        )
