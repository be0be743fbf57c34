"""The one primitive against Python integers and fractions."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant_gru.integer.weighted_sum import (
    TIER_BOUNDS,
    WeightedSum,
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
    if pot:
        ratios = [2.0 ** draw(st.integers(-20, 10)) for _ in range(n)]
    else:
        ratios = draw(st.lists(st.floats(2.0**-12, 2.0**12), min_size=n, max_size=n))
    bounds = draw(st.lists(st.integers(1, 2**33), min_size=n, max_size=n))
    return ratios, bounds, draw(st.integers(1, 32))


def fits(tier, Ms, bounds, k):
    total = sum(M * V for M, V in zip(Ms, bounds, strict=True))
    return total + (Fraction(2) ** (k - 1) if tier != "a" and k > 0 else 0) < TIER_BOUNDS[tier]


@given(several(pot=False))
def test_several_terms_choose_the_largest_shift_of_the_first_tier_that_is_fine_enough(case):
    ratios, bounds, bits = case
    s = several_terms(ratios, bounds, bits=bits, lo=0, hi=1, zero_point=0, pot=False)
    assert list(s.multipliers) == [round(Fraction(r) * Fraction(2) ** s.shift) for r in ratios]

    def candidates(tier):
        """Shifts allowed in this tier, by the rule's own words."""
        for k in range(-60, 90):
            Ms = [round(Fraction(r) * Fraction(2) ** k) for r in ratios]
            if max(Ms) < 1 << 24 and (tier == "e" or fits(tier, Ms, bounds, k)):
                yield k, max(Ms)

    for tier in "abcde":
        allowed = list(candidates(tier))
        if allowed:
            k, largest = max(allowed)
            if tier == "e" or largest.bit_length() >= bits + 4:
                assert (s.tier, s.shift) == (tier, k)
                return
    pytest.fail("no tier")


@given(several(pot=True))
def test_powers_of_two_are_reduced_and_exact(case):
    ratios, bounds, bits = case
    s = several_terms(ratios, bounds, bits=bits, lo=0, hi=1, zero_point=0, pot=True)
    assert any(M & 1 for M in s.multipliers)
    if max(ratios) / min(ratios) < 2**23:
        for ratio, M in zip(ratios, s.multipliers, strict=True):
            assert Fraction(M) / Fraction(2) ** s.shift == Fraction(ratio)
    tiers = [t for t in TIER_BOUNDS if fits(t, s.multipliers, bounds, s.shift)]
    assert s.tier == (tiers[0] if tiers else "e")


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
