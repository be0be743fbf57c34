"""What is held as it is: parameters, small tensors, and what has no gradient."""

import gc
import threading
import weakref

import pytest
import torch
from actnn_models import compressed_copy
from torch import nn

import actnn
from actnn.saving import Saving
from actnn.saving._native import Kept
from actnn.saving.active import pack_in_step

HUGE = 1 << 40  # as `min_bytes`: all tensors are small


class Net(nn.Module):
    """Layers that save parameters, buffers, statistics, integers and small activations."""

    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8) + 1)
        self.register_buffer("order", torch.randperm(8))

    def forward(self, x):
        hidden = self.hidden = torch.sigmoid(self.first(self.norm(x)))
        return self.second(hidden * self.scale)[:, self.order].square()


@pytest.mark.parametrize("name", ["second.weight", "scale", "order", "hidden"])
def test_in_place_changes_of_what_is_small_are_errors(name):
    model = actnn.compress(Net(), bits=2, min_bytes=HUGE)
    x = torch.randn(16, 8, requires_grad=True)
    for _ in range(5):  # also after the first steps, which learn
        model(x).sum().backward()
        loss = model(x).sum()
        with torch.no_grad():
            owner, _, last = name.rpartition(".")
            changed = getattr(model.get_submodule(owner), last)
            changed.copy_(changed.flip(0))
        with pytest.raises(RuntimeError, match="stay as it was"):
            loss.backward()


def test_small_tensors_give_the_gradients_of_torch_from_several_threads():
    torch.manual_seed(0)
    plain = Net().eval()
    model = compressed_copy(plain, bits=2, min_bytes=HUGE)
    model.eval()
    inputs = [torch.randn(16, 8, requires_grad=True) for _ in range(4)]
    expected = [torch.autograd.grad(plain(x).sum(), x)[0] for x in inputs]
    found = [[], [], [], []]

    def run(i):
        for _ in range(20):
            loss = model(inputs[i]).sum()
            first = torch.autograd.grad(loss, inputs[i], retain_graph=True)[0]
            found[i] += [first, *torch.autograd.grad(loss, inputs[i])]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    model(inputs[0]).sum().backward()  # the first steps learn
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, several in zip(expected, found, strict=True):
        assert len(several) == 40
        assert all(torch.equal(one, each) for each in several)
    gc.collect()
    assert model.actnn.held_bytes == 0


def test_what_is_kept_can_be_referred_to_weakly_and_is_not_made_by_others():
    x, saving = torch.randn(8), Saving(bits=4, min_bytes=HUGE)
    with saving:
        held = pack_in_step(x)
        assert type(held) is Kept
        assert held.held == saving.held_bytes == x.nbytes
        gone = weakref.ref(held)
        assert gone() is held
        del held
        assert gone() is None
        assert saving.held_bytes == 0
    with pytest.raises(TypeError):
        Kept()
    with pytest.raises(TypeError):
        Kept.unpack(x)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("views", ["conjugate", "negative"])
def test_views_that_negate_do_not_share_what_is_held(views, bits):
    x = torch.randn(4, 4, dtype=torch.complex64)
    of = torch.Tensor.conj
    if views == "negative":
        x, of = torch.randn(4, 4), torch._neg_view
    for tensors in ((x, of(x)), (of(x), x), (of(x).mT, x), (x, of(x)[1:])):
        w = torch.ones((), requires_grad=True)
        with Saving(bits=bits, min_bytes=0):
            held = [pack_in_step(each) for each in tensors]
            loss = sum((w * each).real.sum() for each in tensors)
        for packed, each in zip(held, tensors, strict=True):
            assert torch.equal(packed.unpack().resolve_conj(), each.resolve_conj())
        loss.backward()
        assert torch.allclose(w.grad, sum(each.real.sum() for each in tensors), atol=1e-5)


@pytest.mark.parametrize("bits", [8, 32])
def test_views_that_negate_are_not_rounded_with_the_memory_of_another_one(bits):
    x = torch.randn(64, 64, requires_grad=True)
    with Saving(bits=bits, min_bytes=0):
        y = x * 1
        loss = y.sin().sum() + 2 * torch._neg_view(y).exp().sum() + torch._neg_view(y).sin().sum()
    loss.backward()
    assert (x.grad + 2 * (-x.detach()).exp()).abs().max() < 0.2


def test_a_part_of_a_large_storage_is_copied_once():
    saving, x = Saving(bits=8), torch.randn(64, 1024, requires_grad=True)
    with saving:
        part = (x * 1)[:, -1]
        loss = part.sin().sum() + part.cos().sum() + torch._neg_view(part).sin().sum()
    assert [r.held for r in saving.records] == [part.nbytes, 0, part.nbytes]
    assert saving.records[1].reason == "shared with 0"
    loss.backward()
    expected = -x.detach()[:, -1].sin()  # the derivatives of the sines cancel
    assert torch.allclose(x.grad[:, -1], expected, atol=1e-6)


def test_a_negative_view_of_a_large_storage_is_not_shared():
    saving, x = Saving(bits=8), torch.randn(64, 1024, requires_grad=True)
    with saving:
        part = (x * 1)[:, -1]
        loss = torch._neg_view(part).sin().sum() + part.sin().sum() + part.exp().sum()
        assert "shared" not in " ".join(r.reason for r in saving.records)
    loss.backward()
    assert torch.allclose(x.grad[:, -1], x.detach()[:, -1].exp(), atol=1e-5)


def test_a_kept_tensor_whose_memory_is_replaced_is_not_shared():
    a, other = torch.randn(512), torch.randn(512)
    x = torch.ones(512, requires_grad=True)
    with Saving(bits=8, min_bytes=HUGE):
        first = (x * a).sum()
        a.data = other  # like torch, backward of the first product sees this
        several = [torch.full((512,), float(i)) for i in range(8)]  # one may be where `a` was
        rest = sum((x * each).sum() for each in several)
    (first + rest).backward()
    assert torch.allclose(x.grad, other + 28)


@pytest.mark.parametrize("min_bytes", [0, HUGE])
def test_memory_of_dropped_graphs_is_used_again(min_bytes):
    x = torch.ones(512, requires_grad=True)
    with Saving(bits=8, min_bytes=min_bytes):
        total = 0
        for i in range(50):
            (x * torch.full((512,), float(i))).sum()  # a graph that nobody needs
            total = total + (x * torch.full((512,), float(i))).sum()
    total.backward()
    assert torch.equal(x.grad, torch.full((512,), 1225.0))


class Varying(nn.Module):
    """Saves other tensors, in another order, in each of three kinds of steps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, 32) for n in (32, 32, 48))
        self.kind = 0

    def forward(self, x):
        if self.kind == 1:
            x = torch.cat([x, x[:, :16].sin()], 1)
            return self.layers[2](x).double().sin()
        for layer in self.layers[: 2 - self.kind // 2]:
            x = torch.tanh(layer(x.reshape(-1, 32)))
        return x.half().float().t().sin().view(32, -1)


def test_steps_that_save_other_tensors_than_the_last_one_are_as_the_first():
    torch.manual_seed(0)
    plain = Varying()
    choices = {"layers.0": actnn.Choice("compress", 3), "layers.1": actnn.Choice("keep")}
    settings = {"bits": 4, "min_bytes": 2048, "stochastic": False}
    found = {}
    for kinds in ([0], [1], [2], [0, 1, 2, 1, 0, 2, 2, 1, 1, 0]):
        saving = Saving(model=plain, **settings)
        saving.set_choices(choices)
        for kind in kinds:
            for rows in (64, 24):
                plain.kind = kind
                x = torch.linspace(-1, 1, rows * 32).view(rows, 32).requires_grad_()
                with saving:
                    loss = plain(x).sum()
                records = saving.records
                (gradient,) = torch.autograd.grad(loss, x)
                before = found.setdefault((kind, rows), (records, gradient))
                assert before[0] == records
                assert torch.equal(before[1], gradient)
    assert {r.reason for records, _ in found.values() for r in records} >= {"compressed", "small"}
