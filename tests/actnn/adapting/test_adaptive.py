"""Bits per sample while a model is trained."""

import copy

import pytest
import torch
from torch import nn

import actnn
from actnn.adapting.adaptive import Adaptive
from actnn.allocation import Sensitivities


def adaptive_by_sample(net, bits=2):
    actnn.compress(net, bits=bits, min_bytes=0)
    net.actnn.adaptive = Adaptive(net, Sensitivities(bits), 256)
    return net


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 5),
    )


def train(net, x, steps):
    for _ in range(steps):
        net.zero_grad()
        net(x).square().mean().backward()


def test_samples_and_layers_get_different_bits_within_the_budget():
    net = adaptive_by_sample(model(), 3)
    scales = torch.logspace(-2, 1, 8).view(-1, 1, 1, 1)
    for _ in range(4):
        train(net, torch.randn(8, 3, 16, 16) * scales, 1)
    tensors = net.actnn.adaptive.statistics.tensors
    assert len({known.bits for known in tensors.values()}) > 1
    total = sum(known.bits * known.elements for known in tensors.values())
    assert total <= 3 * sum(known.elements for known in tensors.values()) + 1e-6


@pytest.mark.filterwarnings("ignore:Compression adds")
def test_tokens_share_the_bits_of_their_sample():
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    adaptive_by_sample(net)
    train(net, torch.randn(3, 40, 64), 3)
    tensors = net.actnn.adaptive.statistics.tensors
    assert {len(k.variance) for k in tensors.values() if k.variance is not None} == {3}
    assert net[2].weight.grad.isfinite().all()


def test_the_factor_of_a_linear_layer_does_not_depend_on_the_shape_of_the_batch():
    """Of tokens (N, T, C) the channels are the last dimension, not the second one."""
    net, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)), torch.randn(3, 40, 64)
    found = []
    for batch in (x.repeat(1, 4, 1), x.repeat(1, 4, 1).view(3, 16, 10, 64)):
        net = adaptive_by_sample(copy.deepcopy(net))
        train(net, batch, 2)
        found.append(net.actnn.adaptive.statistics.tensors["1:0"].variance)
    assert torch.allclose(found[0], found[1])


@pytest.mark.filterwarnings("ignore:Compression adds")  # one batch: its gradient has no variance
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.cfloat], ids=str)
def test_gradients_of_other_types(dtype):
    net = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 4, dtype=dtype))
    adaptive_by_sample(net)
    for _ in range(6):
        net(torch.randn(16, 8, dtype=dtype)).abs().square().sum().backward()
    energies = net.actnn.adaptive.statistics._energy
    assert {energy.dtype for energy in energies.values()} == {torch.float32}
    assert all(energy > 0 for energy in energies.values())


@pytest.mark.filterwarnings("ignore:Compression adds")
def test_a_copy_has_statistics_of_its_own():
    net = adaptive_by_sample(model())
    x = torch.randn(4, 3, 16, 16)
    train(net, x, 2)
    other = copy.deepcopy(net)
    train(other, x, 3)
    assert net.actnn.adaptive.statistics.steps == 2
    assert other.actnn.adaptive.statistics.steps == 5


def test_uncompress_removes_the_hooks():
    net = adaptive_by_sample(model())
    assert net[0]._forward_hooks
    actnn.uncompress(net)
    assert not any(module._forward_hooks for module in net.modules())


def test_too_much_noise_warns():
    net = adaptive_by_sample(nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)), 1)

    def run():
        for _ in range(6):
            train(net, torch.randn(16, 64), 1)

    with pytest.warns(actnn.ActNNWarning, match="Compression adds") as caught:
        run()
    assert len(caught) == 1
