"""Codes are compared with exact tensors once, where the model runs."""

import copy
import warnings

import pytest
import torch
from torch import nn

import actnn
from actnn.adapting.trials import Trial

CE = nn.functional.cross_entropy


class Steep(nn.Module):
    def __init__(self, steep):
        super().__init__()
        self.a, self.b, self.steep = nn.Linear(32, 128), nn.Linear(128, 10), steep

    def forward(self, x):
        return self.b(self.steep(self.a(x)))


class Waves(nn.Module):
    """A function with a steep derivative that divides by nothing."""

    def forward(self, h):
        return torch.sin(200 * h)


class WavesOfWaves(nn.Module):
    def forward(self, h):
        return torch.cos(torch.sin(h))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        y = x + block(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        y = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            (y + ctx.block(y)).backward(dy)  # adds to `grad` of the block's parameters
        return y.grad, None


class Reversible(nn.Module):
    """Its backward calls another one, as that of Reformer does."""

    def __init__(self):
        super().__init__()
        self.a, self.block, self.b = nn.Linear(32, 128), nn.Linear(128, 128), nn.Linear(128, 10)

    def forward(self, x):
        return self.b(_Reversed.apply(self.a(x), self.block))


def train(net, steps=4):
    for _ in range(steps):
        net.zero_grad()
        CE(net(torch.randn(256, 32)), torch.randint(10, (256,))).backward()


@pytest.mark.parametrize("settings", [{"bits": 8}, {"bits": 4}, {"level": "L3"}], ids=str)
@pytest.mark.parametrize("inside", [False, True])
def test_wrong_codes_warn_and_name_the_tensor(settings, inside):
    torch.manual_seed(0)
    waves = Waves()
    net = Steep(waves if inside else waves.forward)
    actnn.compress(net, min_bytes=0, **settings)
    with pytest.warns(actnn.ActNNWarning, match="Codes of 8 bits change the gradient") as caught:
        train(net)
    text = " ".join(str(w.message) for w in caught if "Codes of" in str(w.message))
    assert ("from 'steep'" if inside else "from ('', ") in text
    assert not any("would add" in str(w.message) for w in caught)


@pytest.mark.parametrize("settings", [{"bits": 8}, {"bits": 5}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("batch", [1, 256])
def test_ordinary_codes_do_not_warn(settings, batch):
    torch.manual_seed(0)
    net = Steep(nn.GELU())
    actnn.compress(net, min_bytes=0, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Codes of")
        warnings.filterwarnings("ignore", "Compression adds")
        for _ in range(4):
            CE(net(torch.randn(batch, 32)), torch.randint(10, (batch,))).backward()


@pytest.mark.parametrize("settings", [{"bits": 8}, {"level": "L3"}], ids=str)
def test_a_backward_that_calls_another_one_adds_nothing_to_the_gradient(settings):
    torch.manual_seed(0)
    net = Reversible()
    exact = copy.deepcopy(net)
    actnn.compress(net, min_bytes=0, **settings)
    runs = []
    net.block.register_forward_hook(lambda *_: runs.append(1))
    for _ in range(4):
        x, y = torch.randn(256, 32), torch.randint(10, (256,))
        for each in (net, exact):  # gradients accumulate over the steps
            CE(each(x), y).backward()
        for mine, theirs in zip(net.block.parameters(), exact.block.parameters(), strict=True):
            assert (mine.grad - theirs.grad).norm() <= 0.3 * theirs.grad.norm()
    assert len(runs) > 8  # forward and backward of a step run the block, trials do so again


@pytest.mark.parametrize("level", [None, "L3"])
def test_names_of_warnings_are_keys(level):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), WavesOfWaves(), nn.GELU(), nn.Linear(128, 10))
    actnn.compress(net, level=level, min_bytes=0)
    net(torch.randn(256, 32))
    with pytest.raises(actnn.ActNNError, match="tensor that the last step has compressed"):
        net.actnn.set_choices({"1:9": actnn.Choice("keep")})
    net.actnn.set_choices({name: actnn.Choice("keep") for name in ("1:0", "2:d0")})
    net(torch.randn(256, 32))
    found = {(r.module, r.choice.action) for r in net.actnn.records if r.nbytes > 1 << 16}
    assert ("2", "keep") in found
    assert ("2", "compress") not in found
    ours = [r for r in net.actnn.records if r.module == "1" and r.nbytes > 1 << 16]
    assert [r.choice.action for r in ours] == ["keep", "compress"]


@pytest.mark.parametrize("key", [("1", 0), ("1", 99), ("", -1)])
def test_an_index_that_fits_no_record_is_an_error(key):
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 10))
    actnn.compress(net, min_bytes=0)
    net.actnn.set_choices({key: actnn.Choice("keep")})
    with pytest.raises(actnn.ActNNError, match="to be that of a record of"):
        net(torch.randn(256, 32))
    net(torch.randn(256, 32))  # said once


def test_what_is_named_can_be_kept():
    torch.manual_seed(0)
    net = Steep(Waves())
    actnn.compress(net, bits=8, min_bytes=0)
    net.actnn.set_choices({"steep": actnn.Choice("keep")})
    train(net)  # warnings are errors here
    assert net.actnn.adaptive is None


class Outliers(nn.Module):
    """A linear layer whose input has some elements far from the others."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(64, 64)

    def forward(self, x):
        far = torch.ones_like(x)
        far[:, 0] = 1000
        return self.read(x * far) / 100


@pytest.mark.parametrize("place", [1, 2])
def test_the_warning_of_equal_bits_names_the_module_that_makes_most_noise(place):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)]
    layers.insert(place, Outliers())
    net = actnn.compress(nn.Sequential(*layers, nn.Linear(64, 8)), bits=2, min_bytes=1024)

    def run():
        for _ in range(10):
            net(torch.randn(64, 64)).square().sum().backward()
            net.zero_grad()

    with pytest.warns(actnn.ActNNWarning, match=f"most comes from '{place}.read' ") as caught:
        run()
    assert len(caught) == 1


def test_the_search_for_the_worst_tensor_takes_few_steps(monkeypatch):
    runs, gradient = [], Trial.gradient

    def counted(*arguments):
        runs.append(arguments)
        return gradient(*arguments)

    monkeypatch.setattr(Trial, "gradient", counted)
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32) for _ in range(64)]
    net = nn.Sequential(*layers[:40], Waves(), *layers[40:], nn.Linear(32, 10))
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(32))
    actnn.compress(net, min_bytes=0, bits=8)
    with pytest.warns(actnn.ActNNWarning, match="most comes from '40'"):
        train(net, 3)
    assert len(runs) <= 11  # two for the comparison, and one for each halving of 66 modules
