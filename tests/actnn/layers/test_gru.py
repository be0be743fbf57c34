"""nn.GRU runs its layers again in backward: gradients equal those of torch up to rounding."""

import copy

import pytest
import torch
from actnn_models import compressed_copy
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import actnn
from actnn.layers import gru as gru_layers
from actnn.saving import Choice

OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "two directions": {"bidirectional": True},
    "stack": {"num_layers": 3, "bidirectional": True, "batch_first": True},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def results(gru, x, hx=None):
    """Outputs, and gradients of everything, for one loss."""
    gru.zero_grad()
    leaves = [x.data if isinstance(x, PackedSequence) else x, *([] if hx is None else [hx])]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    given = PackedSequence(leaves[0], *x[1:]) if isinstance(x, PackedSequence) else leaves[0]
    y, h = gru(given, *leaves[1:])
    y = y.data if isinstance(y, PackedSequence) else y
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(2)) for t in (y, h)]
    loss = sum((t * w.to(t.dtype)).sum() for t, w in zip((y, h), weights, strict=True))
    loss.backward()
    return [y, h], [*(leaf.grad for leaf in leaves), *(p.grad for p in gru.parameters())]


def check(gru, ours, x, hx=None):
    (outputs, exact), (same, gradients) = results(gru, x, hx), results(ours, x, hx)
    tolerance = TOLERANCE[outputs[0].dtype]
    for a, b in zip(outputs, same, strict=True):
        assert torch.equal(a, b)
    assert len(exact) == len(gradients)
    for a, b in zip(exact, gradients, strict=True):
        assert (a - b).norm() <= tolerance * a.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("steps", [1, 7, 70])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_equal_those_of_torch(name, steps, dtype):
    gru = nn.GRU(5, 6, dtype=dtype, **OPTIONS[name])
    layers = gru.num_layers * (1 + gru.bidirectional)
    shape = (3, steps, 5) if gru.batch_first else (steps, 3, 5)
    check(gru, compressed_copy(gru), torch.randn(shape, dtype=dtype))
    check(
        gru,
        compressed_copy(gru),
        torch.randn(shape, dtype=dtype),
        torch.randn(layers, 3, 6, dtype=dtype),
    )


@pytest.mark.parametrize("sorted_", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_sequences_of_unequal_lengths(name, sorted_):
    gru = nn.GRU(5, 6, dtype=torch.float64, **OPTIONS[name])
    lengths = [9, 5, 5, 1] if sorted_ else [5, 9, 1, 5]
    x = pack_sequence(
        [torch.randn(n, 5, dtype=torch.float64) for n in lengths], enforce_sorted=sorted_
    )
    layers = gru.num_layers * (1 + gru.bidirectional)
    check(gru, compressed_copy(gru), x)
    check(gru, compressed_copy(gru), x, torch.randn(layers, 4, 6, dtype=torch.float64))
    assert pack_padded_sequence(torch.zeros(1, 1, 5), [1]).data.shape == (1, 5)


def test_only_inputs_of_layers_are_held():
    gru = nn.GRU(32, 32, 3, bidirectional=True)
    ours = compressed_copy(gru)
    x = torch.randn(50, 8, 32, requires_grad=True) * 1
    _kept = ours(x)
    between = 2 * 50 * 8 * 64 * 4
    states = 6 * 8 * 32 * 4
    assert ours.actnn.held_bytes == between + states
    assert ours.actnn.held_bytes < 0.15 * saved_by_torch(gru, x)


def saved_by_torch(gru, x):
    storages = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gru(x)
    return sum(nbytes for nbytes, _ in storages.values())


def test_a_choice_makes_it_lossy():
    gru = nn.GRU(32, 64, 2)
    ours = compressed_copy(gru)
    x = torch.randn(40, 4, 32)
    _, exact = results(gru, x)
    ours.actnn.set_choices({"": Choice("compress", 8)})
    _, rounded = results(ours, x)
    errors = [float((a - b).norm() / a.norm()) for a, b in zip(exact, rounded, strict=True)]
    assert 1e-5 < max(errors) < 0.05


def test_dropout_between_layers_has_exact_gradients():
    ours = compressed_copy(nn.GRU(4, 5, 2, dropout=0.5, dtype=torch.float64))
    x = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)

    def run(x):
        torch.manual_seed(7)
        return ours(x)[0]

    assert torch.autograd.gradcheck(run, (x,))
    first, second = run(x), ours(x)[0]
    assert not torch.equal(first, second)
    ours.eval()
    assert torch.equal(ours(x)[0], copy.deepcopy(ours)(x)[0])


def test_autocast_is_restored_in_backward(monkeypatch):
    seen, run = [], gru_layers._run

    def watched(*arguments, **named):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return run(*arguments, **named)

    monkeypatch.setattr(gru_layers, "_run", watched)
    gru = nn.GRU(8, 16, 2, bidirectional=True)
    grads = []
    for each in (gru, compressed_copy(gru, min_bytes=0)):
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = each(torch.ones(9, 3, 8))
        y.float().square().sum().backward()
        grads.append([p.grad for p in each.parameters()])
    assert seen == [(True, torch.bfloat16)] * 4
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 0.02 * a.norm()


def test_frozen_weights_and_backward_inside_of_the_context():
    ours = compressed_copy(nn.GRU(8, 16, 2))
    frozen = [ours.weight_hh_l0, ours.bias_ih_l1]
    for weight in frozen:
        weight.requires_grad_(False)
    x = torch.randn(9, 3, 8, requires_grad=True)
    ours(x)[0].sum().backward()
    outside = [p.grad for p in ours.parameters()]
    ours.zero_grad()
    with actnn.compressed(bits=1, min_bytes=0):  # it must not see the layers that run again
        with ours.actnn:
            y = ours(x)[0]
        y.sum().backward()
    assert all(weight.grad is None for weight in frozen)
    for a, p in zip(outside, ours.parameters(), strict=True):
        assert a is p.grad is None or torch.equal(a, p.grad)


def test_unbatched_sequences_and_plain_subclasses():
    class Mine(nn.GRU):
        pass

    gru = Mine(4, 5)
    ours = compressed_copy(gru)
    check(gru, ours, torch.randn(6, 4))
    check(gru, ours, torch.randn(6, 2, 4))
    assert isinstance(ours, Mine)
    with pytest.raises(RuntimeError, match="input"):
        ours(torch.randn(6, 2, 3, requires_grad=True))
