"""Repeated calls with packed rows: in native code, with what batch sizes say at each call."""

import copy

import pytest
import torch
from gru_helpers import C, H, quantized, seeded
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from quant_gru import QuantGRUError
from quant_gru.execution import sequence_layout
from quant_gru.execution.sequence_layout import packing_on
from quant_gru.kernels.cpu import executor
from quant_gru.modules import frozen
from quant_gru.modules import gru as gru_module

CPU = torch.device("cpu")
LENGTHS = [2, 5, 3]

needs_native = pytest.mark.skipif(
    executor.chosen() == executor.REFERENCE, reason="not for the reference executor"
)


def packed(lengths=LENGTHS, seed=1):
    x = seeded(max(lengths), len(lengths), C) * seed
    return pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)


def layout_of(sequence):
    return packing_on(CPU)(sequence).layout


def step(gru, sequence, hx=None):
    data = sequence.data.clone().requires_grad_()
    y, h_n = gru(PackedSequence(data, *sequence[1:]), hx)
    (y.data.square().sum() + h_n.sum()).backward()
    return [y.data.detach(), h_n.detach(), data.grad]


def same(ours, theirs):
    assert all(map(torch.equal, ours, theirs))


@needs_native
@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("kind", ["train", "eval", "no_grad", "frozen"])
@pytest.mark.parametrize("with_hx", [False, True])
def test_native_code_takes_packed_sequences(monkeypatch, kind, with_hx):
    gru = quantized(num_layers=2, bidirectional=True).train(kind == "train")
    gru = gru.freeze() if kind == "frozen" else gru
    hx = torch.randn(4, 3, H) if with_hx else None

    def run():
        with torch.set_grad_enabled(kind in ("train", "eval")):
            y, h_n = gru(packed(), hx)
        return y, h_n

    expected, expected_last = run()
    run()
    for module in (gru_module, frozen):
        monkeypatch.setattr(module, "normalize", None)
    y, h_n = run()
    assert type(y) is PackedSequence
    same((*y[:1], h_n), (*expected[:1], expected_last))
    for ours, given in zip(y[1:], expected[1:], strict=True):
        assert torch.equal(ours, given)


@pytest.mark.parametrize("trains", [False, True])
def test_batch_sizes_are_read_at_each_call(trains):
    """Writes that no version counts, to one tensor, between sizes of as many rows."""
    gru, sequence = quantized().train(trains), packed()
    other = torch.tensor([3, 2, 2, 2, 1])
    results = []
    for sizes in (sequence.batch_sizes.clone(), other) * 3:
        sequence.batch_sizes.numpy()[:] = sizes.numpy()
        results.append(step(gru, sequence))
        same(results[-1], step(copy.deepcopy(gru), sequence))
    assert not torch.equal(results[0][0], results[1][0])
    same(results[0], results[4])
    same(results[1], results[5])


@pytest.mark.usefixtures("looks")
def test_what_a_prepared_call_does_not_take():
    gru, sequence = quantized().eval(), packed()
    for _ in range(3):
        expected = gru(sequence)[0].data
    sizes, order = sequence.batch_sizes, sequence.sorted_indices
    more = sequence._replace(data=torch.cat([sequence.data, sequence.data]))
    assert torch.equal(gru(more)[0].data, expected)
    wide = torch.stack([sizes, sizes], 1)[:, 0]
    assert torch.equal(gru(sequence._replace(batch_sizes=wide))[0].data, expected)
    wrong = {
        "not to be negative and not to grow": {"batch_sizes": sizes.flip(0)},
        "int64 of shape": {"batch_sizes": sizes.int()},
        "got torch.uint64": {"batch_sizes": sizes.view(torch.uint64)},
        "10 rows": {"data": sequence.data[:-1]},
        "sorted_indices .* in 0..2": {"sorted_indices": order + 1},
        "sorted_indices .* int64 of shape": {"sorted_indices": order[:2]},
        "unsorted_indices .* in 0..2": {"unsorted_indices": order - 1},
        "features": {"data": sequence.data[:, 1:]},
    }
    for message, fields in wrong.items():
        for _ in range(2):
            with pytest.raises(QuantGRUError, match=message):
                gru(sequence._replace(**fields))
    assert torch.equal(gru(sequence)[0].data, expected)


def test_function_transforms():
    """Wrapped tensors have no address: reading one ended the process, or failed in torch."""
    gru, sequence = quantized(), packed()

    def loss(data, *rest):
        return gru(PackedSequence(data, *(rest or sequence[1:])))[0].data.square().sum()

    data = sequence.data.clone().requires_grad_()
    loss(data).backward()
    sequence_layout._kept_layout.cache_clear()
    assert torch.equal(torch.func.grad(loss)(sequence.data), data.grad)
    several = torch.stack([sequence.data, sequence.data * 2])
    losses = torch.stack([loss(each) for each in several])
    assert torch.allclose(torch.vmap(loss)(several), losses)
    with pytest.raises(RuntimeError, match="NYI"):
        torch.func.functionalize(loss)(sequence.data)
    for transform in (torch.func.functionalize, torch.func.grad):
        with pytest.raises(QuantGRUError, match=r"batch_sizes .* torch\.func"):
            transform(loss)(*sequence)
    # layouts made meanwhile serve other calls
    expected, data.grad = data.grad, None
    loss(data).backward()
    assert torch.equal(data.grad, expected)


def test_layouts_are_kept():
    sequence_layout._kept_layout.cache_clear()
    with torch.inference_mode():
        first = layout_of(packed())
    assert not first.is_inference()
    assert layout_of(packed(seed=2)) is first
    assert layout_of(packed([5, 2, 3])) is first
    second = layout_of(packed([4, 4]))
    assert (layout_of(packed()), layout_of(packed([4, 4]))) == (first, second)
    others = [layout_of(packed([n + 1, n])) for n in range(1, 40)]
    assert len({id(each) for each in others}) == len(others)
    kept = sequence_layout._kept_layout.cache_info()
    assert kept.currsize == kept.maxsize
    assert layout_of(packed()) is not first
    assert torch.equal(layout_of(packed()), first)
    long = packed([9000])
    assert layout_of(long) is not layout_of(long)
    # a copy to a GPU is made on the current stream, and not waited for by others
    made = [sequence_layout._kept_layout(CPU, stream, bytes([2] + 7 * [0]), 2) for stream in (1, 2)]
    assert made[0] is not made[1]
    assert made[0].tolist() == made[1].tolist() == [1, 1, 0, 2]
