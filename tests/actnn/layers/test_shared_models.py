"""Models that share modules, or contain each other: what each keeps, and what is said."""

import pytest
import torch
from torch import nn

import actnn
from actnn.layers.root import Root
from actnn.planning.blocks import BlockChoice, apply
from actnn.planning.units import find_units
from actnn.saving import Choice
from actnn.saving.module_classes import is_swapped
from actnn.saving.recompute import Recomputed


class Headed(nn.Module):
    """A backbone with a head of its own."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


def backbone():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.GELU()))


def pair():
    shared = backbone()
    return Headed(shared), Headed(shared)


def types(model):
    return [type(module) for module in model.modules()]


def reasons(model):
    model(torch.randn(64, 8)).square().mean().backward()
    return [(record.module, record.reason) for record in model.actnn.records]


def test_the_second_of_two_models_can_be_undone():
    first, second = pair()
    plain = types(second)
    actnn.compress(first, bits=4, min_bytes=0)
    forms, before = types(first), reasons(first)
    actnn.compress(second, bits=2, min_bytes=0)
    assert types(first) == forms
    assert reasons(second) == before
    actnn.uncompress(second)
    assert types(first) == forms
    assert reasons(first) == before
    assert type(second) is Headed
    actnn.uncompress(first)
    assert types(second) == plain


def test_choices_of_the_first_come_back_when_the_second_is_undone():
    first, second = pair()
    actnn.compress(first, bits=4, min_bytes=0)
    first.actnn.set_choices({"backbone.2": Choice("recompute")})
    with pytest.warns(actnn.ActNNWarning, match=r"Headed shares 'backbone\.2' with Headed"):
        actnn.compress(second, bits=4, min_bytes=0)
    assert not is_swapped(first.backbone[2], Recomputed)
    actnn.uncompress(second)
    assert is_swapped(first.backbone[2], Recomputed)
    actnn.uncompress(first)
    assert type(first.backbone[2]) is nn.Sequential


def test_a_plan_that_cannot_come_back_is_a_warning():
    first, second = pair()
    actnn.compress(first, bits=4, min_bytes=0)
    units = find_units(first)
    apply(first.actnn, units, [BlockChoice("recompute")] * len(units))
    with pytest.warns(actnn.ActNNWarning, match="choices for it no longer hold; call fit"):
        actnn.compress(second, bits=4, min_bytes=0)


def test_a_model_around_another_replaces_its_settings_and_says_so():
    model = Headed(backbone())
    actnn.compress(model.backbone, bits=2, min_bytes=0)
    with pytest.warns(actnn.ActNNWarning, match="replaces the settings of 'backbone'"):
        actnn.compress(model, bits=4, min_bytes=0)
    assert not is_swapped(model.backbone, Root)


def test_a_model_inside_of_another_has_settings_of_its_own():
    model = actnn.compress(Headed(backbone()), bits=4, min_bytes=0)
    forms = types(model.backbone)[1:]
    actnn.compress(model.backbone, bits=2, min_bytes=0)
    model(torch.randn(64, 8)).square().mean().backward()
    assert {r.choice.bits for r in model.backbone.actnn.records if r.reason == "compressed"} == {2}
    assert {r.module for r in model.actnn.records} == {"head"}
    actnn.uncompress(model.backbone)
    assert types(model.backbone)[1:] == forms
    actnn.compress(model.backbone, bits=2, min_bytes=0)
    with pytest.warns(actnn.ActNNWarning, match="also undoes the compression of 'backbone'"):
        actnn.uncompress(model)
    assert types(model) == types(Headed(backbone()))


def test_a_part_of_a_compressed_model_is_not_undone_in_silence():
    model = actnn.compress(Headed(backbone()), bits=4, min_bytes=0)
    forms = types(model)
    with pytest.warns(actnn.ActNNWarning, match="'backbone', .*of a compressed Headed"):
        actnn.uncompress(model.backbone)
    assert types(model) == forms


def test_a_wrapper_around_a_compressed_model_is_undone_without_a_warning():
    model = Headed(backbone())
    actnn.compress(model.backbone, bits=4, min_bytes=0)
    actnn.uncompress(model)  # warnings are errors here
    assert types(model) == types(Headed(backbone()))
