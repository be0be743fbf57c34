"""fixed_point.h, compiled as strict C99, against Python's integers and fractions."""

import ctypes
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quant_gru

pytestmark = pytest.mark.slow

HEADER = Path(quant_gru.__file__).parent / "kernels" / "c99" / "fixed_point.h"
SOURCE = """
#include "fixed_point.h"
int64_t round_one(int64_t v, int k) { return qg_round(v, k); }
int64_t round_two(int64_t a, int64_t b, uint32_t m, int64_t c, int s, int k) {
    qg_wide sum = qg_wide_times(qg_wide_product(a, b), m);
    return qg_wide_round(qg_wide_add(sum, qg_wide_left(qg_wide_of(c), s)), k);
}
int64_t round_long(int64_t a, int64_t b, uint64_t m, int64_t c, uint64_t n, int k) {
    return qg_wide_round(qg_wide_add(qg_wide_times_word(qg_wide_product(a, b), m),
                                     qg_wide_times_word(qg_wide_of(c), n)), k);
}
"""
SATURATED = 1 << 34
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
powers = st.integers(0, 62).flatmap(lambda n: st.sampled_from([1 << n, -(1 << n), (1 << n) + 1]))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("fixed_point")
    (folder / "shim.c").write_text(SOURCE)
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC"]
    subprocess.run(
        [compiler, *flags, f"-I{HEADER.parent}", "shim.c", "-o", "shim.so"], cwd=folder, check=True
    )
    found = ctypes.CDLL(str(folder / "shim.so"))
    i64, i32, u32 = ctypes.c_int64, ctypes.c_int, ctypes.c_uint32
    found.round_one.argtypes, found.round_one.restype = [i64, i32], i64
    found.round_two.argtypes, found.round_two.restype = [i64, i64, u32, i64, i32, i32], i64
    u64 = ctypes.c_uint64
    found.round_long.argtypes, found.round_long.restype = [i64, i64, u64, i64, u64, i32], i64
    return found


def check(got, value, k):
    exact = round(Fraction(value) / Fraction(2) ** k)
    if abs(exact) < SATURATED:
        assert got == exact
    else:
        assert (got > 0) == (exact > 0)
        assert abs(got) >= SATURATED


@settings(max_examples=2000)
@given(int64 | powers | st.integers(-100, 100), st.integers(-80, 80))
def test_one_word(library, v, k):
    check(library.round_one(v, k), v, k)


@settings(max_examples=2000)
@given(
    st.integers(-(1 << 50), 1 << 50) | st.integers(-10, 10),
    st.integers(-(1 << 34), 1 << 34) | st.integers(-10, 10),
    st.integers(0, 1 << 24),
    st.integers(-(1 << 62), 1 << 62) | st.just(0),
    st.integers(0, 16),
    st.integers(-70, 140),
)
def test_two_words(library, a, b, m, c, s, k):
    check(library.round_two(a, b, m, c, s, k), a * b * m + (c << s), k)


@settings(max_examples=2000)
@given(
    st.integers(-(1 << 33), 1 << 33) | st.integers(-10, 10),
    st.integers(-(1 << 30), 1 << 30) | st.integers(-10, 10),
    st.integers(0, (1 << 63) - 1) | powers.map(abs),
    st.integers(-(1 << 62), 1 << 62) | st.integers(-10, 10),
    st.integers(0, (1 << 63) - 1) | powers.map(abs),
    st.integers(-70, 140),
)
def test_multipliers_of_63_bits(library, a, b, m, c, n, k):
    check(library.round_long(a, b, m, c, n, k), a * b * m + c * n, k)


@given(st.integers(0, 1000), st.integers(1, 90))
def test_ties_go_to_even(library, quotient, k):
    tie = 2 * quotient + 1
    even = quotient + (quotient & 1)
    shift = min(k - 1, 16)
    if k - 1 - shift <= 50:
        half = 1 << (k - 1 - shift)
        assert library.round_two(0, 0, 0, tie * half, shift, k) == even
        assert library.round_two(0, 0, 0, -tie * half, shift, k) == -even
