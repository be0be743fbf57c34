"""Rules know autograd nodes and operators by name. A name that does not exist is never found."""

import re

import pytest
import torch

from actnn.saving import (
    attention,
    comparisons,
    divisors,
    exclusions,
    graph_divisors,
    groups,
    norm_limits,
    sides,
)

NEWEST = "2.13"  # in which all exist
OWN = {"_DerivativeBackward"}  # of `actnn.layers`
NODES = attention, comparisons, divisors, exclusions, groups, norm_limits, sides


def names_in(module):
    for value in vars(module).values():
        if isinstance(value, (str, set, frozenset, dict, list, tuple)):
            values = [*value, *value.values()] if isinstance(value, dict) else value
            for name in [value] if isinstance(value, str) else values:
                if isinstance(name, str):
                    yield name


@pytest.mark.skipif(torch.__version__ < NEWEST, reason="a torch that has fewer nodes")
@pytest.mark.parametrize("module", NODES, ids=lambda module: module.__name__)
def test_autograd_nodes_exist(module):
    found = {name for name in names_in(module) if re.fullmatch(r"\w+Backward\d?", name)} - OWN
    kinds = {re.sub(r"\d$", "0", name) for name in found}  # numbers tell variants apart
    assert found
    assert not {kind for kind in kinds if not hasattr(torch._C._functions, kind)}


@pytest.mark.skipif(torch.__version__ < NEWEST, reason="a torch that has fewer operators")
def test_operators_exist():
    sets = [value for value in vars(graph_divisors).values() if isinstance(value, (set, frozenset))]
    sets += [exclusions._NONLINEAR, exclusions._INFINITE]
    found = {name for each in sets for name in each} - {"getitem"}
    known = {
        name
        for space in (torch.ops.aten, torch.ops.prims)
        for name in found
        if hasattr(space, name)
    }
    assert found == known
