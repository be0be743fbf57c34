"""Steps that compare gradients take no more memory than the training that they watch."""

import gc
import warnings

import pytest
import torch
from torch import nn

import actnn
from actnn.adapting import trials
from actnn.planning.meter import HostMeter
from sweeps import first_of

quiet = pytest.mark.filterwarnings("ignore:Compression adds:actnn.ActNNWarning")
SETTINGS = [{"bits": 4}, {"level": "L3"}]


class Net(nn.Sequential):
    """A network whose activations are much larger than weights and batch."""

    def __init__(self):
        blocks = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU())]
        super().__init__(*blocks, nn.Linear(64, 4))
        self.sizes, self.limit = [], lambda: None

    def forward(self, x):
        self.sizes.append(len(x))
        for layer in self:
            x = layer(x)
            self.limit()
        return x


def steps_of(net, meter, steps):
    """Train; return what each step leaves and its peak."""
    found = []
    for _ in range(steps):
        meter.reset_peak()
        net.zero_grad()
        net(torch.randn(1024, 64)).square().mean().backward()
        gc.collect()
        found.append((meter.allocated(), meter.peak()))
    return found


def network(settings):
    torch.manual_seed(0)
    net = Net()
    return net if settings is None else actnn.compress(net, min_bytes=1024, **settings)


@quiet
@pytest.mark.parametrize("settings", first_of(SETTINGS, 1))
def test_a_trial_stays_below_a_step_without_compression(settings, monkeypatch):
    monkeypatch.setattr(trials, "SMALL", 0)
    (_, exact), *_ = measured(None)
    found = measured(settings)
    usual, last = found[-1]
    # What is kept for the trial is no more than the batches and the gradients of the outputs.
    assert all(left - usual <= 2 * 1024 * (64 + 4) * 4 + 4096 for left, _ in found)
    assert found[2][0] == usual  # the trial has let them go
    assert max(peak for _, peak in found) < exact
    assert last < exact


def measured(settings):
    net = network(settings)
    with HostMeter(net.parameters()) as meter:
        return steps_of(net, meter, 4)


@quiet
@pytest.mark.parametrize("settings", first_of(SETTINGS, 1))
def test_a_trial_takes_as_much_of_the_batch_as_fits(settings, monkeypatch):
    """Memory holds a step with codes, and nothing more."""
    monkeypatch.setattr(trials, "SMALL", 0)
    peak = max(peak for _, peak in measured(settings)[:2])  # the trial comes later
    net = network(settings)
    with HostMeter(net.parameters()) as meter:

        def limit():
            if meter.allocated() > peak:
                raise torch.OutOfMemoryError("out of memory")

        net.limit = limit
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Expected the forward of the model to run once more")
            steps_of(net, meter, 4)
    assert min(net.sizes) < 1024
    assert not net.actnn.adaptive or not net.actnn.adaptive._trials.failed
