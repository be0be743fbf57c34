"""Native code on a CPU returns the bytes of the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same_codes import check_flat, check_samples, random_tensor

from actnn.codec import Key, _native, encode, noise_state
from actnn.codec.codes import DTYPES
from actnn.codec.cpu import run


@pytest.fixture(params=["fastest", "portable"])
def _variant(request):
    _native.use_only_portable(request.param == "portable")
    yield
    _native.use_only_portable(False)


SIZES = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 512, 1000, 1025, 4173]))
GROUPS = st.sampled_from([32, 64, 96, 256, 512, 1024])


@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(1, 9))
@settings(max_examples=10)
@given(n=SIZES, group=GROUPS, stochastic=st.booleans(), seed=st.integers(0, 1000))
def test_native_code_returns_the_same_bytes(dtype, bits, n, group, stochastic, seed):
    check_flat(run, random_tensor(n, dtype, seed), bits, group, stochastic)


@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10)
@given(samples=st.integers(1, 6), m=st.integers(1, 300), seed=st.integers(0, 1000))
def test_bits_of_samples_return_the_same_bytes(dtype, samples, m, seed):
    x = random_tensor(samples * m, dtype, seed).view(samples, m)
    bits = torch.randint(1, 9, (samples,), generator=torch.Generator().manual_seed(seed))
    check_samples(run, x, bits, 64, max(int(bits.sum()) - seed % 3, 0))


def test_every_half_precision_number_is_converted_exactly():
    words = torch.arange(65536).to(torch.int16).view(torch.float16)
    finite = words[torch.isfinite(words)]
    for x in finite.split(4096):
        check_flat(run, x, 8, 32, False)


def test_threads_divide_the_groups():
    x = torch.randn(300_000)
    codes = encode(x, 4, Key(noise_state(1), 2))
    torch.set_num_threads(2)
    assert torch.equal(encode(x, 4, Key(noise_state(1), 2)).data, codes.data)


def test_more_samples_than_16_bits_can_count():
    x = torch.randn(70_000, 1)
    bits = torch.arange(70_000) % 8 + 1
    check_samples(run, x, bits, 32, int(bits.sum()))
