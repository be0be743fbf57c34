"""Weights that are computed from parameters are weights: they are not rounded, and made once."""

import copy

import pytest
import torch
from actnn_models import gradients
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import actnn


class Counted(nn.Module):
    """Adds 1 to a buffer whenever a weight is made, and depends on it."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight):
        self.calls += 1
        return weight * self.calls


def pruned(layer):
    return prune.l1_unstructured(layer, "weight", 0.3)


KINDS = {
    "spectral": spectral_norm,
    "weight": weight_norm,
    "orthogonal": orthogonal,
    "pruned": pruned,
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_inputs_are_exact(kind):
    models = []
    for _ in range(2):  # a pruned model cannot be copied
        torch.manual_seed(0)
        layers = [KINDS[kind](nn.Linear(32, 32)) for _ in range(2)]
        models.append(nn.Sequential(*layers))
    x = torch.randn(8, 32)
    exact, ours = gradients(models[0], x), actnn.compress(models[1], bits=1, min_bytes=0)
    assert torch.equal(gradients(ours, x)[0], exact[0])
    reason = "attribute of its module" if kind == "pruned" else "computed weight"
    kept = [r for r in ours.actnn.records if r.reason == reason]
    assert len(kept) == 2
    assert all(r.held == r.nbytes == (0 if kind == "pruned" else 4096) for r in kept)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(3, 4, 3), (2, 3, 8, 8)), (nn.Linear(8, 4), (2, 8)), (nn.LayerNorm(8), (2, 8))],
    ids=str,
)
def test_a_forward_makes_each_weight_as_often_as_torch_does(layer, shape):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Identity(), copy.deepcopy(layer)), torch.randn(shape)
    parametrize.register_parametrization(model[1], "weight", Counted())
    ours = actnn.compress(copy.deepcopy(model), bits=8, min_bytes=0)
    x.requires_grad_()
    assert torch.equal(ours(x), model(x))
    assert torch.equal(*(m[1].parametrizations.weight[0].calls for m in (ours, model)))
    parametrize.remove_parametrizations(actnn.uncompress(ours)[1], "weight")


def test_casts_of_computed_weights_are_exact():
    model = nn.Sequential(nn.Linear(32, 32), weight_norm(nn.Linear(32, 32)))
    ours, x = actnn.compress(copy.deepcopy(model), bits=1, min_bytes=0), torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        exact, found = gradients(model, x)[0], gradients(ours, x)[0]
    assert torch.equal(found, exact)
    kept = [r for r in ours.actnn.records if r.reason == "computed weight"]
    assert [(r.module, r.dtype) for r in kept] == [("1", torch.bfloat16)]


def test_cached_weights_are_exact_in_every_step():
    model = nn.Sequential(weight_norm(nn.Linear(32, 32)))
    ours, x = actnn.compress(copy.deepcopy(model), bits=1, min_bytes=0), torch.randn(8, 32)
    expected = torch.autograd.grad(model(x.requires_grad_()).sum(), x)[0]
    with parametrize.cached():
        for _ in range(2):
            loss = ours(x).sum()
            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
            assert torch.equal(found, expected)
            assert "computed weight" in {r.reason for r in ours.actnn.records}


@pytest.mark.parametrize("computed", [weight_norm, spectral_norm])
def test_compiled_graphs_do_not_round_computed_weights(computed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(computed(nn.Linear(32, 32)) for _ in range(2)))
    x = torch.randn(8, 32, requires_grad=True)
    ours = actnn.compress(copy.deepcopy(model), bits=2, min_bytes=0)
    (exact,) = torch.autograd.grad(model(x).sum(), x)
    (found,) = torch.autograd.grad(torch.compile(ours, backend="aot_eager")(x).sum(), x)
    torch.testing.assert_close(found, exact)
