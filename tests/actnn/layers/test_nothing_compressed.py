"""Training in which nothing can be compressed says so, once."""

import copy
import warnings

import pytest
import torch
from torch import nn

import actnn


class Task(nn.Module):
    """As a LightningModule: the step calls a child."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return self.net(x)

    def training_step(self, x):
        return self.net(x).square().mean()


class Lazy(nn.Module):
    """A forward that is a generator."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(2):
            x = self.net(x)
            yield x


def test_a_model_that_is_not_called_is_a_warning_that_comes_once():
    model, x = actnn.compress(Task(), bits=4, min_bytes=0), torch.randn(4, 8)
    loss = model.training_step(x)
    with pytest.warns(actnn.ActNNWarning, match=r"not self\.net\(x\); or compress .*\('net'\)"):
        loss.backward()
    model.training_step(x).backward()  # warnings are errors here
    actnn.compress(model, bits=4)
    with pytest.warns(actnn.ActNNWarning, match="the compressed Task itself"):
        model.training_step(x).backward()


@pytest.mark.parametrize("how", ["call", "context", "uncompressed", "exact", "plan", "copy"])
def test_what_is_no_reason_to_warn(how):
    model, x = Task(), torch.randn(4, 8)
    actnn.compress(model, level="L0" if how == "exact" else "L2", min_bytes=0)
    if how == "call":
        model(x).square().mean().backward()
    elif how == "context":
        with model.actnn:
            loss = model.training_step(x)
        loss.backward()
    elif how == "uncompressed":
        actnn.uncompress(model)
    elif how == "plan":
        actnn.uncompress(model)
        batch = torch.randn(64, 8)
        actnn.fit(model, batch, "1 GiB", bits=())
    elif how == "copy":
        model = copy.deepcopy(model)
        model(x)
    model.training_step(x).backward()
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks)


def test_a_forward_that_works_later_is_a_warning():
    model, x = actnn.compress(Lazy(), bits=4, min_bytes=0), torch.randn(4, 8)
    with pytest.warns(actnn.ActNNWarning, match="before it returns, got a generator.*'net'"):
        result = model(x)
    list(result)[-1].sum().backward()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(x)
