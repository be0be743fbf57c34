"""Packed sequences brought to all steps of all rows and back, as torch packs and pads them."""

import random

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from quant_gru.execution.sequence_layout import normalize
from quant_gru.parameters.schema import Shape

C = 3


def draw(seed):
    """A packed sequence of rows of random lengths, and they."""
    draw = random.Random(seed)
    N, longest = draw.randint(1, 9), draw.choice([1, 2, 7, 40])
    lengths = [draw.randint(1, longest) for _ in range(N)]
    x = torch.randn(max(lengths), N, C, generator=torch.Generator().manual_seed(seed))
    if draw.random() < 0.2:
        lengths = [max(lengths)] * N
    return pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False), lengths


def normalized(packed, hx=None):
    N = int(packed.batch_sizes[0])
    like = torch.zeros(1, device="cpu")
    shape = Shape(input_size=C, hidden_size=C, num_layers=1, bias=True, bidirectional=False)
    sequence = normalize(packed, hx, shape, False, like)
    assert sequence.x.shape == (len(packed.batch_sizes), N, C)
    return sequence


@pytest.mark.parametrize("seed", range(60))
def test_padding_and_packing_are_those_of_torch(seed):
    packed, lengths = draw(seed)
    sequence = normalized(packed)
    plain = PackedSequence(packed.data, packed.batch_sizes)
    padded, sizes = pad_packed_sequence(plain)
    assert torch.equal(sequence.x, padded)
    assert torch.equal(sequence.lengths, sizes)
    assert sorted(sequence.lengths.tolist()) == sorted(lengths)
    y = padded * 2 + 1  # more than the packed rows
    got, h_n = sequence.restore(y, y[:1], y.dtype)
    assert torch.equal(got.data, packed.data * 2 + 1)
    assert got.batch_sizes is packed.batch_sizes
    assert torch.equal(h_n, y[:1, :, :].index_select(1, packed.unsorted_indices))


@pytest.mark.parametrize("seed", range(10))
def test_gradients_pass(seed):
    packed, _ = draw(seed)
    data = packed.data.clone().requires_grad_()
    sequence = normalized(PackedSequence(data, packed.batch_sizes))
    y = sequence.x * 3
    out, _ = sequence.restore(y, y[:1].detach(), y.dtype)
    weights = torch.randn_like(data)
    (out.data * weights).sum().backward()
    assert torch.equal(data.grad, 3 * weights)


@pytest.mark.parametrize("sizes", [[0], [0, 0], [3, 2, 0, 0], [1], [4, 4, 4]])
def test_steps_without_rows(sizes):
    data = torch.randn(sum(sizes) + 2, C)
    sequence = normalized(PackedSequence(data, torch.tensor(sizes)))
    starts = [sum(sizes[:t]) for t in range(len(sizes))]
    for t, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        assert torch.equal(sequence.x[t, :size], data[start : start + size])
        assert (sequence.x[t, size:] == 0).all()
    assert sequence.lengths.tolist() == [sum(size > n for size in sizes) for n in range(sizes[0])]


def test_states_are_in_the_order_of_the_rows():
    packed = pack_padded_sequence(
        torch.randn(4, 3, C), torch.tensor([2, 4, 3]), enforce_sorted=False
    )
    hx = torch.randn(1, 3, C)
    sequence = normalized(packed, hx)
    assert torch.equal(sequence.h0, hx[:, [1, 2, 0]])
    assert torch.equal(sequence.restore(sequence.x, sequence.h0, hx.dtype)[1], hx)


def test_another_default_device_does_not_matter():
    packed, _ = draw(3)
    expected = normalized(packed)
    with torch.device("meta"):
        got = normalized(packed)
        data = got.restore(got.x, got.x[:1], got.x.dtype)[0].data
    assert torch.equal(got.x, expected.x)
    assert torch.equal(got.lengths, expected.lengths)
    assert torch.equal(data, packed.data)
