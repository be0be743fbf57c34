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


class Node:
    """Has the attributes of a kind of autograd nodes, also of one that runs on GPUs alone."""

    def __init__(self, name):
        self._kind = getattr(torch._C._functions, name)

    def __getattr__(self, name):
        if name.startswith("_saved_") and hasattr(self._kind, name):
            return torch.ones(1)
        raise AttributeError(f"{self._kind.__name__} has no {name}")


def kinds_of(table):
    """What a table says of nodes, by the name of each node that this torch has."""
    return {name: rule for name, rule in table.items() if hasattr(torch._C._functions, name)}


def test_nodes_have_what_rules_read():
    for name, norm in kinds_of(norm_limits.NORMS).items():
        hash(norm.settings(Node(name)))
        norm.statistics(Node(name))
    for name, divisor in kinds_of(divisors._DIVISORS).items():
        divisor(Node(name), lambda: torch.ones(1))
    for name, intervals in kinds_of(sides._INTERVALS).items():
        intervals(Node(name))
    for name, order in kinds_of(comparisons._NORMS).items():
        getattr(Node(name), order)


def test_attention_runs_again_with_what_its_nodes_have():
    kernels = kinds_of(attention._KERNELS)
    assert kernels
    for name, kernel in kernels.items():
        for each in set(attention._names(kernel)) - set(attention._SETTINGS):
            getattr(Node(name), f"_saved_{each}")
