"""What a model computes before its first GRU: repeated where a call is like an earlier one."""

import logging

import numpy as np
import pytest
import torch

from quant_gru import allocate_bits, sensitivity
from quant_gru.analysis.replay import Replay
from quant_gru.analysis.trials import Place, Trials


class Front(torch.nn.Module):
    """Layers before a GRU, of which some work in place, and one that the output needs again."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(3, 6, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(6)
        self.relu = torch.nn.ReLU(inplace=True)
        self.first = torch.nn.GRU(6, 5, batch_first=True)
        self.last = torch.nn.GRU(5, 6, batch_first=True)

    def forward(self, x):
        kept = self.relu(self.norm(self.conv(x)))
        kept = kept * (kept.mean() + 1).item()
        return self.last(self.first(kept.transpose(1, 2))[0])[0] + kept.transpose(1, 2)


BATCHES = list(torch.randn(2, 4, 3, 30, generator=torch.Generator().manual_seed(1)))


def front():
    torch.manual_seed(0)
    return Front().eval()


def noises(trials):
    found = []
    for bits in (4, 8):
        for place in trials.places[:3]:
            trials.set({place: bits})
            found.append(trials.noise())
    return found


def test_trials_are_equal_with_and_without():
    trials = Trials(front(), BATCHES, (4, 8), progress=False)
    replay = trials._replay
    before = replay.repeated
    found = noises(trials)
    each_time = replay.repeated - before
    assert each_time == 6 * replay.operations > 6 * 2 * 4
    replay.is_on = False
    assert noises(trials) == found
    assert replay.repeated - before == each_time


def test_kept_results_are_given_and_an_operation_that_is_another_one_is_computed():
    trials = Trials(front(), BATCHES, (4,), progress=False)
    tapes = list(trials._replay._tapes.values())
    (at,) = (i for i, s in enumerate(tapes[0].steps) if "convolution" in str(s.operation))
    before = trials.noise()
    kept = next(s.results[0] for s in reversed(tapes[0].steps) if s.results is not None)
    kept += 1
    assert trials.noise() > 2 * before  # not computed: the kept values count
    kept -= 1
    tapes[0].steps[at].operation = None
    repeated = trials._replay.repeated
    assert trials.noise() == pytest.approx(before)
    assert trials._replay.repeated - repeated == at + len(tapes[1].steps)


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, "quant_gru")
    return caplog


def test_it_says_what_is_computed_once(logged):
    trials = Trials(front(), BATCHES, (4,), progress=False)
    text = f"{trials._replay.operations} of {{}} operations outside GRUs come before the first GRU"
    assert text.partition("{")[0] in logged.text
    assert "they are computed once" in logged.text


class Steps(torch.nn.Module):
    """One step after the other: all but the first depend on the GRU before."""

    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRUCell(3, 3)
        self.mix = torch.nn.Linear(3, 3)

    def forward(self, x):
        h = torch.zeros(x.shape[1], 3)
        for each in x:
            h = self.gru(self.mix(each + h), h)
        return h


@pytest.mark.parametrize("model", [torch.nn.GRU(3, 4), Steps()])
def test_it_says_if_little_comes_before_the_first_gru(model, logged):
    trials = Trials(model, torch.randn(20, 2, 3), (4,), progress=False)
    assert "operations outside GRUs come before the first GRU: each trial runs" in logged.text
    assert not trials._replay.is_on


def test_it_says_if_equal_calls_differ(logged):
    torch.manual_seed(0)
    Trials(Randomly().eval(), BATCHES, (4,), progress=False)
    assert "come before the first GRU: each trial runs the whole model" in logged.text


class Randomly(Front):
    def forward(self, x):
        return super().forward(x + torch.rand(1))


def test_random_numbers_are_drawn_each_time():
    torch.manual_seed(0)
    model = Randomly().eval()
    replay = Replay(model, [model.first, model.last])
    found = []
    with torch.no_grad():
        for _ in range(3):
            with replay.calls(0):
                found.append(model(BATCHES[0]))
    assert replay.operations == replay.repeated == 0
    assert not torch.equal(found[1], found[2])


class Remembering(Front):
    """Adds to its input what an earlier call has given."""

    memory = None

    def forward(self, x):
        before = 0 if self.memory is None else self.memory.mean()
        found = super().forward(x + before)
        self.memory = found
        return found


def test_a_state_of_earlier_calls_is_not_repeated():
    torch.manual_seed(0)
    model = Remembering().eval()
    with torch.no_grad():
        replay, x = Replay(model, [model.first, model.last]), BATCHES[0]
        found = []
        for _ in range(4):
            with replay.calls(0):
                found.append(model(x).clone())
        model.memory = None
        assert all(torch.equal(model(x), each) for each in found)
    assert not torch.equal(found[1], found[2])


def test_other_inputs_are_computed():
    model = front()
    replay = Replay(model, [model.first, model.last])
    with torch.no_grad():
        for x in (BATCHES[0], BATCHES[1], BATCHES[0].clone(), BATCHES[1]):
            with replay.calls(0):
                found = model(x)
            assert torch.equal(found, model(x))
        assert 0 < replay.repeated <= replay.operations + 2
        changed = BATCHES[0].clone()
        for _ in range(3):
            with replay.calls(1):
                found = model(changed)
            assert torch.equal(found, model(changed))
            changed += 1  # the same tensor, with other values


def test_weights_that_change_are_seen():
    model = front()
    replay = Replay(model, [model.first, model.last])
    with torch.no_grad():
        for _ in range(3):
            with replay.calls(0):
                found = model(BATCHES[0])
            assert torch.equal(found, model(BATCHES[0]))
            model.conv.bias += 1


class Spoiling(Front):
    """Changes what comes before the GRU after it, in place."""

    def forward(self, x):
        kept = self.conv(x).transpose(1, 2)
        found = self.first(kept)[0]
        kept += 1
        return self.last(found)[0] + kept


def test_results_that_are_changed_later_are_not_repeated():
    torch.manual_seed(0)
    model = Spoiling().eval()
    replay = Replay(model, [model.first, model.last])
    with torch.no_grad():
        wanted = model(BATCHES[0])
        for _ in range(3):
            with replay.calls(0):
                assert torch.equal(model(BATCHES[0]), wanted)


class InPlace(torch.nn.Module):
    """Two equal constants and a view, changed in place before the GRU."""

    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(3, 4)

    def forward(self, x):
        a, b = torch.zeros(x.shape), torch.zeros(x.shape)
        a += x
        a[0] = 2
        b.add_(a).mul_(0.5)
        part = b[:, :1]
        part -= 3
        return self.gru(torch.sigmoid(b) + torch.tensor([1.0, 2.0, 3.0]))[0] + b.mean()


def test_changes_in_place_before_the_gru():
    torch.manual_seed(0)
    model = InPlace()
    replay = Replay(model, [model.gru])
    with torch.no_grad():
        wanted = model(BATCHES[0].transpose(1, 2))
        for _ in range(3):
            with replay.calls(0):
                assert torch.equal(model(BATCHES[0].transpose(1, 2)), wanted)
    assert replay.repeated == 2 * replay.operations > 20


def test_a_metric_that_calls_the_model():
    model = front()
    rows = np.asarray(BATCHES[0])

    def metric(quantized):
        found = quantized(BATCHES[0])
        own = torch.tensor(rows * float(found[0, 0, 0]))
        return -float((quantized(own) - quantized(BATCHES[1])).square().mean())

    trials = Trials(model, BATCHES, (4,), progress=False)
    for place in (trials.places[0], Place("last", 0, False, "output.h")):
        trials.set({place: 4})
        found = trials.metric(metric)
        trials._replay.is_on = False
        assert trials.metric(metric) == found
        trials._replay.is_on = True
    assert {key[0] for key in trials._replay._tapes} == {0, 1, "metric"}


def test_a_function_that_calls_parts_of_the_model():
    run = lambda m, x: m.last(m.first(m.conv(x).transpose(1, 2))[0])[0]  # noqa: E731
    found = sensitivity(front(), BATCHES, widths=(4,), forward_fn=run, progress=False)
    assert len(found.costs) == 2 * 17


@pytest.mark.slow
def test_the_resulting_model_has_no_hooks():
    found = allocate_bits(front(), BATCHES, 2000, progress=False)
    modules = list(found.model.modules())
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in modules)
