"""What `fit` says while it measures, and what it does when its time is over."""

import sys

import pytest
import torch
from torch import nn

import actnn
from actnn.planning import Planner, progress
from actnn.planning.comparison import KEEP, RECOMPUTE


def model():
    torch.manual_seed(0)
    block = [nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)]
    return nn.Sequential(*(nn.Sequential(*block) for _ in range(3)))


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on by a second whenever it is asked for."""
    times = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(times)))


@pytest.mark.usefixtures("clock")
def test_a_function_is_told_what_is_measured():
    calls = []
    plan = actnn.fit(
        model(), torch.randn(512, 64), "1 GiB", bits=(4,), progress=lambda *each: calls.append(each)
    )
    assert calls[0] == (0, calls[0][1], "comparing recomputation with keeping all")
    assert [done for done, _, _ in calls] == list(range(len(calls)))
    assert all(done < total for done, total, _ in calls)
    texts = [text.split(", about ")[0] for _, _, text in calls]
    assert texts[1:5] == [
        "each block: keep",
        "each block: recompute",
        "each block: lossless",
        "each block: 4 bits",
    ]
    assert "keep" in texts[5:]
    assert "timing a plan that fits" in texts
    assert all(text.endswith(" s left") for _, _, text in calls[1:])
    assert plan.notes == ()


@pytest.mark.usefixtures("clock")
def test_after_its_time_fit_takes_the_best_that_it_knows():
    calls = []
    x = torch.randn(512, 64)
    plan = actnn.fit(
        model(), x, "1 GiB", max_seconds=3, progress=lambda *each: calls.append(each[2])
    )
    assert set(plan.choices.values()) <= {KEEP, RECOMPUTE}
    assert "max_seconds are over: not measured: 'lossless', '8 bits'" in str(plan)
    assert sum("each block" in text for text in calls) == 2
    assert len(calls) <= 6
    # A budget for which something must be done
    most = actnn.fit(model(), x, "1 GiB", bits=()).peak
    plan = actnn.fit(model(), x, round(0.8 * most), max_seconds=3)
    assert plan.peak <= 0.8 * most
    assert RECOMPUTE in plan.choices.values()


def test_each_plan_of_a_planner_has_the_time():
    planner = Planner(model(), torch.randn(512, 64), bits=(4,), max_seconds=1000)
    for _ in range(2):
        assert planner.plan("1 GiB").notes == ()
        assert planner._progress._bar is None


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    x = torch.randn(64, 64)
    actnn.fit(model(), x, "1 GiB", bits=())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    actnn.fit(model(), x, "1 GiB", bits=())
    text = capsys.readouterr().err
    assert "fit" in text
    assert "each block: recompute" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_seconds": 0}, "Expected max_seconds to be a number above 0, got 0"),
        ({"max_seconds": "1 h"}, "Expected max_seconds to be a number above 0, got '1 h'"),
        ({"progress": 3}, "Expected progress to be a function of"),
    ],
)
def test_errors_of_progress(arguments, message):
    net = model()
    with pytest.raises(actnn.ActNNError, match=message):
        actnn.fit(net, torch.randn(8, 64), "1 GiB", **arguments)
    assert not hasattr(net, "actnn")
