"""Units that are compiled: the choices apply to what the compiler saves."""

import pytest
import torch
from torch import nn

import actnn
from actnn.planning.blocks import BlockChoice, apply, compile_units
from actnn.planning.units import find_units, units_that_run


def test_choices_have_words():
    words = {
        BlockChoice("keep"): "keep",
        BlockChoice("compress", 32): "lossless",
        BlockChoice("compress", 4): "4 bits",
        BlockChoice("compress", 4, fused=True): "4 bits fused",
        BlockChoice("recompute"): "recompute",
        BlockChoice("recompute", 8): "recompute 8 bits",
        BlockChoice("keep", memory=0.5): "compiled for 50%",
        BlockChoice("offload"): "offload",
    }
    assert {choice: str(choice) for choice in words} == words


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")
def test_one_compiled_form_serves_all_bits():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), nn.Tanh())
    x = torch.randn(128, 64, requires_grad=True)
    expected = torch.autograd.grad(net(x * 1).square().sum(), net[0][0].weight)[0]
    saving = actnn.compress(net, min_bytes=0).actnn
    units = find_units(net)
    compile_units(units)
    held, errors = {}, {}
    for bits in (32, 8, 4):
        apply(saving, units, [BlockChoice("compress", bits)] * 2)
        found = torch.autograd.grad(net(x * 1).square().sum(), net[0][0].weight)[0]
        held[bits] = sum(record.held for record in saving.records)
        errors[bits] = float((found - expected).norm() / expected.norm())
    assert held[32] > 3 * held[8] > 5 * held[4]
    assert errors[32] < 1e-5 < errors[8] < errors[4] < 0.1
    assert len(net[0]._actnn_compiled.forms) == 1
    assert list(actnn.uncompress(net).state_dict()) == [
        "0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias",
    ]  # fmt: skip


@pytest.mark.parametrize("bits", [None, 32])
def test_modules_that_write_to_their_input_are_not_recomputed(bits):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    )
    x = torch.randn(4, 3, 12, 12)
    net(x).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    saving = actnn.compress(net, bits=32, min_bytes=0).actnn
    units = units_that_run(find_units(net), lambda: net(x))
    assert [unit.once for unit in units] == [False, False, True, False]
    apply(saving, units, [BlockChoice("recompute", bits)] * 4)
    net.zero_grad()
    net(x).square().sum().backward()
    for p, gradient in zip(net.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)
