"""Floats in place of integers: equal to rational arithmetic wherever kernels use them.

The bounds are those of the plan: its tiers, and what the executors ask before they use a form.
"""

import ctypes
import platform
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from derived import exact_of
from host_machine import Host, folder_of

from kept import calibrated_gru
from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer.weighted_sum import several_terms, tier_of
from quant_gru.kernels import cpu
from quant_gru.kernels.cpu import executor
from quant_gru.kernels.cuda.plan.structure import form_of

HERE, KERNELS = Path(__file__).parent, Path(cpu.__file__).parents[1]
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.slow
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-Wno-psabi", "-fPIC", "-shared"]
CUDA = [
    "-DPTX_ON_HOST",
    f"-I{KERNELS / 'cuda'}",
    f"-I{KERNELS}",
    f"-I{KERNELS.parent}",
    f"-I{KERNELS.parents[1]}",
]
CPU = [f"-I{KERNELS}"]
ONE, PRODUCT, TWO, SCALED = range(4)
LO, HI = -128, 127
WIDE_LO, WIDE_HI = -(1 << 16), (1 << 16) - 1


def fused() -> bool:
    """Whether this processor has a fused multiply-add that has to be asked for."""
    info = Path("/proc/cpuinfo")
    return (
        platform.machine() in ("x86_64", "AMD64") and info.exists() and " fma " in info.read_text()
    )


BUILDS = {"cpu": CPU, "cuda": [*CUDA, "-DQG_POT=0"], "cuda-pot": [*CUDA, "-DQG_POT=1"]}
if fused():
    BUILDS["cpu-fma"] = [*CPU, "-mfma"]


@pytest.fixture(scope="module", params=BUILDS)
def forms(request, tmp_path_factory):
    """form(real, which, a, b, M, k, lo, hi): rounded and clamped sums of two arrays."""
    if COMPILER is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("forms") / "forms.so"
    source = HERE / "exact_forms.cpp"
    subprocess.run([COMPILER, *FLAGS, *BUILDS[request.param], source, "-o", path], check=True)
    library = ctypes.CDLL(str(path))

    def run(real, which, a, b, M, k, lo, hi):
        m = np.ldexp(np.array(M, dtype=np.float64), -k)
        size = len(a)
        arrays = [np.zeros(-(-size // 8) * 8) for _ in range(3)]
        arrays[0][:size], arrays[1][:size] = a, b
        x, y, m_, out = (
            each.ctypes.data_as(ctypes.c_void_p) for each in (*arrays[:2], m, arrays[2])
        )
        limits = ctypes.c_double(lo), ctypes.c_double(hi)
        getattr(library, f"run_{real}")(
            which, ctypes.c_long(len(arrays[0])), x, y, m_, *limits, out
        )
        return arrays[2][:size]

    run.name = request.param
    return run


def rounded(total, k):
    """rne(total / 2^k) of int64 whose magnitude is below 2^62."""
    if k <= 0:
        return total << min(-k, 20)
    k = min(k, 63)
    quotient = total >> k
    rest, half = total - (quotient << k), 1 << (k - 1)
    return quotient + ((rest > half) | ((rest == half) & (quotient & 1 == 1)))


def rational(total: int, k: int, lo: int, hi: int) -> int:
    return min(max(round(Fraction(total) / Fraction(2) ** k), lo), hi)


def check(found, total, k, lo, hi):
    expected = np.clip(rounded(total, k), lo, hi)
    assert np.array_equal(found, expected)
    # what is expected, by fractions
    for i in range(0, len(total), 1 + len(total) // 50):
        assert expected[i] == rational(int(total[i]), k, lo, hi)


def ties(M: int, k: int, most: int) -> list[int]:
    """Values v, |v| <= most, for which M * v / 2^k is halfway between integers."""
    factor = M & -M
    if not 1 <= k or factor >= 1 << k:
        return []
    step = (1 << (k - 1)) // factor
    return list(range(step, most + 1, 2 * step)[:2000])


# codes less their zero points; what both signs would say of the first, one says
EVERY_WORD = np.arange(-(1 << 15), 1 << 15)
PAIRS = [each.ravel() for each in np.meshgrid(np.arange(256), np.arange(-255, 256))]
# of 24 bits: the smallest, the largest, those of few bits, any
ONES = [1 << 23, (1 << 23) + 1, (1 << 24) - 1, 3 << 22, 0x800800, 0xABCDEF, 0xD5A3F1]


@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("M", ONES)
def test_one_term(forms, real, M):
    """Sums of a matrix product below 2^24: all of 17 bits, the ends, ties."""
    most = (1 << 24) - 1
    random = np.random.default_rng(M).integers(-most, most + 1, 4000)
    ends = most - np.arange(100)
    for k in (16, 24, 31, 34, 38, 46, 60):
        halves = np.array(ties(M, k, most), dtype=np.int64)
        v = np.concatenate([EVERY_WORD, random, ends, -ends, halves, -halves])
        found = forms(real, ONE, v, v, (M, 0), k, WIDE_LO, WIDE_HI)
        check(found, v * M, k, WIDE_LO, WIDE_HI)


@pytest.mark.parametrize("M", ONES[:4])
def test_one_term_in_double(forms, M):
    """Sums beyond 2^24: the product with a multiplier of 24 bits is rounded with the sum, once."""
    # without fused multiply-add, products are exact in double
    most = (1 << 29 if forms.name == "cpu" else 1 << 50) - 1
    random = np.random.default_rng(M).integers(-most, most + 1, 500)
    for k in (30, 36, 44, 52, 58, 64, 70):
        near = [v + d for v in ties(M, k, most)[:50] for d in (-1, 0, 1)]
        v = np.concatenate([random, np.array(near, dtype=np.int64), [most, -most]])
        found = forms("double", ONE, v, v, (M, 0), k, WIDE_LO, WIDE_HI)
        expected = [rational(int(each) * M, k, WIDE_LO, WIDE_HI) for each in v]
        assert found.tolist() == expected


@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("M", ONES[:5])
def test_product_of_bytes(forms, real, M):
    """Every pair of codes of 8 bits."""
    if forms.name == "cuda-pot" and M != 1 << 23:
        pytest.skip(f"not for {forms.name}")
    a, b = PAIRS
    for k in (23, 31, 32):
        check(forms(real, PRODUCT, a, b, (M, 0), k, LO, HI), a * b * M, k, LO, HI)


def test_products_of_words_where_multipliers_are_powers(forms):
    """Products of codes of 16 bits leave float32, but one factor comes with the multiplier."""
    if forms.name != "cuda-pot":
        pytest.skip(f"not for {forms.name}")
    random = np.random.default_rng(0)
    a, b = (random.integers(-65535, 65536, 60000) for _ in range(2))
    a[:64], b[:32], b[32:64] = 65535, 65535, -65535
    a[64:5000] &= ~0xFF
    b[64:5000] |= 1
    for k in (8, 9, 14, 15, 16, 17, 30):
        check(
            forms("float", PRODUCT, a, b, (1, 0), k, WIDE_LO, WIDE_HI), a * b, k, WIDE_LO, WIDE_HI
        )


def pairs_at_the_bound(V1, V2, limit=1 << 24):
    """Multipliers whose sums just stay below the limit."""
    most = (limit - 1) // (V1 + V2)
    yield most, most
    yield 1, (limit - 1 - V1) // V2
    yield (limit - 1 - V2) // V1, 1
    yield 0, (limit - 1) // V2
    yield most // 2, (limit - 1 - most // 2 * V1) // V2
    yield 1 << most.bit_length() // 2, 1


@pytest.mark.parametrize("real", ["float", "double"])
def test_two_terms_of_bytes(forms, real):
    """Every pair of codes of 8 bits, multipliers at the bound of tier a."""
    a, b = PAIRS
    for M in pairs_at_the_bound(255, 255):
        assert tier_of(M, (255, 255), 0) == "a"
        for k in (0, 9, 16):
            check(forms(real, TWO, a, b, M, k, LO, HI), a * M[0] + b * M[1], k, LO, HI)


@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("bounds", [(65535, 65535), (255 * 255, 255), (255 * 255, 255 * 255)])
def test_two_terms_of_words_and_products(forms, real, bounds):
    """Codes of 16 bits, and products that have no code of their own, at the bound of tier a."""
    random = np.random.default_rng(1)
    a, b = (random.integers(-V, V + 1, 8000) for V in bounds)
    for i, (x, y) in enumerate(((1, 1), (1, -1), (-1, 1), (-1, -1))):
        a[i], b[i] = x * bounds[0], y * bounds[1]
    for M in pairs_at_the_bound(*bounds):
        assert tier_of(M, bounds, 0) == "a"
        for k in (0, 1, 8, 12, 23):
            total = a * M[0] + b * M[1]
            check(forms(real, TWO, a, b, M, k, WIDE_LO, WIDE_HI), total, k, WIDE_LO, WIDE_HI)


@pytest.mark.parametrize("limit", [1 << 31, 1 << 53], ids=["b", "c"])
def test_two_terms_in_double(forms, limit):
    """Multipliers at the bounds of tiers b and c."""
    random = np.random.default_rng(2)
    for V in (65535, (1 << 30) - 1):
        a, b = (random.integers(-V, V + 1, 4000) for _ in range(2))
        a[:4], b[:4] = (V, V, -V, -V), (V, -V, V, -V)
        for M in pairs_at_the_bound(V, V, limit):
            if max(M) < 1:
                continue
            total = a * M[0] + b * M[1]
            for k in (0, 1, 14, 22, 33, 44):
                found = forms("double", TWO, a, b, M, k, WIDE_LO, WIDE_HI)
                check(found, total, k, WIDE_LO, WIDE_HI)


@pytest.mark.parametrize("next_M", [1, 3, 257, 65535])
@pytest.mark.parametrize("real", ["float", "double"])
def test_a_code_and_its_next_multiplier(forms, real, next_M):
    """A rounding that ends in the multiplication by the next sum's multiplier."""
    if not forms.name.startswith("cpu") or forms.name == "cpu":
        pytest.skip(f"not for {forms.name}")
    v = EVERY_WORD
    for M in ONES[:5]:
        # the second multiplier is that of the next sum, as a real number
        for k in (24, 30, 33):
            m_next = next_M * 2.0**k / 2.0**20
            magic = 12582912 if real == "float" else 6755399441055744
            if not fits(magic * Fraction(m_next), real):
                continue
            found = forms(real, SCALED, v, v, (M, m_next), k, LO, HI)
            expected = np.clip(rounded(v * M, k), LO, HI) * (m_next / 2.0**k)
            assert np.array_equal(found, expected)


def fits(value: Fraction, real: str) -> bool:
    """Whether a number has few enough bits."""
    numerator = value.numerator
    return (numerator // (numerator & -numerator)).bit_length() <= (24 if real == "float" else 53)


# --- just outside


def test_float32_would_be_wrong_beyond_tier_a(forms):
    """The bound is needed: one step beyond, a number next to a tie is taken for one."""
    k, V = 17, (1 << 24) + (1 << 16)
    a, b = np.array([V]), np.array([1])
    found = forms("float", TWO, a, b, (1, 1), k, WIDE_LO, WIDE_HI)
    exact = rational(V + 1, k, WIDE_LO, WIDE_HI)
    assert found[0] != exact
    assert forms("double", TWO, a, b, (1, 1), k, WIDE_LO, WIDE_HI)[0] == exact
    assert tier_of((1, 1), (V, 1), k) != "a"


@pytest.mark.parametrize(("tier", "limit"), [("a", 1 << 24), ("c", 1 << 53)])
def test_tiers_end_where_the_forms_do(tier, limit):
    V = 255
    fits_ = (limit - 1) // V
    assert tier_of((fits_,), (V,), 0) == tier
    assert tier_of((fits_ + 1,), (V,), 0) != tier


def test_the_plan_chooses_a_tier_by_its_bounds():
    for V in (255, 4095, 65535, 255 * 255, 1 << 30, 1 << 40):
        for ratio in (0.37, 1.0, 2.0**-7):
            each = several_terms(
                [ratio, ratio / 3], [V, V], bits=8, lo=LO, hi=HI, zero_point=0, pot=False
            )
            total = sum(M * V for M in each.multipliers)
            half = 1 << (each.shift - 1) if each.tier != "a" and each.shift > 0 else 0
            bounds = {"a": 1 << 24, "b": 1 << 31, "c": 1 << 53, "d": 1 << 62}
            assert each.tier == "e" or total + half < bounds[each.tier]


# --- other rules of rounding on a CPU

HALF_AWAY, HALF_UP, FLOOR = range(1, 4)
EVEN, STRETCHED, UP, AWAY, ANY = range(5)
FORMS = {
    "floor": (EVEN, FLOOR),
    "half_away-stretched": (STRETCHED, HALF_AWAY),
    "half_away": (AWAY, HALF_AWAY),
    "half_away-any": (ANY, HALF_AWAY),
    "half_up": (UP, HALF_UP),
    "half_up-any": (ANY, HALF_UP),
}


@pytest.fixture(scope="module", params=[name for name in BUILDS if name.startswith("cpu")])
def rules(request, tmp_path_factory):
    """The library of the forms of every rule, which compares them with integers."""
    if COMPILER is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("rules") / "rules.so"
    source = HERE / "exact_forms.cpp"
    command = [COMPILER, *FLAGS, "-O2", *BUILDS[request.param], source, "-o", path]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    library.count_wrong.restype = ctypes.c_long

    def wrong(name, values, M, k, *, real="float", is_sum=False, grown=False):
        """Of the values of a range, how many are not rounded as integers are."""
        how, rule = FORMS[name]
        where = map(ctypes.c_long, (values.start, values.stop, values.step, M))
        return library.count_wrong(real == "float", how, rule, is_sum, grown, *where, k)

    def stretches(real, bound, M):
        return library.stretches(real == "float", ctypes.c_double(bound), ctypes.c_long(M))

    wrong.name, wrong.stretches = request.param, stretches
    return wrong


def below(limit: int) -> range:
    return range(1 - limit, limit)


@pytest.mark.parametrize("name", FORMS)
def test_all_products_by_powers_of_two(rules, name):
    """Every sum of a matrix product that float32 holds, and every one that may be stretched."""
    stretched = name == "half_away-stretched"
    bound = (1 << 23 if stretched else 1 << 24) - 1
    assert not stretched or rules.stretches("float", bound, 1)
    for k in (1, 12):
        assert rules(name, below(bound + 1), 1, k) == 0, k
    for k in (0, 2, 16, 22, 23, 24):
        assert rules(name, below(1 << 16), 1, k) == 0, k
        assert rules(name, range(bound - (1 << 16), bound + 1), 1, k) == 0, k
        assert rules(name, range(-bound, (1 << 16) - bound), 1, k) == 0, k


@pytest.mark.parametrize("name", [name for name in FORMS if name != "half_away-stretched"])
def test_all_products_by_others(rules, name):
    for M, k in ((ONES[2], 30), (ONES[5], 32), (3 << 22, 26)):
        assert rules(name, range(1 - (1 << 24), 1 << 24, 7), M, k) == 0, (M, k)


@pytest.mark.parametrize("name", FORMS)
def test_all_sums(rules, name):
    """Every sum of two terms that float32 holds, one half included where sums begin at it."""
    if rules.name == "cpu":
        pytest.skip("not for cpu, whose instructions are those of cpu-fma")
    for k in (0, 1, 2, 8, 16, 22, 23):
        if name == "half_away-stretched":
            limit = 1 << 22
        elif name == "half_up":
            limit = (1 << 24) - (1 << k - 1 if k else 0)
        else:
            limit = 1 << 24
        step = 1 if k == 1 else 5
        assert rules(name, range(1 - limit, limit, step), 1, k, is_sum=True) == 0, k
        for near in (limit, 1 << 16, 1 - limit + (1 << 16)):
            values = range(near - (1 << 16), near)
            assert rules(name, values, 1, k, is_sum=True) == 0, k


@pytest.mark.parametrize("name", ["half_away", "half_away-any"])
def test_stretched_multipliers_may_be_cut_off(rules, name):
    """As in plans of which only some channels can be stretched."""
    for k in (0, 1, 2, 8, 16, 23):
        assert rules(name, range(1 - (1 << 23), 1 << 23, 5), 1, k, grown=True) == 0, k
        assert rules(name, range((1 << 23) - (1 << 16), 1 << 23), 1, k, grown=True) == 0, k
    if name == "half_away-any":
        for M, k in double_cases():
            for values in near_ties(M, k, (1 << 51) // M):
                assert rules(name, values, M, k, real="double", grown=True) == 0, (M, k)


def double_cases():
    for M in (1, 3, 5, 0xABCDEF, (1 << 24) - 1, (1 << 23) + 1):
        most = ((1 << 51) - 1) // M
        for bits in (most.bit_length() - 12, most.bit_length() - 1):
            yield M, bits


def near_ties(M, k, most):
    """Values v up to most for which M * v / 2^k, M odd, is a tie, or the next to one."""
    modulus = 1 << k
    for tie in (modulus // 2, -modulus // 2):
        for d in (-1, 0, 1):
            first = (tie + d) * pow(M, -1, modulus) % modulus
            # the largest ones, of both signs
            start = first + (most - first) // modulus * modulus
            yield range(max(start - 8191 * modulus, first), start + 1, modulus)
            yield range(first - most // modulus * modulus, first, modulus)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "half_away"])
def test_products_and_sums_near_ties_in_double(rules, name):
    """Up to the bound of stretched products and sums, and of products without `fma`."""
    for M, k in double_cases():
        limit = 1 << 51
        for values in near_ties(M, k, (limit - 1) // M):
            assert rules.stretches("double", (limit - 1) // M, M << 3)
            assert rules(name, values, M, k, real="double") == 0, (M, k, values)
            if M == 1:
                assert rules(name, values, 1, k, real="double", is_sum=True) == 0, (k, values)


def test_stretched_products_beyond_the_bound_reach_ties(rules):
    """The bounds are needed."""
    name, k = "half_away-stretched", 12
    v = (1 << 23) + (1 << k - 1) - 1
    assert rules(name, range(v, v + 1), 1, k) == 1
    assert not rules.stretches("float", 1 << 23, 1)
    assert not rules.stretches("float", 1, 3)
    v = (1 << 22) + (1 << k - 1) - 1
    assert rules(name, range(v, v + (1 << 15), 1 << k), 1, k, is_sum=True) == 0
    v = (1 << 24) - (1 << k - 1) - 1
    assert rules(name, range(v, v + 1), 1, k, is_sum=True) == 1
    if rules.name == "cpu-fma":
        values = next(iter(near_ties(3, 40, (1 << 53) // 3)))
        assert rules(name, values, 3, 40, real="double") > 0
    assert rules.stretches("double", (1 << 51) - 1, 1 << 20)
    assert not rules.stretches("double", 1 << 51, 1)
    assert not rules.stretches("double", (1 << 50) - 1, 3)


def quantized(config, C=8, H=16):
    return calibrated_gru(C, H, config, data=(6, 4), seed=None)


def in_float32(plan):
    """What the CPU's and the GPU's executor choose for the gates."""
    kind = executor.layer_of(plan, executor.choices()[0]).kind
    return kind == "fused, float32", form_of(plan).real == "float"


def test_gates_are_in_float32_where_its_forms_are_exact():
    assert in_float32(quantized(QuantConfig.int8())._plan().cells[0][0]) == (True, True)
    assert in_float32(quantized(QuantConfig.w8a16())._plan().cells[0][0]) == (False, False)
    # 1 - z has so many codes that its product with g leaves 24 bits
    gru = quantized(QuantConfig.int8())
    for exp2_inv, expected in ((16, True), (17, False)):
        gru.adjust_quant_config("z_out", exp2_inv=exp2_inv)
        gru.adjust_quant_config("new_contrib", exp2_inv=6)
        plan = gru._plan().cells[0][0]
        q = plan.frozen.quantizers
        product = plan.frozen.one * q["gate.g_out"].max_abs
        several = [s for s in plan.frozen.sums.values() if len(s.multipliers) > 1]
        assert (product < 1 << 24) == expected
        assert all(each.tier == "a" for each in several)
        assert in_float32(plan) == (expected, expected)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_sums_are_in_float32_up_to_24_bits(tmp_path_factory):
    """The bound of the sum of a row's products, on either side of 2^24."""
    seen, host = set(), Host(folder_of(tmp_path_factory))
    for C in (1200, 1600, 1800, 1900, 2000, 2400):
        gru = QuantGRU(C, 8, config=QuantConfig.int8()).eval()
        with torch.no_grad():
            gru.weight_ih_l0.fill_(0.4999)
        gru.calibrate(0.01 * torch.randn(2, 2, C))
        gru.finalize_calibration()
        plan = gru._plan().cells[0][0]
        assert form_of(plan).real == "float"
        w = plan.weights
        reach = w.W.to(torch.int64).abs().sum(1) * plan.x.max_abs + w.Bw.abs()
        expected = bool((reach < 1 << 24).all())
        assert bool(exact_of(plan, host)[0][0]) == expected
        kind = executor.layer_of(plan, executor.choices()[0]).kind
        assert (kind == "fused, float32") == expected, kind
        seen.add(expected)
    assert seen == {True, False}
