"""The meter of a CPU counts storages of tensors."""

import torch
from torch import nn

from actnn.planning.meter import HostMeter
from actnn.planning.timeline import LOSS, START, record
from actnn.planning.units import find_units

KIB = 1024


def test_storages_count_once_and_until_they_are_released():
    known = torch.zeros(256)
    with HostMeter([known, known.view(2, 128)]) as meter:
        assert meter.allocated() == KIB
        a = torch.ones(256) + known
        assert meter.allocated() == 2 * KIB
        assert meter.peak() == 3 * KIB  # ones
        b = a[3:]
        del a
        assert meter.allocated() == 2 * KIB
        del b
        assert meter.allocated() == KIB
        meter.reset_peak()
        assert meter.peak() == KIB


def test_saved_tensors_count_until_backward():
    weight = torch.ones(256, requires_grad=True)
    with HostMeter([weight]) as meter:
        y = (weight * 2).sigmoid()
        loss = y.sum()
        del y
        assert meter.allocated() == 2 * KIB + 4  # the sigmoid's result, and the loss
        loss.backward()
        assert meter.allocated() == 2 * KIB + 4  # the gradient


def test_a_step_is_cut_at_the_units():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    units = find_units(model)
    x = torch.randn(32, 8)
    device = torch.device("cpu")
    with HostMeter([*model.parameters(), x]) as meter:
        timeline = record(units, lambda: model(x).sum(), device, meter)
    cuts = [(part.backward, part.unit) for part in timeline.parts]
    assert cuts == [
        (False, START), (False, 0), (False, 1), (False, 2), (True, LOSS),
        (True, 2), (True, 1), (True, 0),
    ]  # fmt: skip
    starts = {cut: part.start for cut, part in zip(cuts, timeline.parts, strict=True)}
    assert starts[False, 2] - starts[False, 0] == 32 * 16 * 4  # the result of tanh
    assert timeline.peak == max(part.peak for part in timeline.parts) > starts[True, LOSS]
    assert timeline.seconds > 0
