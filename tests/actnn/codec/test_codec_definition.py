"""What the definition promises: no bias, a variance, bounds, and NaN that stays visible."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actnn.codec import Key, decode, encode, noise_state, reference
from actnn.codec.packing import unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BITS = list(range(1, 9))


def draws_of(x, bits, count, group=256):
    """float64 (count, n): decoded numbers of independent draws, before they are cast."""
    (n,) = x.shape
    state = noise_state(11)
    codes, params = reference.encode_rows(x.expand(count, n), bits, state, 0, group, True)
    return reference.decode_rows(codes[:, :n], params, bits, group, torch.float32).double()


def parameters_of(x, bits, group=256):
    size = -(-len(x) // group) * group
    padded = reference._repeat_last(x.float().view(1, -1), size)
    base, step, inverse = reference.parameters(padded, bits, group)
    spread = torch.arange(len(x)) // group
    return base[0, spread].double(), step[0, spread].double(), inverse[0, spread].double()


SHAPES = {
    "centred": lambda n: torch.randn(n),
    "offset 10": lambda n: torch.randn(n) + 10,
    "offset 1000": lambda n: torch.randn(n) * 0.01 + 10,
    "constant": lambda n: torch.full((n,), 3.14159),
    "denormal": lambda n: torch.randn(n) * 1e-40,
    "huge": lambda n: torch.rand(n) * 2e38 - 1e38,
    "two values": lambda n: torch.randint(0, 2, (n,)).float(),
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("bits", BITS)
def test_the_mean_of_draws_is_the_tensor(kind, bits):
    group = (64, 128, 256)[bits % 3]
    dtype = torch.float32 if kind in ("denormal", "huge") else DTYPES[bits % 4]
    x, count = SHAPES[kind](300).to(dtype).float(), 400
    y = draws_of(x, bits, count, group)
    _, step, _ = parameters_of(x, bits, group)
    # the fraction of a code has 15 or 16 bits, and float32 rounds the sums
    rounding = step * 2.0**-15 + x.abs().double() * 2.0**-22 + 1e-45
    deviation = step / 2 / math.sqrt(count)
    assert ((y.mean(0) - x.double()).abs() <= 4.5 * deviation + rounding).all()
    # all elements together: a common bias would show here
    rounded = step > 0
    if rounded.any():
        share = ((y.mean(0) - x.double()) / step)[rounded]
        bound = 4.5 * 0.5 / math.sqrt(count * len(share)) + (rounding / step)[rounded].mean()
        assert share.mean().abs() <= bound


def test_all_noise_together_has_the_exact_mean():
    """Over all values of the noise, the mean of codes is the rounded position between codes."""
    t = torch.rand(50, 1) * 3
    noise = torch.arange(65536).view(1, -1)
    codes = reference._rounded_sum(t, torch.ones(1), torch.tensor(65536), noise) >> 16
    exact = t.double() * 65536
    assert ((codes.double().sum(1, keepdim=True) - exact).abs() <= 1).all()
    assert (codes.max(1).values - codes.min(1).values <= 1).all()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_variance_is_that_of_stochastic_rounding(bits):
    x, count = torch.rand(256), 600
    y = draws_of(x, bits, count)
    base, step, inverse = parameters_of(x, bits)
    f = ((x.double() - base) * inverse) % 1
    expected = f * (1 - f) * step**2
    found = y.var(0)
    assert abs(found.sum() / expected.sum() - 1) < 0.05
    assert (found <= step**2 / 4 * (1 + 4.5 * math.sqrt(2 / count))).all()


def test_nearest_rounding_has_a_third_of_the_variance(key):
    x = torch.rand(1 << 14)
    errors = [(decode(encode(x, 4, key, stochastic=s)) - x).square().mean() for s in (False, True)]
    assert errors[0] / errors[1] == pytest.approx(0.5, rel=0.05)


def test_parameters_are_rounded_before_codes_are_made():
    """Codes made with exact parameters and decoded with bfloat16 ones would be biased."""
    x, count = torch.randn(512) * 0.1 + 10, 300
    y = draws_of(x, 8, count)
    _, step, _ = parameters_of(x, 8)
    error = (y.mean(0) - x.double()).square().mean().sqrt()
    assert error < 1.2 * step.max() / 2 / math.sqrt(count)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60)
@given(data=st.data())
def test_decoded_numbers_are_within_a_step_of_the_tensor(dtype, data):
    """So the largest element never wraps around."""
    bits, group = data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from([32, 64, 96]))
    scale = data.draw(st.sampled_from([1e-30, 6e-8, 1e-3, 1.0, 300.0, 3e4, 65504.0]))
    n = data.draw(st.integers(1, 200))
    seed = data.draw(st.integers(0, 2**32))
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(n, generator=random) * 2 - data.draw(st.sampled_from([0.0, 1.0, 2.0]))
    x = (x * scale).clamp(-65504, 65504).to(dtype)
    codes = encode(x, bits, Key(noise_state(seed), 1), group=group)
    y = decode(codes)
    base, step, _ = parameters_of(x, bits, group)
    assert y.dtype == dtype
    rounding = x.double().abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
    assert ((y.double() - x.double()).abs() <= step * (1 + 1e-6) + rounding + 2.0**-100).all()
    top = base + (2**bits - 1) * step
    rounding = torch.maximum(base.abs(), top.abs()) * torch.finfo(dtype).eps
    assert (y.double() >= base - rounding).all()
    assert (y.double() <= top + rounding).all()


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-100, 120))
def test_the_largest_noise_does_not_exceed_the_largest_code(bits, seed, exponent):
    random = torch.Generator().manual_seed(seed)
    x = torch.rand((64, 32), generator=random) * 2.0**exponent
    # steps that are exactly the range divided by the codes, too
    x[::2] = x[::2].bfloat16().float()
    x[::4, 0] = 0
    base, _, inverse = reference.parameters(x, bits, 32)
    one = 2 ** min(16, 23 - bits)
    codes = reference._rounded_sum(
        x - base, inverse.expand_as(x), torch.tensor(one), torch.tensor(one - 1)
    )
    assert int(codes.max()) < one << bits
    assert int(codes.min()) >= 0


def test_the_largest_half_precision_element_never_wraps():
    x = torch.randn(1 << 15).half()
    x.view(-1, 256)[:, 7] = x.view(-1, 256).amax(1) * 1.5
    for bits in (2, 4, 8):
        for tensor in range(10):
            y = decode(encode(x, bits, Key(noise_state(1), tensor)))
            _, step, _ = parameters_of(x, bits)
            assert ((y - x).abs() <= step * 1.001 + x.abs() * 2.0**-10).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.14159, 65504.0, 6e-8])
def test_constant_groups_are_finite(dtype, value, key):
    x = torch.full((70,), value).to(dtype)
    y = decode(encode(x, 4, key))
    assert torch.isfinite(y).all()
    assert ((y - x).abs() <= x.abs() * 2.0**-7).all()
    if value in (0.0, 1.0):
        assert torch.equal(y, x)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_numbers_on_a_grid_are_exact(bits, key):
    """Masks, one-hot tensors and integer codes with a power of two as scale lose nothing."""
    x = torch.randint(0, 2**bits, (1000,)).float() * 0.125
    x[::100], x[1::100] = 0, (2**bits - 1) * 0.125
    for dtype in DTYPES:
        assert torch.equal(decode(encode(x.to(dtype), bits, key)), x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_with_nan_decode_to_nan_and_are_counted(dtype, key):
    x = torch.randn(600).to(dtype)
    x[300], x[301] = math.nan, math.inf
    codes = encode(x, 4, key)
    y = decode(codes)
    assert torch.isnan(y[256:512]).all()
    assert torch.isfinite(y[:256]).all()
    assert torch.isfinite(y[512:]).all()
    assert codes.flags.dtype == torch.int32
    assert codes.flags.tolist() == [1]
    assert encode(torch.randn(600), 4, key).flags.tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS[1:])
def test_infinities_are_exact_and_cost_the_others_two_codes(dtype, bits, key):
    x = torch.randn(600).to(dtype)
    mask = torch.rand(600) < 0.3
    x[mask] = -math.inf
    x[300] = math.inf
    codes = encode(x, bits, key)
    y = decode(codes)
    assert codes.flags.tolist() == [0]
    assert torch.equal(y == -math.inf, x == -math.inf)
    assert torch.equal(y == math.inf, x == math.inf)
    inner = x.isfinite()
    assert 300 < inner.sum() < 500
    step = 1.02 * (x[inner].max() - x[inner].min()) / max(2**bits - 3, 1)
    assert ((y - x)[inner].abs() <= step + x[inner].abs() * 2.0**-8).all()
    assert len((y - x)[inner].unique()) > 50


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_groups_of_infinities_are_exact_at_any_width(value, key):
    for bits in BITS:
        x = torch.full((300,), value)
        x[::3] = -value
        assert torch.equal(decode(encode(x, bits, key)), x)


def test_one_bit_has_no_code_for_numbers_beside_infinities(key):
    x = torch.randn(600)
    x[300] = math.inf
    codes = encode(x, 1, key)
    assert torch.isnan(decode(codes)).tolist() == [False] * 256 + [True] * 256 + [False] * 88
    assert codes.flags.tolist() == [1]


def test_the_mean_of_draws_beside_infinities_is_the_tensor():
    x = torch.randn(256)
    x[::5] = -math.inf
    inner = x.isfinite()
    y = draws_of(x, 3, 2000)[:, inner]
    step = 1.02 * float(x[inner].max() - x[inner].min()) / 5
    error = (y.mean(0) - x[inner].double()).abs()
    assert (error <= 4.5 * step / 2 / math.sqrt(2000)).all()
    assert float(y.std(0).max()) > step / 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS[1:])
def test_elements_at_a_bound_decode_to_it_and_no_other_lies_beyond(dtype, bits, key):
    x = torch.tanh(torch.randn(2000) * 4).to(dtype)
    x[:256:2], x[1:256:2] = 1, -1
    x[256:512] = 0.3
    y = decode(encode(x, bits, key, bounds=(-1, 1)))
    ends = x.abs() == 1
    assert 128 < ends.sum() < 2000
    assert torch.equal(y[ends], x[ends])
    assert (y.abs() <= 1).all()
    step = 1.02 * 2 / max(2**bits - 3, 1)
    assert ((y - x).abs() <= step + 2.0**-7).all()


def test_elements_beyond_a_bound_decode_to_it(key):
    x = torch.tensor([-1e9, -200.0, -3.0, -1.0, 0.0, -math.inf])
    y = decode(encode(x, 8, key, bounds=(-104, 0)))
    assert y[[0, 1, 4, 5]].tolist() == [-104, -104, 0, -104]
    assert ((y - x)[2:4].abs() < 0.01).all()


def test_float64_beyond_float32_is_counted(key):
    x = torch.randn(600, dtype=torch.float64)
    x[3], x[300] = 1e60, -math.inf
    codes = encode(x, 4, key)
    assert codes.flags.tolist() == [1]
    assert torch.isnan(decode(codes)[:256]).all()
    assert float(decode(codes)[300]) == -math.inf


def test_a_range_beyond_float32_is_counted(key):
    codes = encode(torch.tensor([-3e38, 3e38]), 4, key)
    assert torch.isnan(decode(codes)).all()
    assert codes.flags.tolist() == [1]


def test_the_last_group_contains_no_padding(key):
    x = torch.rand(300) + 5
    codes = encode(x, 8, key)
    assert float(codes.params[1, 0]) >= 4.9
    assert ((decode(codes) - x).abs() < 1.1 * (1.1 / 255)).all()
    assert int(unpack(codes.data, 8)[300:].sum()) == 0
