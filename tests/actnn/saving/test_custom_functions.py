"""Tensors that a Function of the user saves: its backward may compare them, or divide by them."""

import pytest
import torch
from actnn_models import compressed_copy, gradients
from torch import nn
from torch.autograd import Function

import actnn


class RowMax(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.max(1, keepdim=True).values
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (x == y)


class Later(RowMax):
    """The same, with a context that is set up after forward."""

    @staticmethod
    def forward(x):
        return x.max(1, keepdim=True).values

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)


class Net(nn.Module):
    def __init__(self, function, before=lambda h: 0):
        super().__init__()
        self.a, self.function, self.before = nn.Linear(32, 128), function, before

    def forward(self, x):
        h = self.a(x)
        return self.before(h) + self.function.apply(h)


BEFORE = {"alone": lambda h: 0, "after another": lambda h: 0 * h.sin().sum(1, keepdim=True)}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("function", [RowMax, Later])
@pytest.mark.parametrize("settings", [{"bits": 2}, {"bits": 8}, {"level": "L3"}], ids=str)
def test_they_are_exact(function, before, settings):
    net, x = Net(function, BEFORE[before]), torch.randn(256, 32)
    ours = compressed_copy(net, **settings)
    for _ in range(4):  # with trials
        for a, b in zip(gradients(net, x), gradients(ours, x), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    records = ours.actnn.records
    assert "saved by a Function" in {record.reason for record in records}
    others = [r for r in records if r.choice.action == "compress"]
    assert len(others) == (before == "after another")  # the sine has codes


def test_a_choice_compresses_them():
    net, x = Net(RowMax), torch.randn(256, 32)
    ours = compressed_copy(net, bits=8)
    ours.actnn.set_choices({"": actnn.Choice("compress", 4)})
    ours(x).sum().backward()
    assert 4 in {record.choice.bits for record in ours.actnn.records}


def test_what_runs_inside_of_forward_is_its_own():
    """A Function may run a graph of its own in forward; what that saves is compressed as usual."""

    class Inner(Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = (ctx.x * 2).sin()
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, gradient):
            return torch.autograd.grad(ctx.y, ctx.x, gradient)[0]

    net, x = Net(Inner), torch.randn(256, 32)
    ours = compressed_copy(net, bits=8)
    for a, b in zip(gradients(net, x), gradients(ours, x), strict=True):
        assert (a - b).norm() < 0.02 * a.norm()
    assert "compressed" in {record.reason for record in ours.actnn.records}
