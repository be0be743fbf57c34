"""From statistics to quantizers: the rules, held against brute force and the quantizer itself."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quant_gru.calibration.covering import rounded_quotient
from quant_gru.calibration.observers import make_observer
from quant_gru.calibration.search import choose_quantizer, covering_quantizer, squared_error
from quant_gru.errors import CalibrationError
from quant_gru.integer.quantizer import MAX_SCALE, MIN_SCALE, Quantizer, code_limits

KINDS = ("pot", "free")

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-8.0, 8.0, width=32)
formats = st.fixed_dictionaries(
    {
        "bits": st.integers(1, 32),
        "signed": st.booleans(),
        "symmetric": st.booleans(),
        "scale_kind": st.sampled_from(KINDS),
    }
)


def observed(method, values):
    observer = make_observer(method)
    observer.update(torch.as_tensor(values, dtype=torch.float32))
    observer.end_batch()
    return observer


def choose(method, values, **form):
    form = {"bits": 8, "signed": True, "symmetric": True, "scale_kind": "pot"} | form
    return choose_quantizer(observed(method, values), operator="gate.z_pre", **form)


def mean_squared_error(quantizer, values):
    decoded = quantizer.dequantize(quantizer.quantize(values), torch.float64)
    return float((decoded - values.double()).square().mean())


def clips(quantizer, *values):
    return not bool(quantizer.inside(torch.tensor(values)).all())


def next_smaller(scale, kind):
    if kind == "pot":
        return scale / 2
    return float(torch.nextafter(torch.tensor(scale), torch.tensor(0.0)))


# --- errors and degenerate statistics


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
def test_empty_statistics_are_an_error_that_names_the_operator(method):
    with pytest.raises(CalibrationError, match=r"got none \(operator 'gate.z_pre'\)"):
        choose(method, [])


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_statistics_are_an_error_that_names_the_operator(method, bad):
    with pytest.raises(CalibrationError, match=r"1 NaN or infinite \(operator 'gate.z_pre'\)"):
        choose(method, [1.0, bad])
    with pytest.raises(CalibrationError, match=r"1 NaN or infinite"):
        choose(method, [bad])


@pytest.mark.parametrize("method", ["histogram", "minmax"])
def test_an_unknown_scale_kind_is_an_error(method):
    with pytest.raises(CalibrationError, match="'pot' or 'free', got 'po2'"):
        choose(method, [1.0], scale_kind="po2")


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
@given(form=formats)
@settings(deadline=None)
def test_zeros_have_scale_1_and_zero_point_0(method, form):
    quantizer = choose(method, [0.0, -0.0], **form)
    assert (quantizer.scale, quantizer.zero_point) == (1.0, 0)


@pytest.mark.parametrize("method", ["histogram", "minmax"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_on_a_side_without_codes_alone_have_scale_1(method, kind):
    assert choose(method, [-3.0, -1.0], signed=False, scale_kind=kind).scale == 1.0
    assert choose(method, [3.0, 1.0], bits=1, scale_kind=kind).scale == 1.0


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
@pytest.mark.parametrize("kind", KINDS)
@given(values=st.lists(float32s, min_size=1, max_size=8), form=formats)
@settings(deadline=None, max_examples=40)
def test_any_finite_statistics_give_a_quantizer(method, kind, values, form):
    quantizer = choose(method, values, **form | {"scale_kind": kind})
    assert MIN_SCALE <= quantizer.scale <= MAX_SCALE
    if kind == "pot":
        assert math.frexp(quantizer.scale)[0] == 0.5
    if form["symmetric"]:
        assert quantizer.zero_point == 0


# --- covering


@settings(deadline=None, max_examples=400)
@given(a=st.one_of(float32s, ordinary), b=st.one_of(float32s, ordinary), form=formats)
def test_covering_clips_nothing_and_no_smaller_scale_does(a, b, form):
    low, high = min(a, b, 0.0), max(a, b, 0.0)
    quantizer = covering_quantizer(min(a, b), max(a, b), **form)
    lo, hi = code_limits(form["bits"], form["signed"])
    if form["symmetric"]:
        low, high = (0.0 if lo == 0 else low), (0.0 if hi == 0 else high)
    assume(low != high)
    if quantizer.scale < MAX_SCALE:
        assert not clips(quantizer, low, 0.0, high)
    if quantizer.scale > MIN_SCALE:
        finer = next_smaller(quantizer.scale, form["scale_kind"])
        zero_points = {0}
        if not form["symmetric"]:
            first, last = rounded_quotient(low, finer), rounded_quotient(high, finer)
            zero_points = {min(hi, max(lo, z)) for z in (lo - first, hi - last)}
        for zero_point in zero_points:
            assert clips(Quantizer(form["bits"], form["signed"], finer, zero_point), low, high)


@pytest.mark.parametrize("method", ["minmax", "ema", "percentile"])
@pytest.mark.parametrize("kind", KINDS)
def test_methods_that_cover_cover_their_range(method, kind):
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)) + 1
    observer = observed(method, values)
    ends = (observer.minimum, observer.maximum)
    if method == "percentile":
        assert observer.minimum < observer.central_range()[0]
        ends = observer.central_range()
    for symmetric in (True, False):
        quantizer = choose(method, values, symmetric=symmetric, scale_kind=kind)
        assert quantizer == covering_quantizer(
            *ends, bits=8, signed=True, symmetric=symmetric, scale_kind=kind
        )
        assert not clips(quantizer, *ends)


@pytest.mark.parametrize(
    ("minimum", "maximum", "form", "exp2_inv", "zero_point"),
    [
        (-1.0, 1.0, {"symmetric": True, "signed": True}, 6, 0),
        (-1.0, 127.4 / 128, {"symmetric": True, "signed": True}, 7, 0),
        (-1.0, 127.5 / 128, {"symmetric": True, "signed": True}, 6, 0),
        (0.0, 255.4 / 256, {"symmetric": True, "signed": False}, 8, 0),
        (-9.0, 255.4 / 256, {"symmetric": True, "signed": False}, 8, 0),
        (0.0, 0.7, {"symmetric": False, "signed": False}, 8, 0),
        (0.0, 0.7, {"symmetric": False, "signed": True}, 8, -128),
        (-0.7, 0.0, {"symmetric": False, "signed": True}, 8, 127),
        (0.5, 0.7, {"symmetric": False, "signed": True}, 8, -128),
        (-0.375, 0.375, {"symmetric": False, "signed": False}, 8, 127),
        (-1000.0, 0.0, {"symmetric": True, "signed": True}, -3, 0),
    ],
)
def test_covering_powers_of_two_by_hand(minimum, maximum, form, exp2_inv, zero_point):
    quantizer = covering_quantizer(minimum, maximum, bits=8, scale_kind="pot", **form)
    assert (quantizer.scale, quantizer.zero_point) == (2.0**-exp2_inv, zero_point)


def test_one_bit_signed_covers_the_negative_side_alone():
    quantizer = covering_quantizer(
        -1.0, 50.0, bits=1, signed=True, symmetric=True, scale_kind="pot"
    )
    assert (quantizer.lo, quantizer.hi, quantizer.scale) == (-1, 0, 1.0)


@given(float32s, st.floats(MIN_SCALE, MAX_SCALE, width=32))
@settings(deadline=None)
def test_rounded_quotient_is_the_quantizers(v, s):
    expected = torch.round(torch.tensor(v) / torch.tensor(s)).double().item()
    ours = rounded_quotient(v, s)
    assert ours == expected or min(abs(ours), abs(expected)) >= 2.0**63


# --- the closed form


def brute_force(histogram, scale, zero_point, lo, hi, samples=4001):
    """Squared error by the midpoint rule inside each bin, the outer bins cut at the extremes."""
    width = 2.0**histogram.exponent
    total = 0.0
    for index in histogram.counts.nonzero().flatten().tolist():
        left = max(histogram.minimum, width * (histogram.first + index))
        right = min(histogram.maximum, width * (histogram.first + index + 1))
        v = left + (right - left) * (torch.arange(samples, dtype=torch.float64) + 0.5) / samples
        codes = torch.round(v / scale).clamp(lo - zero_point, hi - zero_point)
        total += float(histogram.counts[index]) * float((v - scale * codes).square().mean())
    return total


def closed_form(histogram, scale, zero_point, lo, hi):
    scales, zero_points = torch.tensor([[scale], [zero_point]], dtype=torch.float64)
    return float(squared_error(histogram, scales, zero_points, lo=lo, hi=hi))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("scale", [0.5, 0.0371, 0.011, 1 / 3000], ids=lambda s: f"s={s:.4g}")
def test_squared_error_equals_numeric_integration(bits, signed, scale):
    values = torch.randn(300, generator=torch.Generator().manual_seed(bits)) * 0.7 + 0.2
    # 2.0 lies on an edge: the last bin is a point.
    histogram = observed("histogram", torch.cat([values, torch.tensor([-2.9, 2.0])])).histogram
    lo, hi = code_limits(bits, signed)
    for zero_point in {lo, min(hi, 3), hi}:
        expected = brute_force(histogram, scale, zero_point, lo, hi)
        assert closed_form(histogram, scale, zero_point, lo, hi) == pytest.approx(
            expected, rel=2e-4
        )


@pytest.mark.parametrize("bits", [24, 32])
def test_squared_error_keeps_its_digits_for_wide_codes(bits):
    histogram = observed("histogram", torch.linspace(-1.0, 0.999, 5000)).histogram
    scale = 2.0 ** (1 - bits)
    error = closed_form(histogram, scale, 0, *code_limits(bits, True))
    assert error == pytest.approx(5000 * scale**2 / 12, rel=1e-6)


def test_squared_error_of_equal_values_is_that_of_a_point():
    histogram = observed("histogram", torch.full((7,), 0.3)).histogram
    value = histogram.minimum
    assert closed_form(histogram, 0.25, 0, -8, 2) == pytest.approx(7 * (value - 0.25) ** 2)
    assert closed_form(histogram, 0.1, 0, -8, 2) == pytest.approx(7 * (value - 0.2) ** 2)


# --- the search

GENERATOR = torch.Generator().manual_seed(7)
NORMAL = torch.randn(50_000, generator=GENERATOR)
UNIFORM = torch.rand(50_000, generator=GENERATOR).clamp(1e-5, 1 - 1e-5)
SHAPES = {
    "normal": NORMAL,
    "offset": NORMAL * 0.05 + 0.3,
    "uniform": UNIFORM * 2 - 1,
    "tanh": torch.tanh(2 * NORMAL),
    "laplace": torch.distributions.Laplace(0.0, 1.0).icdf(UNIFORM),
    "constant": torch.full((100,), 0.3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("kind", KINDS)
def test_least_squares_is_no_worse_than_covering(shape, bits, symmetric, kind):
    values = SHAPES[shape]
    form = {"bits": bits, "symmetric": symmetric, "scale_kind": kind}
    searched = mean_squared_error(choose("histogram", values, **form), values)
    covering = mean_squared_error(choose("minmax", values, **form), values)
    assert searched <= 1.01 * covering


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("shape", ["normal", "tanh", "laplace"])
def test_pot_search_finds_the_best_exponent_of_all(shape, bits):
    values = SHAPES[shape]
    best = min(
        (Quantizer(bits, True, 2.0**e) for e in range(-20, 10)),
        key=lambda q: mean_squared_error(q, values),
    )
    assert choose("histogram", values, bits=bits) == best


@pytest.mark.parametrize("bits", [4, 8])
def test_free_search_is_as_good_as_a_dense_scan(bits):
    values = SHAPES["laplace"]
    found = mean_squared_error(choose("histogram", values, bits=bits, scale_kind="free"), values)
    covering = choose("minmax", values, bits=bits, scale_kind="free").scale
    scan = (
        float(torch.tensor(covering * (0.05 + 0.95 * k / 400), dtype=torch.float32))
        for k in range(401)
    )
    best = min(mean_squared_error(Quantizer(bits, True, s), values) for s in scan)
    assert found <= 1.005 * best


def test_a_lone_outlier_is_clipped_when_that_pays():
    values = torch.cat([NORMAL, torch.tensor([40.0])])
    assert clips(choose("histogram", values, bits=4), 40.0)
    assert not clips(choose("histogram", values, bits=16), 40.0)


@pytest.mark.parametrize("value", [0.5, -0.75])
def test_ties_go_to_the_smaller_scale_that_does_not_clip(value):
    # Every power of two up to the value's own grid represents it without error.
    quantizer = choose("histogram", [value])
    assert not clips(quantizer, value)
    assert quantizer == choose("minmax", [value])


@pytest.mark.parametrize("kind", KINDS)
def test_slack_is_shared_by_both_ends_unless_the_range_ends_at_zero(kind):
    form = {"symmetric": False, "scale_kind": kind, "signed": False}
    assert choose("histogram", UNIFORM, **form).zero_point == 0
    assert choose("histogram", -UNIFORM, **form).zero_point == 255
    assert choose("histogram", (UNIFORM - 0.5) * 1.2, **form).zero_point in (127, 128)


def test_search_does_not_depend_on_how_the_data_arrived():
    whole = observed("histogram", NORMAL)
    parts = make_observer("histogram")
    for part in NORMAL.flip(0).split(7777):
        other = make_observer("histogram")
        other.update(part)
        other.merge(parts)
        parts = other
    for kind in KINDS:
        form = {"operator": "x", "bits": 8, "signed": True, "symmetric": False, "scale_kind": kind}
        assert choose_quantizer(whole, **form) == choose_quantizer(parts, **form)


DATA = {
    "normal": lambda: torch.randn(20_000),
    "heavy tails": lambda: torch.randn(20_000) ** 3,
    "rectified": lambda: torch.randn(20_000).relu(),
    "16-bit samples": lambda: (torch.randn(20_000) * 3000).round() / 32768,
    "two groups": lambda: torch.randn(20_000) / 10 + torch.randint(0, 2, (20_000,)) * 4,
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("bits", [4, 8, 12])
@pytest.mark.parametrize("symmetric", [False, True])
def test_free_search_is_never_worse_than_powers_of_two(name, bits, symmetric):
    torch.manual_seed(bits)
    values = DATA[name]()
    pot, free = (
        mean_squared_error(
            choose("histogram", values, bits=bits, scale_kind=kind, symmetric=symmetric), values
        )
        for kind in KINDS
    )
    assert free <= pot * 1.012 + 1e-16  # 0.05 dB
