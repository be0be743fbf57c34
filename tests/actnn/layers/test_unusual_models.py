"""Unusual models as a whole: exact without rounding, close with codes, fitted to budgets."""

import copy
import re

import pytest
import torch
from torch import nn
from unusual_models import cases, distance, loss_of, whole_gradient

import actnn
from sweeps import first_of

NAMES = list(cases())


def made(name, size=1):
    torch.manual_seed(0)
    make, arguments = cases(size)[name]
    return make(), arguments


@pytest.fixture(params=first_of(NAMES, 6))
def case(request):
    return made(request.param)


def compressed(model, **settings):
    return actnn.compress(copy.deepcopy(model), min_bytes=0, **settings)


def test_without_rounding_gradients_are_those_of_torch(case):
    model, arguments = case
    exact = whole_gradient(copy.deepcopy(model), arguments)
    for settings in ({"bits": 32}, {"level": "L0"}, {"level": "swap"}):
        found = whole_gradient(compressed(model, **settings), arguments)
        assert found.keys() == exact.keys()
        assert all(torch.equal(found[name], exact[name]) for name in exact), settings


@pytest.mark.filterwarnings("ignore:Compression adds", "ignore:Level L3 uses")  # one batch
def test_codes_give_the_loss_of_torch_and_nearly_its_gradients(case):
    model, arguments = case
    exact = whole_gradient(copy.deepcopy(model), arguments)
    distances = {}
    for bits in (8, 4, 2):
        ours = compressed(model, bits=bits)
        found = whole_gradient(ours, arguments)
        assert torch.equal(found["loss"], exact["loss"])
        assert ours.actnn.held_bytes == 0
        distances[bits] = distance(exact, found)
    assert 0 < distances[8] < 0.03
    assert distances[8] < distances[4] < distances[2]
    adaptive = compressed(model, level="L3")
    for _ in range(6):
        found = whole_gradient(adaptive, arguments)
    assert all(value.isfinite().all() for value in found.values())


def test_nothing_is_stored_without_gradients(case):
    model, arguments = case
    ours = compressed(model).eval()
    with torch.no_grad():
        loss_of(ours, arguments)
    with torch.inference_mode():
        loss_of(ours, arguments)
    assert (ours.actnn.records, ours.actnn.held_bytes) == ([], 0)
    assert whole_gradient(ours.train(), arguments)["loss"].isfinite()


def smallest_budget(model, arguments, bits):
    with pytest.raises(actnn.ActNNError, match="budget to be at least") as error:
        actnn.fit(model, arguments, 1024, loss=loss_of, bits=bits)
    return int(re.search(r"at least (\d+) bytes", str(error.value))[1])


@pytest.mark.parametrize("name", first_of(NAMES, 2))
def test_the_smallest_budget_that_fit_names_is_one_that_it_keeps(name):
    model, arguments = made(name, 8 if name in ("custom", "rare", "spectral", "views") else 1)
    exact = whole_gradient(copy.deepcopy(model), arguments)
    budget = smallest_budget(model, arguments, ())
    assert not hasattr(model, "actnn")
    plan = actnn.fit(model, arguments, budget, loss=loss_of, bits=())
    assert plan.peak <= budget
    assert plan.noise == 0
    found = whole_gradient(model, arguments)
    assert torch.equal(found["loss"], exact["loss"])
    assert distance(exact, found) < 1e-6


def test_what_is_saved_between_units_belongs_to_the_unit_before():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.sin(layer(x)) * x
            return x

    model, x = Functional(), torch.randn(512, 64)
    exact = whole_gradient(copy.deepcopy(model), (x,))
    assert smallest_budget(model, (x,), (4,)) < 0.7 * smallest_budget(model, (x,), ())
    actnn.fit(model, (x,), smallest_budget(model, (x,), ()), loss=loss_of, bits=())
    assert distance(exact, whole_gradient(model, (x,))) == 0


def test_a_forward_that_differentiates_can_be_fitted_without_codes():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 1))

        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = self.inner(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return {"loss": force.square().mean() + energy.square().mean()}

    model, arguments = Force(), (torch.randn(512, 16),)
    exact = whole_gradient(copy.deepcopy(model), arguments)
    with pytest.raises(actnn.ActNNError, match=r"for fit: bits=\(\)"):
        actnn.fit(copy.deepcopy(model), arguments, "1 GiB", loss=loss_of)
    actnn.fit(model, arguments, "1 GiB", loss=loss_of, bits=())
    assert distance(exact, whole_gradient(model, arguments)) == 0


def test_a_model_that_calls_no_module_is_an_error_of_fit():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return x @ self.inner.weight

    with pytest.raises(actnn.ActNNError, match="forward of Alone to call submodules, got none"):
        actnn.fit(Alone(), torch.randn(2, 4), "1 GiB")
