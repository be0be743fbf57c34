"""Blocks found in the module tree."""

import pytest
from torch import nn

import actnn
from actnn.errors import ActNNError
from actnn.planning.blocks import BlockChoice, apply
from actnn.planning.units import find_units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU())])


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.layer1 = nn.Sequential(Block(), Block())
        self.layer2 = nn.Sequential(Block())
        self.head = nn.Linear(2, 2)


def paths(model):
    return [unit.path for unit in find_units(model)]


def test_blocks_are_repeated_siblings():
    assert paths(Stages()) == ["stem", "layer1.0", "layer1.1", "layer2.0", "head"]


def test_stages_in_a_sequential_are_not_blocks():
    model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert paths(model) == ["0.0", "0.1", "1.0", "1.1"]


def test_sequentials_of_leaves_are_blocks():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)])
    assert paths(model) == ["0", "1", "2"]


def test_without_blocks_the_children_are_units():
    assert paths(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == ["0", "1"]


def test_a_shared_module_is_one_unit():
    block = Block()
    assert paths(nn.Sequential(block, Block(), block)) == ["0", "1"]


@pytest.mark.parametrize("model", [Stages(), nn.Sequential(Block(), Block())])
def test_units_stay_whatever_is_chosen_for_them(model):
    units = find_units(model)
    saving = actnn.compress(model).actnn
    for way in range(len(units)):
        choices = [BlockChoice("recompute" if way == at else "keep") for at in range(len(units))]
        apply(saving, units, choices)
        assert find_units(model) == units


def test_a_leaf_has_no_units():
    with pytest.raises(ActNNError, match="to have submodules, got Linear"):
        find_units(nn.Linear(2, 2))
