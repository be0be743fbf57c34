"""compress() in place: what stays as it was, copies, levels and errors."""

import copy
import io
import pickle

import pytest
import torch
from actnn_models import Block, compressed_copy, conv_input, conv_net, gradients
from torch import nn

import actnn
from actnn.layers.levels import LEVELS
from actnn.planning.blocks import BlockChoice, apply
from actnn.planning.units import find_units, units_that_run
from actnn.saving import Choice


class PlainReLU(nn.ReLU):
    """A subclass that changes nothing."""


class SelfAttention(nn.Module):
    """torch's attention asks whether query, key and value are one tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class OtherReLU(nn.ReLU):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


def test_parameters_state_identity_and_hooks_stay():
    model, x = conv_net(), conv_input()
    before, modules = model.state_dict(), list(model.modules())
    classes, calls = [type(module) for module in modules], []
    model[2].register_forward_hook(lambda *_: calls.append("relu"))
    model.register_forward_pre_hook(lambda *_: calls.append("root"))
    assert actnn.compress(model, bits=4, min_bytes=0) is model
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(before[name].data_ptr() == after[name].data_ptr() for name in before)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert all(isinstance(module, cls) for module, cls in zip(modules, classes, strict=True))
    assert isinstance(model[2], nn.ReLU)
    assert type(model[2]) is not nn.ReLU
    assert type(model[2]).__name__ == "ReLU"
    model(x)
    assert calls == ["root", "relu"]
    actnn.uncompress(model)
    assert [type(module) for module in model.modules()] == classes
    assert "actnn" not in model.__dict__
    assert actnn.uncompress(model) is model


def test_outputs_are_exact_at_every_level():
    model, x = conv_net().eval(), conv_input().requires_grad_()
    for level in LEVELS:
        assert torch.equal(model(x), compressed_copy(model, level=level)(x))


def test_levels_differ_in_what_they_hold():
    held = {}
    for level in LEVELS:
        model = compressed_copy(conv_net(), level=level)
        _loss = model(conv_input())
        held[level] = model.actnn.held_bytes
    assert held["L2.2"] < held["L2.1"] < held["L2"] < held["L1"] < held["L1.1"] < held["L0"]
    assert held["L3"] == held["L2.2"]
    with pytest.raises(actnn.ActNNError, match=r"nearest is 'L2\.1'"):
        actnn.compress(conv_net(), level="L2.11")
    with pytest.raises(actnn.ActNNError, match=r"torch\.nn\.Module"):
        actnn.compress(lambda x: x)


def test_subclasses_of_modules():
    model = nn.Sequential(nn.Linear(8, 8), PlainReLU(), nn.Linear(8, 8), OtherReLU())
    ours, x = compressed_copy(model, bits=8), torch.randn(4, 8)
    ours(x)
    masks = [r for r in ours.actnn.records if r.reason == "1-bit mask"]
    assert [record.module for record in masks] == ["1"]
    assert type(ours[3]) is OtherReLU
    exact = gradients(model, x)
    lossless = compressed_copy(model, bits=32)
    assert all(torch.equal(a, b) for a, b in zip(exact, gradients(lossless, x), strict=True))


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, index):
            return self.head(torch.tanh(self.embed(index)))

    model, index = Tied(), torch.randint(20, (4, 6))
    ours = compressed_copy(model, bits=8)
    assert ours.head.weight is ours.embed.weight
    grads = []
    for each in (model, ours):
        each(index).square().sum().backward()
        grads.append(each.embed.weight.grad)
    assert (grads[0] - grads[1]).norm() < 0.02 * grads[0].norm()
    kept = {record.reason for record in ours.actnn.records if record.shape == (16, 20)}
    assert kept <= {"view of a parameter"}


def test_copies_and_pickles_work_alone():
    model, x = compressed_copy(conv_net(), bits=32), conv_input()
    gradients(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    exact = gradients(copy.deepcopy(model), x)
    for each in copies:
        assert each.actnn is not model.actnn
        again = gradients(each, x)
        assert all(torch.equal(a, b) for a, b in zip(exact, again, strict=True))
        assert each.actnn.model is each
        assert type(actnn.uncompress(each)) is nn.Sequential


def test_a_layer_alone_can_be_compressed():
    layer = actnn.compress(nn.ReLU(), min_bytes=0)
    x = torch.randn(64, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, (x > 0).float())
    assert layer.actnn.records[0].held == 8


def test_compressing_again_changes_the_settings():
    model = compressed_copy(conv_net(), bits=8)
    first = model.actnn
    first.set_choices({"0": Choice("keep")})
    actnn.compress(model, bits=2, min_bytes=0)
    assert model.actnn is not first
    assert model.actnn.is_uniform  # choices go, too
    assert model.actnn.bits == 2
    assert type(model).__mro__.count(nn.Sequential) == 1


def test_methods_other_than_forward_run_in_the_context():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = conv_net()

        def forward(self, x):
            return self.layers(x)

        def loss(self, x):
            return self.layers(x).square().mean() + self(x).mean()

    model, x = compressed_copy(Model(), bits=2), conv_input()
    model.loss(x).backward()
    once = len(model.actnn.records)  # of the call of the model itself
    with model.actnn:
        loss = model.loss(x)
    assert len(model.actnn.records) > 2 * once
    assert model.actnn.held_bytes > 0
    loss.backward()
    assert model.actnn.held_bytes == 0


def test_models_that_cannot_be_compressed_are_errors_and_stay_as_they_are():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.actnn = nn.ReLU()

    replaced, named = conv_net(), Named()
    replaced.forward = torch.autocast("cpu", torch.bfloat16)(replaced.forward)
    cases = [
        (3, "to be a torch.nn.Module, got int"),
        (replaced, "of its class, got one that was set on this Sequential"),
        (torch.compile(conv_net(), backend="eager"), "set on this OptimizedModule"),
        (named, "'actnn' to be free"),
    ]
    for model, message in cases:
        with pytest.raises(actnn.ActNNError, match=message):
            actnn.compress(model)
    with pytest.raises(actnn.ActNNError, match="Module, got int"):
        actnn.uncompress(3)
    assert type(named.actnn) is nn.ReLU
    assert type(replaced[2]) is nn.ReLU


def test_a_level_that_rounds_nothing_takes_no_bits():
    for level in ("L0", "swap"):
        with pytest.raises(actnn.ActNNError, match=f"no bits for level '{level}'.*got 4"):
            actnn.compress(conv_net(), bits=4, level=level)


def test_on_a_cpu_codes_that_would_move_to_host_memory_are_there():
    x, held = conv_input(), {}
    for level in ("L3", "L4", "L5"):
        model = compressed_copy(conv_net(), level=level)
        gradients(model, x)
        held[level] = actnn.report(model).held
    assert held["L3"] == held["L4"] == held["L5"]


def test_a_recomputed_module_gets_the_same_tensor_twice():
    model = nn.Sequential(nn.Linear(8, 16), SelfAttention(), nn.Linear(16, 4))
    x = torch.randn(6, 3, 8)
    exact = gradients(copy.deepcopy(model), x)
    ours = compressed_copy(model, bits=32)
    ours.actnn.set_choices({"1.inner": Choice("recompute")})
    assert all(torch.equal(a, b) for a, b in zip(exact, gradients(ours, x), strict=True))


def test_recomputed_modules_hold_only_their_input():
    model = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(2, 16, 32)
    ours = compressed_copy(model, bits=32)
    exact = gradients(model, x)
    ours.actnn.set_choices({"0": Choice("recompute"), "2": Choice("recompute", 8)})
    _loss = ours(x)
    inside = {record.module for record in ours.actnn.records if record.module[:1] in "02"}
    assert inside == {"0", "2"}
    assert [r.choice.bits for r in ours.actnn.records if r.module == "2" and r.held] == [8]
    ours.actnn.set_choices({"0": Choice("recompute"), "2": Choice("recompute")})
    same = gradients(ours, x)
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))
    ours.actnn.set_choices({})
    _loss = ours(x)
    assert "0.qkv" in {record.module for record in ours.actnn.records}


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("changed", [False, True])
def test_modules_are_recomputed_from_codes_of_inputs_with_large_channels(bits, changed):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            y = x * 1
            result = self.block(y)
            if changed and self.training:
                y.mul_(1)
            return result

    model = nn.Sequential(nn.Linear(32, 32), Residual())
    with torch.no_grad():
        model[0].weight[3] *= 50
    x = torch.randn(8, 16, 32)
    exact = gradients(model.eval(), x)  # PyTorch refuses what is changed
    ours = compressed_copy(model.train(), bits=bits)
    ours.actnn.set_choices({"1.block": Choice("recompute", bits), "0": Choice("keep")})
    first, second = gradients(ours, x), gradients(ours, x)
    assert not all(torch.equal(a, b) for a, b in zip(exact, second, strict=True))
    # The step that checks the module has the exact input, if that is still there.
    same = all(torch.equal(a, b) for a, b in zip(exact, first, strict=True))
    assert same != changed


@pytest.mark.parametrize("plain", [False, True])
def test_recomputed_normalizations_update_their_statistics_once(plain):
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model, x = nn.Sequential(block, nn.BatchNorm2d(4)), torch.randn(4, 3, 8, 8)
    ours = compressed_copy(model, bits=32)
    if plain:
        choices = [BlockChoice("recompute"), BlockChoice("keep")]
        apply(ours.actnn, find_units(ours), choices)
    else:
        ours.actnn.set_choices({"0": Choice("recompute")})
    for _ in range(3):
        exact, same = gradients(model, x), gradients(ours, x)
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, ours.get_buffer(name)), name


def test_modules_that_change_what_they_depend_on_are_not_recomputed():
    block = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU())
    model, x = nn.Sequential(block, nn.Linear(8, 2)), torch.randn(4, 8)
    ours = compressed_copy(model, bits=32)
    ours.actnn.set_choices({"0": Choice("recompute")})
    with pytest.raises(actnn.ActNNError, match="Sequential, whose forward changes '_u'"):
        ours(x)
    assert [bool(unit.once) for unit in units_that_run(find_units(model), lambda: model(x))] == [
        True,
        False,
    ]


def test_held_bytes_are_those_of_codes_and_masks():
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())))
    held = {}
    for bits in (32, 4, 2):
        ours = compressed_copy(model, bits=bits)
        _loss = ours(torch.randn(512, 64))
        held[bits] = ours.actnn.held_bytes
    inputs, mask = 512 * 64 * 4, 512 * 64 // 8
    assert held[32] == 5 * inputs + 6 * mask
    assert held[4] == 5 * (inputs // 8 + inputs // 256) + 6 * mask
    assert held[2] == 5 * (inputs // 16 + inputs // 256) + 6 * mask


def test_print_says_what_is_compressed():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.GELU())
    plain = repr(model)
    assert repr(actnn.compress(model)).startswith("Sequential(\n  actnn: 4 bits\n  (0): Sequential")
    for settings, text in (
        ({"level": "L3"}, "actnn: 2 bits on average"),
        ({"level": "L3", "bits": 3}, "actnn: 3 bits on average"),
        ({"bits": 32}, "actnn: lossless"),
        ({"level": "L0"}, "actnn: lossless"),
    ):
        assert text in repr(actnn.compress(model, **settings))
    model.actnn.set_choices({"0": Choice("recompute")})
    assert "actnn: choices by module" in repr(model)
    assert "(0): Sequential(\n    actnn: recomputed in backward\n" in repr(model)
    assert repr(actnn.uncompress(model)) == plain
    assert repr(actnn.compress(nn.GELU("tanh"))) == "GELU(approximate='tanh', actnn: 4 bits)"


@pytest.mark.parametrize("bits", [32, 4])
def test_dropout_can_keep_the_masks_of_torch(bits):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.gru = nn.Dropout(0.3), nn.GRU(16, 16, 2, dropout=0.3)

        def forward(self, x):
            return self.gru(self.drop(x * 2))[0]

    model, x = Net(), torch.randn(8, 4, 16)
    results = {}
    for name, each in {
        "plain": model,
        "torch": compressed_copy(model, bits=bits, dropout="torch"),
        "seed": compressed_copy(model, bits=bits),
    }.items():
        torch.manual_seed(3)
        results[name] = each(x.requires_grad_())
    assert torch.equal(results["plain"], results["torch"])
    assert not torch.equal(results["plain"], results["seed"])
    torch.manual_seed(3)
    exact = gradients(model, x)
    torch.manual_seed(3)
    ours = gradients(compressed_copy(model, bits=32, dropout="torch"), x)
    assert all(torch.equal(a, b) for a, b in zip(exact, ours, strict=True))
    with pytest.raises(actnn.ActNNError, match="dropout to be 'seed' or 'torch', got 'none'"):
        actnn.compress(model, dropout="none")
