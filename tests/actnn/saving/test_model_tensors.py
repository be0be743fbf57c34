"""Parameters and buffers are alive anyway, also if they are not those of the step before."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import actnn


class Net(nn.Module):
    """Layers that save weights, views of weights, detached ones and statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 16),
        )
        self.register_buffer("scale", torch.rand(16) + 1)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x))) * self.scale
        for layer in [m for name, m in self.named_children() if name.startswith("extra")]:
            x = layer(x)
        return F.linear(x, self.second.weight.detach()) + self.second(x)


def replace_parameter(model):
    model.first.weight = nn.Parameter(torch.randn(16, 16))


def replace_data(model):
    model.second.weight.data = torch.randn(16, 16)


def replace_buffer(model):
    model.scale = torch.rand(16)


def add_layer(model):
    model.extra = nn.Linear(16, 16)


def replace_layer(model):
    model.second = nn.Linear(16, 16)


def remove_layer(model):
    add_layer(model)
    model(torch.randn(64, 16, requires_grad=True)).sum().backward()
    del model.extra


def tie(model):
    model.second.weight = model.first.weight


def freeze(model):
    model.first.requires_grad_(False)


def convert(model):
    model.double().float()


CHANGES = [
    replace_parameter,
    replace_data,
    replace_buffer,
    add_layer,
    replace_layer,
    remove_layer,
    tie,
    freeze,
    convert,
]


def saved(model, x):
    """What a step saves, and its gradient."""
    for each in model.parameters():
        each.grad = None
    model(x).square().sum().backward()
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    records = [(r.module, r.shape, r.reason, r.nbytes, r.held) for r in model.actnn.records]
    return records, grads


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_saves_what_a_new_one_does(change):
    torch.manual_seed(0)
    x = torch.randn(64, 16, requires_grad=True)
    model = actnn.compress(Net(), bits=32, min_bytes=0)
    for _ in range(3):
        saved(model, x)
    change(model)
    fresh = actnn.compress(
        copy.deepcopy(actnn.uncompress(copy.deepcopy(model))), bits=32, min_bytes=0
    )
    records, grads = saved(model, x)
    expected, exact = saved(fresh, x)
    if change in (add_layer, replace_layer):  # paths of new modules are not known yet
        records, expected = [r[1:] for r in records], [r[1:] for r in expected]
    assert records == expected
    assert all(map(torch.equal, grads, exact))
    assert {"parameter", "buffer"} <= {reason for *_, reason, _, _ in records}


def test_a_replaced_parameter_is_freed():
    model = actnn.compress(Net(), bits=8, min_bytes=0)
    x = torch.randn(64, 16)
    saved(model, x)
    old = weakref.ref(model.first.weight)
    model.first.weight.grad = None
    replace_parameter(model)
    assert old() is None
