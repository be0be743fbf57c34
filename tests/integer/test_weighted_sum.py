"""The one primitive against Python integers and fractions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.integer import cell as reference
from quant_gru.integer.weighted_sum import (
    TIER_BOUNDS,
    WeightedSum,
    check_accumulator,
    exact_matmul,
    one_term,
    several_terms,
    significant_bits,
)


def exact(terms, multipliers, k, z, lo, hi):
    total = sum(Fraction(v) * M for v, M in zip(terms, multipliers, strict=True))
    return min(max(round(total / Fraction(2) ** k) + z, lo), hi)


def unclamped_side(terms, multipliers, k, z, lo, hi):
    value = (
        round(
            sum(Fraction(v) * M for v, M in zip(terms, multipliers, strict=True)) / Fraction(2) ** k
        )
        + z
    )
    return (value > hi) - (value < lo)


limits = st.tuples(st.integers(1, 32), st.booleans()).map(
    lambda bs: (-(1 << (bs[0] - 1)), (1 << (bs[0] - 1)) - 1) if bs[1] else (0, (1 << bs[0]) - 1)
)


@st.composite
def sums(draw):
    """Terms and numbers whose sum fits 63 bits, as tier d has it."""
    n = draw(st.integers(1, 3))
    Ms = draw(st.lists(st.integers(0, (1 << 24) - 1), min_size=n, max_size=n))
    room = (1 << 62) // n // (1 << 24)
    terms = draw(st.lists(st.integers(-room, room), min_size=n, max_size=n))
    lo, hi = draw(limits)
    return terms, Ms, draw(st.integers(-40, 70)), draw(st.integers(lo, hi)), lo, hi


@given(sums(), st.sampled_from(["d", "e"]))
def test_equals_fractions(numbers, tier):
    terms, Ms, k, z, lo, hi = numbers
    weighted_sum = WeightedSum(tuple(Ms), k, z, lo, hi, tier)
    tensors = [torch.tensor([v]) for v in terms]
    assert weighted_sum(*tensors).tolist() == [exact(*numbers)]
    unclamped = weighted_sum.unclamped(*tensors).item()
    assert (unclamped > hi) - (unclamped < lo) == unclamped_side(*numbers)


@given(
    st.lists(st.tuples(st.integers(-(2**33), 2**33), st.integers(-(2**33), 2**33)), min_size=1),
    st.integers(0, (1 << 24) - 1),
    st.integers(-60, 120),
    limits,
)
def test_products_of_wide_codes_are_exact(pairs, M, k, limit):
    lo, hi = limit
    weighted_sum = WeightedSum((M,), k, 0, lo, hi, "e")
    a, b = (torch.tensor([pair[i] for pair in pairs]) for i in (0, 1))
    expected = [exact([x * y], [M], k, 0, lo, hi) for x, y in pairs]
    assert weighted_sum((a, b)).tolist() == expected


@given(st.integers(1, 62), st.integers(0, 1000), st.sampled_from(["d", "e"]))
def test_ties_go_to_even(k, quotient, tier):
    tie = (2 * quotient + 1) << (k - 1)
    if tie >= 1 << 62:
        return
    weighted_sum = WeightedSum((1,), k, 0, -(2**31), 2**31 - 1, tier)
    even = quotient + (quotient & 1)
    got = weighted_sum(torch.tensor([tie, -tie, tie - 1, tie + 1]))
    assert got[:2].tolist() == [even, -even]
    if k > 1:
        assert got[2:].tolist() == [quotient, quotient + 1]


def test_per_channel_numbers_broadcast_over_the_last_dimension():
    M, k = torch.tensor([3, 5, 7]), torch.tensor([0, 1, -1])
    v = torch.tensor([[1, 1, 1], [-1, -1, -1], [5, 5, 5]])
    for tier in ("d", "e"):
        got = WeightedSum((M,), k, 0, -1000, 1000, tier)(v)
        assert got.tolist() == [[3, 2, 14], [-3, -2, -14], [15, 12, 70]]


@given(
    st.lists(st.floats(2.0**-60, 2.0**60), min_size=1, max_size=8), st.sampled_from([10, 16, 24])
)
def test_one_term_rounds_to_significant_bits(ratios, p):
    M, k = one_term(torch.tensor(ratios, dtype=torch.float64), p)
    for ratio, m, shift in zip(ratios, M.tolist(), k.tolist(), strict=True):
        assert 1 << (p - 1) <= m < 1 << p
        error = abs(Fraction(m) / Fraction(2) ** shift - Fraction(ratio))
        assert error <= Fraction(ratio) / 2**p


@pytest.mark.parametrize(
    ("width", "p"), [(2, 24), (16, 24), (17, 16), (32, 16), (33, 24), (64, 24)]
)
def test_significant_bits(width, p):
    assert significant_bits(width) == p


@st.composite
def several(draw, pot):
    n = draw(st.integers(2, 3))
    reach = draw(st.sampled_from([12, 40]))
    if pot:
        ratios = [2.0 ** draw(st.integers(-reach, reach)) for _ in range(n)]
    else:
        ratios = draw(st.lists(st.floats(2.0**-reach, 2.0**reach), min_size=n, max_size=n))
    bounds = (
        st.integers(1, 2**10)
        | st.integers(2**15, 2**17)
        | st.integers(1, 2**33)
        | st.integers(2**60, 2**66)
    )
    return ratios, draw(st.lists(bounds, min_size=n, max_size=n)), draw(st.integers(1, 32))


def multipliers(ratios, k):
    return [round(Fraction(r) * Fraction(2) ** k) for r in ratios]


def fits(tier, Ms, bounds, k):
    total = sum(M * V for M, V in zip(Ms, bounds, strict=True))
    return total + (Fraction(2) ** (k - 1) if tier != "a" and k > 0 else 0) < TIER_BOUNDS[tier]


def error(ratios, bounds, k):
    """What rounding the multipliers may cost, in codes of the result."""
    rounded = [Fraction(M) / Fraction(2) ** k for M in multipliers(ratios, k)]
    terms = zip(ratios, rounded, bounds, strict=True)
    return sum(abs(Fraction(r) - m) * V for r, m, V in terms)


def fast_shift(ratios, bounds, bits, pot):
    """The largest shift of the first tier that is fine enough, by the rule's own words."""
    reach = [k for k in range(-120, 120) if max(multipliers(ratios, k)) < 1 << 24]
    for tier in () if pot else TIER_BOUNDS:
        allowed = [k for k in reach if fits(tier, multipliers(ratios, k), bounds, k)]
        if allowed and max(multipliers(ratios, max(allowed))).bit_length() >= bits + 4:
            return max(allowed)
    return max(reach)


def holds(ratios, bounds, k):
    """Whether multipliers fit 64 bits and the sum 128."""
    Ms = multipliers(ratios, k)
    total = sum(M * V for M, V in zip(Ms, bounds, strict=True))
    return max(Ms) < 1 << 63 and total + Fraction(2) ** max(k - 1, 0) < 1 << 127


@given(several(pot=False) | several(pot=True), st.booleans())
def test_several_terms_take_the_fast_shift_or_the_first_accurate_one(case, pot):
    ratios, bounds, bits = case
    pot = pot and all(math.frexp(r)[0] == 0.5 for r in ratios)
    s = several_terms(ratios, bounds, bits=bits, lo=0, hi=1, zero_point=0, pot=pot)
    k = fast_shift(ratios, bounds, bits, pot)
    in_float32 = fits("a", multipliers(ratios, k), bounds, k) and max(bounds) <= 1 << 16
    if error(ratios, bounds, k) > (Fraction(1, 2) if in_float32 else Fraction(1, 16)):
        larger = [each for each in range(k + 1, k + 150) if holds(ratios, bounds, each)]
        accurate = [each for each in larger if error(ratios, bounds, each) <= Fraction(1, 16)]
        k = min(accurate) if accurate else max(larger, default=k)
    Ms = multipliers(ratios, k)
    if pot:
        assert any(M & 1 for M in s.multipliers)
        common = k - s.shift
        assert [M << common for M in s.multipliers] == Ms
    else:
        assert (list(s.multipliers), s.shift) == (Ms, k)
    tiers = [t for t in TIER_BOUNDS if fits(t, s.multipliers, bounds, s.shift)]
    assert s.tier == (tiers[0] if tiers else "e")


@given(several(pot=False) | several(pot=True))
def test_rounding_multipliers_costs_half_a_code_at_most(case):
    """Or as little of the coarsest term's own code as multipliers of 63 bits allow."""
    ratios, bounds, bits = case
    s = several_terms(ratios, bounds, bits=bits, lo=0, hi=1, zero_point=0, pot=False)
    most = error(ratios, bounds, s.shift)
    if holds(ratios, bounds, s.shift + 1):
        assert most <= Fraction(1, 2)
    elif max(s.multipliers) >= 1 << 62:
        assert most <= Fraction(sum(bounds), 1 << 63) * Fraction(max(ratios))


@given(several(pot=True))
def test_powers_of_two_are_exact(case):
    ratios, bounds, bits = case
    s = several_terms(ratios, bounds, bits=bits, lo=0, hi=1, zero_point=0, pot=True)
    if max(ratios) / min(ratios) < 2**23:
        for ratio, M in zip(ratios, s.multipliers, strict=True):
            assert Fraction(M) / Fraction(2) ** s.shift == Fraction(ratio)


def test_a_wide_term_keeps_its_multiplier_beside_a_narrow_one():
    """8-bit codes beside 32-bit codes: 24 bits for the larger multiplier left 0 for the other."""
    for pot, factor in ((True, 1.0), (False, 1.1)):
        ratios, bounds = [factor * 2.0**-25, factor], [1 << 31, 128]
        s = several_terms(ratios, bounds, bits=8, lo=0, hi=1, zero_point=0, pot=pot)
        found = [Fraction(M) / Fraction(2) ** s.shift for M in s.multipliers]
        off = sum(abs(Fraction(r) - m) * V for r, m, V in zip(ratios, found, bounds, strict=True))
        assert off <= Fraction(1, 16)


@pytest.mark.parametrize(
    ("v_bits", "w_bits"), [(8, 8), (16, 16), (24, 24), (33, 32), (33, 8), (9, 32)]
)
def test_matmul_is_exact(v_bits, w_bits):
    generator = torch.Generator().manual_seed(v_bits * 100 + w_bits)
    v = torch.randint(-(1 << (v_bits - 1)), 1 << (v_bits - 1), (3, 40), generator=generator)
    w = torch.randint(-(1 << (w_bits - 1)), 1 << (w_bits - 1), (5, 40), generator=generator)
    bound = 40 << (v_bits + w_bits - 2)
    got = exact_matmul(v, w, bound).tolist()
    expected = [
        [sum(a * b for a, b in zip(x, y, strict=True)) for y in w.tolist()] for x in v.tolist()
    ]
    assert got == expected


def test_matmul_at_the_edge_of_float64():
    """All extremes on one side: the sum comes close to 2^53 and stays exact."""
    K = 1 << 10
    v = torch.full((1, K), (1 << 21) - 1)
    w = torch.full((1, K), (1 << 21) - 1)
    assert exact_matmul(v, w, K << 42).item() == K * ((1 << 21) - 1) ** 2


@given(st.integers(1, 32), st.integers(1, 1 << 33), st.integers(1, 1 << 40))
def test_accumulators_fit_64_bits_or_are_refused(weight_bits, reach, K):
    largest = K * 2 ** (weight_bits - 1) * min(reach, 2**16)
    if largest < 2**63:
        check_accumulator("matmul.Wx", weight_bits, K, reach)
    else:
        with pytest.raises(QuantGRUError, match=r"at most \d+ features .* got \d+ .*matmul\.Wx"):
            check_accumulator("matmul.Wx", weight_bits, K, reach)


@pytest.mark.filterwarnings("ignore:Expected calibration data with more than one value")
def test_the_largest_layer_of_32_bits_is_exact():
    """One more feature is an error when the plan is built."""
    config = QuantConfig.uniform(8).replace("weight.W", bitwidth=32).replace("x", bitwidth=32)
    grus = [QuantGRU(K, 1, config=config).eval() for K in (65535, 65536)]
    for gru in grus:
        with torch.no_grad():
            gru.weight_ih_l0.fill_(-1.0)
        gru.calibrate(torch.full((1, 1, gru.input_size), -1.0))
    grus[0].finalize_calibration()
    plan = grus[0]._plan().cells[0][0]
    assert int(plan.weights.W.min()) == -(1 << 31)
    x = torch.tensor([plan.x.lo, plan.x.hi])[:, None, None].expand(2, 1, 65535)
    expected = reference.run(plan, x, torch.zeros(1, 1, dtype=torch.int64))[0]
    assert torch.equal(grus[0].forward_integer(x)[0], expected)
    with pytest.raises(QuantGRUError, match=r"65535 features .* 32 bits.* got 65536 .*matmul\.Wx"):
        grus[1].finalize_calibration()
