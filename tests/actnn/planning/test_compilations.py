"""How often `fit` compiles: once for each kind of block and form, and no model that cannot win."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from actnn.planning import Planner, blocks
from actnn.planning.fit import MEMORY_SHARES, WHOLE_SAVES
from actnn.planning.progress import Measuring
from sweeps import first_of

ONE_BLOCK = 6  # operations of a block; more are those of the model
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, inner),
            nn.Linear(inner, width),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.fixture
def compiled(monkeypatch):
    """Forms that were compiled -> how often, 'block' or 'model' first."""
    counts = Counter()

    def backend_of(form):
        if form not in backends:

            def backend(graph, inputs):
                calls = sum(node.op == "call_function" for node in graph.graph.nodes)
                counts["block" if calls <= ONE_BLOCK else "model", form] += 1
                return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

            backends[form] = backend
        return backends[form]

    backends = {}
    monkeypatch.setattr(blocks, "_backend", backend_of)
    torch._dynamo.reset()
    return counts


def planner(inner):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), *(Block(64, each) for each in inner), nn.Linear(64, 8))
    return Planner(net, torch.randn(1024, 32), bits=(4,), compile=True)


def forms(kinds):
    shares = [(share, None) for share in (1.0, *MEMORY_SHARES)]
    return {("block", form): kinds for form in [*shares, (1.0, 4)]}


@pytest.mark.parametrize(("inner", "kinds"), first_of([((256,) * 2, 1), ((256, 128, 256), 2)], 1))
def test_blocks_of_one_kind_are_compiled_once_for_each_form(compiled, inner, kinds):
    planner(inner)
    assert compiled == forms(kinds)


@pytest.mark.slow
def test_plans_that_mix_forms_compile_nothing_again(compiled):
    made = planner((256,) * 4)
    compiled.clear()
    keep, fused = blocks.BlockChoice("keep"), blocks.BlockChoice("compress", 4, fused=True)
    codes = blocks.BlockChoice("compress", 4)
    noises = []
    for mixed in ((fused, keep, codes, fused), (keep, fused, fused, codes), (fused,) * 4):
        noises.append(made._measurement.noise((keep, *mixed, keep)))
    assert not compiled
    assert min(noises) > 1e-5


@pytest.mark.slow
def test_with_room_for_all_the_model_is_compiled_as_one_and_nothing_else(compiled):
    made = planner((256,) * 2)
    compiled.clear()
    made.plan("1 GiB", noise_price=0.0)
    assert compiled == {("model", (1.0, None)): 1}


@pytest.mark.slow
def test_a_model_that_recomputes_less_and_fits_beats_the_others(compiled, monkeypatch):
    made = planner((256,) * 2)
    room = round(made.costs.peak((blocks.BlockChoice("keep"),) * 4) * 0.9)
    # On a CPU peaks are those of uncompiled code.
    peak = made._measurement.peak
    monkeypatch.setattr(
        made._measurement,
        "peak",
        lambda plan: room if plan[0].whole and plan[0].memory == MEMORY_SHARES[0] else peak(plan),
    )
    compiled.clear()
    made.plan(room, noise_price=0.0)
    assert compiled == {
        ("model", (1.0, None)): 1,  # it might have fitted
        ("model", (MEMORY_SHARES[0], None)): 1,
        ("model", (1.0, 4)): 1,
    }


def test_what_takes_too_long_to_compile_is_left_out_and_named(compiled, monkeypatch):
    monkeypatch.setattr(Measuring, "has_time_for", lambda self, seconds: seconds == 0)
    made = planner((256,) * 2)
    assert compiled == {("block", (1.0, None)): 1}
    plan = made.plan("1 GiB", noise_price=0.0)
    assert compiled == {("block", (1.0, None)): 1}
    text = "max_seconds are over: not measured: '4 bits fused', 'compiled for 50%', "
    assert text in str(plan)
    assert "max_seconds are over: not measured: 'compiled as one'" in str(plan)


@pytest.mark.slow
def test_without_time_nothing_is_compiled_as_one(compiled, monkeypatch):
    """Nor measured by blocks, so that nothing says what the model would need."""
    monkeypatch.setattr(Measuring, "is_over", property(lambda self: True))
    monkeypatch.setattr(Measuring, "has_time_for", lambda self, seconds: False)
    plan = planner((256,) * 2).plan("1 GiB", noise_price=0.0)
    assert compiled == {("block", (1.0, None)): 1}
    for name in ("compiled as one", "compiled as one for 50%", "4 bits fused compiled as one"):
        assert f"max_seconds are over: not measured: '{name}'" in str(plan)


@pytest.mark.slow
def test_models_compiled_as_one_come_first_if_time_is_short(compiled, monkeypatch):
    """Compiling them takes the most of it. What was compiled is timed; what was not is named."""
    made = planner((256,) * 2)
    room = round(made.costs.peak((blocks.BlockChoice("keep"),) * 4) * 0.9)
    over = []
    for name in ("is_over", "is_late"):
        monkeypatch.setattr(Measuring, name, property(lambda self: bool(over)))
    monkeypatch.setattr(Measuring, "has_time_for", lambda self, seconds: not over)
    peak, seconds, timed = made._measurement.peak, made._measurement.seconds, []

    def measured(plan):
        if not plan[0].whole:
            return peak(plan)
        if plan[0].memory == 1.0:
            return 2 * room
        over.append(plan)  # it took the rest of the time
        return room

    def timing(plan):
        timed.append(plan)
        return 1e-6 if plan[0].whole else seconds(plan)

    monkeypatch.setattr(made._measurement, "peak", measured)
    monkeypatch.setattr(made._measurement, "seconds", timing)
    plan = made.plan(room, noise_price=0.0)
    assert len(over) == 1
    assert all(each.whole for each in plan.choices.values())
    assert timed[0] == over[0]
    assert sum(not each[0].whole for each in timed) <= 1
    assert "max_seconds are over: not measured: '4 bits fused compiled as one'" in str(plan)


def test_what_may_fit_as_one(compiled, monkeypatch):
    """What its blocks need, less what one graph saves; codes are also of what blocks pass on."""
    made = planner((256,) * 2)
    names = ["compiled as one", "compiled as one for 50%", "4 bits fused compiled as one"]
    assert list(map(str, made._whole)) == [*names, "compiled as one for 20%"]
    peaks = {"keep": 100, "recompute": 30, "4 bits": 49, "4 bits fused": 54}
    monkeypatch.setattr(made, "_peak_by_unit", lambda choice: peaks[str(choice)])
    for measured, of_codes in ((peaks, 49), (("keep", "recompute"), 30)):
        of = {choice: costs for choice, costs in made.costs.of.items() if str(choice) in measured}
        made.costs = replace(made.costs, base=10, of=of)
        for choice, peak in zip(made._whole, (100, 10 + 0.5 * 90, of_codes, 30), strict=True):
            room = (1 - WHOLE_SAVES) * peak
            assert made._may_fit(choice, room + 0.1)
            assert not made._may_fit(choice, room - 0.1)


@pytest.mark.parametrize("drops", first_of([False, True], 1))
def test_other_orders_of_rounding_are_no_other_gradients(compiled, monkeypatch, drops):
    """But where random numbers are drawn, these may be others."""

    def other(graph, inputs):
        run = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return lambda *arguments: [y * 1.01 for y in run(*arguments)]

    exact = blocks._backend
    monkeypatch.setattr(blocks, "_backend", lambda form: exact(form) if form[0] == 1 else other)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5 * drops)) for _ in range(2)]
    made = Planner(nn.Sequential(*layers), torch.randn(256, 64), bits=(), compile=True)
    assert made._measurement._draws == drops
    assert (blocks.BlockChoice("keep", memory=0.5) in made.costs.of) == (not drops)


@pytest.mark.parametrize(("factor", "right"), first_of([(1.04, True), (1.5, False)], 1))
def test_rounding_of_compiled_code_is_measured(compiled, monkeypatch, factor, right):
    """As in bfloat16, compiled code may be far from uncompiled code, which is as exact."""

    def scaled(by):
        def other(graph, inputs):
            run = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
            return lambda *arguments: [y * by for y in run(*arguments)]

        return other

    monkeypatch.setattr(blocks, "_backend", lambda form: scaled(1.02 if form[0] == 1 else factor))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)]
    made = Planner(nn.Sequential(*layers), torch.randn(256, 64), bits=(), compile=True)
    assert 2.5e-3 < made._measurement._rounding < 0.05
    assert (blocks.BlockChoice("keep", memory=0.5) in made.costs.of) == right
