"""Units that are compiled: the choices apply to what the compiler saves."""

import pytest
import torch
from torch import nn

import actnn
from actnn.planning import blocks
from actnn.planning.blocks import BlockChoice, apply, as_run, compile_units
from actnn.planning.units import Unit, find_units, units_that_run


def test_choices_have_words():
    words = {
        BlockChoice("keep"): "keep",
        BlockChoice("compress", 32): "lossless",
        BlockChoice("compress", 4): "4 bits",
        BlockChoice("compress", 4, fused=True): "4 bits fused",
        BlockChoice("recompute"): "recompute",
        BlockChoice("recompute", 8): "recompute 8 bits",
        BlockChoice("keep", memory=0.5): "compiled for 50%",
        BlockChoice("keep", whole=True): "compiled as one",
        BlockChoice("keep", memory=0.5, whole=True): "compiled as one for 50%",
        BlockChoice("compress", 4, fused=True, whole=True): "4 bits fused compiled as one",
        BlockChoice("offload"): "offload",
    }
    assert {choice: str(choice) for choice in words} == words


def test_units_run_what_they_can():
    """Only units of several modules are compiled, and only pure ones recomputed."""
    single, block = nn.Tanh(), nn.Sequential(nn.Tanh())
    units = [Unit("a", single), Unit("b", block), Unit("c", single, once="it counts")]
    part, fused = BlockChoice("keep", memory=0.5), BlockChoice("compress", 4, fused=True)
    whole = BlockChoice("keep", memory=0.5, whole=True)
    keep, recompute = BlockChoice("keep"), BlockChoice("recompute", 8)
    assert as_run(units, [part] * 3) == (keep, part, keep)
    assert as_run(units, [fused] * 3) == (
        BlockChoice("compress", 4),
        fused,
        BlockChoice("compress", 4),
    )
    assert as_run(units, [recompute] * 3) == (recompute, recompute, keep)
    assert as_run(units, [whole] * 3) == (whole,) * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")
def test_one_compiled_form_serves_all_bits():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), nn.Tanh())
    x = torch.randn(128, 64, requires_grad=True)
    expected = torch.autograd.grad(net(x * 1).square().sum(), net[0][0].weight)[0]
    saving = actnn.compress(net, min_bytes=0).actnn
    units = find_units(net)
    compile_units(net, units)
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


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")
def test_a_model_runs_compiled_as_one_or_by_blocks(monkeypatch):
    compiled = []

    def backend_of(form):
        def backend(graph, inputs):
            compiled.append((form, sum(n.op == "call_function" for n in graph.graph.nodes)))
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        return backend

    monkeypatch.setattr(blocks, "_backend", backend_of)
    torch.manual_seed(0)
    net = nn.Sequential(
        *[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)], nn.Linear(64, 8)
    )
    x = torch.randn(128, 64)
    weight = net[0][0].weight
    expected = torch.autograd.grad(net(x).square().sum(), weight)[0]
    saving = actnn.compress(net, min_bytes=0).actnn
    units = find_units(net)
    compile_units(net, units)
    one, by_block = BlockChoice("keep", memory=0.5, whole=True), BlockChoice("keep")
    fused = BlockChoice("compress", 8, fused=True, whole=True)
    forms = {one: [(0.5, None)], by_block: [(1.0, None)], fused: [(1.0, 8)]}
    for choice in (one, by_block, fused, by_block, one):
        apply(saving, units, [choice] * 3)
        compiled.clear()
        found = torch.autograd.grad(net(x).square().sum(), weight)[0]
        assert {form for form, _ in compiled} <= set(forms[choice])
        if choice.whole and compiled:
            assert compiled == [(choice.form, 5)]  # one graph of all operations
        error = float((found - expected).norm() / expected.norm())
        assert 0 < error < 0.1 if choice is fused else error == 0
    assert not compiled  # the last was compiled before
    actnn.uncompress(net)
    assert [type(each) for each in net.modules()].count(nn.Sequential) == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")
def test_compiled_code_runs_again_after_a_report(monkeypatch):
    ran = []

    def backend(graph, inputs):
        run = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return lambda *args: ran.append(1) or run(*args)

    monkeypatch.setattr(blocks, "_backend", lambda form: backend)
    net = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 8))
    x = torch.randn(128, 64)
    saving = actnn.compress(net, min_bytes=0).actnn
    units = find_units(net)
    compile_units(net, units)
    for whole in (True, False):
        apply(saving, units, [BlockChoice("keep", whole=whole)] * 2)
        report = actnn.report(net, lambda: net(x).square().sum())
        assert 0 < report.held < report.peak
        assert not ran
        net(x).square().sum().backward()
        assert ran == [1]
        ran.clear()
    net = actnn.compress(nn.Sequential(nn.Linear(64, 64), nn.GELU()), min_bytes=0)
    compiled = torch.compile(net, backend=backend)
    assert actnn.report(net, lambda: compiled(x).square().sum()).held
    compiled(x).sum().backward()
    assert ran == [1]


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
    assert [bool(unit.once) for unit in units] == [False, False, True, False]
    apply(saving, units, [BlockChoice("recompute", bits)] * 4)
    net.zero_grad()
    net(x).square().sum().backward()
    for p, gradient in zip(net.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)
