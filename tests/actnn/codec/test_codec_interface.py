"""`encode` and `decode`: shapes, strides, sizes, errors, and ranges of groups."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actnn.codec import Key, bytes_of, decode, encode, group_ranges, noise_state
from actnn.codec.codes import DTYPES
from actnn.codec.packing import pack, unpack
from actnn.errors import ActNNError


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 6), max_size=4),
    order=st.permutations(range(4)),
    dtype=st.sampled_from(DTYPES),
    bits=st.integers(1, 8),
    group=st.sampled_from([32, 96, 256]),
)
def test_shapes_strides_and_sizes(shape, order, dtype, bits, group):
    key = Key(noise_state(3), 5)
    order = [d for d in order if d < len(shape)]
    x = torch.randn([shape[d] for d in order]).to(dtype).permute(np.argsort(order).tolist())
    assert list(x.shape) == shape
    codes = encode(x, bits, key, group=group)
    y = decode(codes)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    if x.numel():
        assert y.stride() == x.stride()
    assert codes.nbytes == bytes_of(x.numel(), bits, group)
    assert codes.nbytes == codes.data.untyped_storage().nbytes() + (
        codes.params.untyped_storage().nbytes()
    )
    in_memory = x.permute(order).contiguous()
    assert torch.equal(encode(in_memory, bits, key, group=group).data, codes.data)
    assert torch.equal(decode(encode(in_memory, bits, key, group=group)), y.permute(order))


def test_the_sizes_are_those_of_the_documents():
    for bits in range(1, 9):
        assert bytes_of(1 << 20, bits) * 8 == (1 << 20) * (bits + 0.125)
    assert bytes_of(0, 2) == 0
    assert bytes_of(1, 2) == 8 + 4
    assert bytes_of(257, 4, 256) == 9 * 16 + 2 * 4


def test_channels_last_is_encoded_without_a_copy(key):
    x = torch.randn(2, 8, 5, 7).bfloat16().to(memory_format=torch.channels_last)
    codes = encode(x, 4, key)
    assert torch.equal(codes.data, encode(x.permute(0, 2, 3, 1).reshape(-1), 4, key).data)
    assert decode(codes).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "view",
    [lambda x: x[::2], lambda x: x[:, 3:], lambda x: x[:1].expand(4, 8), lambda x: x.t()[1:]],
)
def test_tensors_with_gaps_are_copied(view, key):
    x = view(torch.randn(6, 8))
    codes = encode(x, 8, key)
    assert torch.equal(codes.data, encode(x.contiguous(), 8, key).data)
    assert torch.equal(decode(codes), decode(encode(x.contiguous(), 8, key)))


def test_negated_views_are_resolved(key):
    x = torch.complex(torch.randn(50), torch.randn(50)).conj().imag
    assert x.is_neg()
    assert torch.equal(encode(x, 4, key).data, encode(x.clone(), 4, key).data)


def test_gradients_are_not_recorded(key):
    x = torch.randn(100, requires_grad=True)
    codes = encode(torch.nn.Parameter(x), 4, key)
    assert not codes.data.requires_grad
    assert not codes.params.requires_grad
    assert not decode(codes).requires_grad


@pytest.mark.parametrize("bits", range(1, 9))
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), eights=st.integers(0, 9))
def test_packed_codes_are_a_stream_of_bits(bits, seed, eights):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, 8 * eights)
    stream = (codes[:, None] >> np.arange(bits) & 1).astype(np.uint8).reshape(-1)
    expected = np.packbits(stream, bitorder="little")
    packed = pack(torch.from_numpy(codes), bits)
    assert np.array_equal(packed.numpy(), expected)
    assert np.array_equal(unpack(packed, bits).numpy(), codes)


def test_bits_of_samples_are_those_of_separate_tensors(key):
    """Without noise, each sample has the codes that it has alone; groups never cross samples."""
    x = torch.randn(5, 3, 7, 9)
    bits = torch.tensor([1, 3, 8, 5, 2], dtype=torch.int32)
    codes = encode(x, bits, key, stochastic=False, capacity=19)
    alone = [encode(x[i], int(bits[i]), key, stochastic=False) for i in range(5)]
    assert torch.equal(codes.data, torch.cat([each.data for each in alone]))
    assert torch.equal(decode(codes), torch.stack([decode(each) for each in alone]))
    assert codes.nbytes == sum(each.nbytes for each in alone)


def test_samples_beyond_the_capacity_are_nan_and_counted(key):
    x = torch.randn(4, 300)
    codes = encode(x, torch.tensor([4, 4, 4, 1]), key, capacity=9)
    y = decode(codes)
    assert torch.isfinite(y[:2]).all()
    assert torch.isnan(y[2:]).all()
    assert codes.flags.tolist() == [4]


def test_bits_of_samples_of_other_orders_of_memory(key):
    x = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    bits = torch.tensor([8, 8, 8])
    y = decode(encode(x, bits, key))
    assert y.stride() == x.stride()
    assert (y - x).abs().max() < 0.1
    last = x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)  # samples are not blocks
    assert torch.equal(encode(last, bits, key).data, encode(last.contiguous(), bits, key).data)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)])
def test_empty_tensors_with_bits_of_samples(shape, key):
    x = torch.empty(shape)
    y = decode(encode(x, torch.full(shape[:1], 4), key))
    assert y.shape == x.shape


def test_group_ranges(key):
    x = torch.randn(3, 5, 20).to(memory_format=torch.contiguous_format)
    rows = x.flatten(1)
    expected = [sum(float(g.max() - g.min()) ** 2 for g in row.split(32)) for row in rows]
    torch.testing.assert_close(group_ranges(x, 32), torch.tensor(expected))
    assert group_ranges(torch.empty(3, 0)).tolist() == [0, 0, 0]
    assert group_ranges(torch.empty(0, 4)).shape == (0,)
    assert torch.isnan(group_ranges(torch.tensor([[1.0, float("nan")]]))).all()


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.int(), 2), "Expected x to be float16, bfloat16, float32 or float64, got torch.int32"),
        ((X.to_sparse(), 2), "Expected x to be strided, got torch.sparse_coo"),
        ((X, 0), r"Expected bits to be in 1..8, got 0"),
        ((X, 9), r"Expected bits to be in 1..8, got 9"),
        ((X, torch.tensor([1])), r"Expected bits to have one number per sample of x \(2, 3\)"),
        ((X, torch.tensor([1.0, 2.0])), "Expected bits to be integers, got torch.float32"),
    ],
)
def test_errors_of_arguments(arguments, message, key):
    with pytest.raises(ActNNError, match=message):
        encode(*arguments, key)


def test_errors_of_options(key):
    with pytest.raises(ActNNError, match="Expected group to be a positive multiple of 32, got 48"):
        encode(X, 2, key, group=48)
    with pytest.raises(ActNNError, match=r"Expected bounds to be \(least, largest\), got \(1, 0\)"):
        encode(X, 2, key, bounds=(1, 0))
    with pytest.raises(ActNNError, match=r"Expected no bounds with bits of samples, got \(0, 1\)"):
        encode(X, torch.tensor([1, 2]), key, bounds=(0, 1))
    with pytest.raises(ActNNError, match="Expected no capacity for equal bits, got 3"):
        encode(X, 2, key, capacity=3)
    with pytest.raises(ActNNError, match="Expected capacity to be at least 0, got -1"):
        encode(X, torch.tensor([1, 2]), key, capacity=-1)
    with pytest.raises(ActNNError, match=r"Expected the key's state to be int64 \(2,\), got"):
        encode(X, 2, Key(torch.zeros(2), 0))
    with pytest.raises(ActNNError, match=r"Expected the key's tensor to be in 0..2\^32-1, got -1"):
        encode(X, 2, Key(key.state, -1))
    with pytest.raises(ActNNError, match="Expected the key to be on cpu, got meta"):
        encode(X, 2, Key(key.state.to("meta"), 0))
