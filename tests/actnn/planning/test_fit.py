"""Fitting a small model into budgets on a CPU."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import actnn
from actnn.planning import Planner, blocks, measure
from actnn.planning.blocks import BlockChoice
from actnn.planning.fit import KEEP, RECOMPUTE
from actnn.planning.meter import HostMeter
from actnn.planning.progress import Measuring
from sweeps import first_of


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def model(blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), *[Block(64) for _ in range(blocks)], nn.Linear(64, 8))


EXAMPLE_ROWS = 512


def example():
    return torch.randn(EXAMPLE_ROWS, 32)


def gradients(net, x):
    net.zero_grad()
    net(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.fixture(scope="module")
def exact_peak():
    torch.set_num_threads(1)
    net, x = model(), example()
    with HostMeter([*net.parameters(), x]) as meter:
        net(x).square().mean().backward()
        return meter.peak()


def test_a_loss_calls_the_model():
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model(1)

        def training_step(self, x):
            return self.net(x).square().mean()

        def forward(self, x):
            return self.net(x)

    task, x = Task(), torch.randn(8, 32)
    with pytest.raises(actnn.ActNNError, match=r"loss to call the Task .* part of it, 'net"):
        actnn.fit(task, x, "1 GiB", loss=lambda task, x: task.training_step(x))
    assert not task._forward_pre_hooks
    with pytest.raises(actnn.ActNNError, match="nothing of it"):
        actnn.fit(task, x, "1 GiB", loss=lambda task, x: task.net[0].weight.sum())
    assert not hasattr(task, "actnn")


def test_a_large_budget_keeps_all(exact_peak):
    net, x = model(), example()
    plan = actnn.fit(net, x, "1 GiB")
    assert all(choice.action in ("keep", "recompute") for choice in plan.choices.values())
    assert plan.noise == 0
    assert plan.peak <= exact_peak * 1.01
    assert f"(predicted {plan.predicted_seconds * 1e3:.1f} ms)" in str(plan)


def test_what_fits_is_kept_whatever_the_clock_says(monkeypatch):
    def cost(planner, plan, price):
        planner._seconds[plan] = plan.count(KEEP)
        return planner._seconds[plan]

    monkeypatch.setattr(Planner, "_cost", cost)
    plan = actnn.fit(model(), example(), "1 GiB", bits=())
    assert set(plan.choices.values()) == {KEEP}


@pytest.mark.parametrize("share", first_of([0.55, 0.75], 1))
def test_the_real_peak_is_within_the_budget(exact_peak, share):
    net, x = model(), example()
    expected = gradients(copy.deepcopy(net), x)
    budget = round(exact_peak * share)
    plan = actnn.fit(net, x, budget)
    assert plan.peak <= budget
    assert plan.predicted_peak == pytest.approx(plan.peak, rel=0.1)
    assert any(choice != KEEP for choice in plan.choices.values())
    # The plan is in effect, and gradients are those of plain training but for noise.
    found = gradients(net, x)
    plain = all(c.action in ("keep", "recompute") and not c.bits for c in plan.choices.values())
    assert plain == (not net.actnn.records)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 0.3 * b.norm()


def test_without_bits_gradients_are_exact(exact_peak):
    net, x = model(), example()
    expected = gradients(copy.deepcopy(net), x)
    plan = actnn.fit(net, x, round(exact_peak * 0.6), bits=())
    assert any(choice.action == "recompute" for choice in plan.choices.values())
    assert all(map(torch.equal, gradients(net, x), expected))


def hooked(net, x):
    """Whether hooks for saved tensors are installed while a block runs."""
    seen = []
    handle = net[2].act.register_forward_hook(
        lambda *_: seen.append(torch._C._autograd._top_saved_tensors_default_hooks(False))
    )
    with torch.enable_grad():
        net(x)
    handle.remove()
    return seen[0] is not None


def test_a_plan_without_codes_installs_no_hooks():
    net, x = model(), example()
    planner = Planner(net, x, bits=(4,))
    units = len(planner._units)
    # A checkpoint has hooks of its own, so that the block in question is kept.
    mixed = [RECOMPUTE, RECOMPUTE, KEEP, *[RECOMPUTE] * (units - 3)]
    exact = gradients(actnn.uncompress(copy.deepcopy(net)), x)
    planner._measurement.apply(mixed)
    assert not hooked(net, x)
    assert all(map(torch.equal, gradients(net, x), exact))
    report = actnn.report(net, lambda: net(x).square().mean())  # sees it nevertheless
    assert 0 < report.held < report.peak
    assert report.held == report.nbytes
    assert "input" in report.by_reason()
    assert not hooked(net, x)
    net.zero_grad()
    with HostMeter([*net.parameters(), *net.buffers(), x]) as meter:
        net(x).square().mean().backward()
    net.zero_grad()
    assert actnn.report(net, lambda: net(x).square().mean()).peak == meter.peak()
    planner._measurement.apply([BlockChoice("compress", 4)] * units)
    assert hooked(net, x)
    net(x)
    assert any(record.reason == "compressed" for record in net.actnn.records)
    planner._measurement.apply(mixed)
    assert not net.actnn.records
    with pytest.raises(actnn.ActNNError, match="pass step="):
        actnn.report(net)
    actnn.uncompress(net)
    assert [type(module) for module in net.modules()] == [type(m) for m in model().modules()]


def test_recompute_runs_a_forward_again():
    net, x = model(), example()
    planner = Planner(net, x, bits=())
    planner._measurement.apply([RECOMPUTE] * len(planner._units))
    calls = []
    net[3].act.register_forward_hook(lambda *_: calls.append(1))
    gradients(net, x)
    assert len(calls) == 2


@pytest.mark.slow
def test_the_fastest_of_all_measured_plans_is_taken(exact_peak):
    planner = Planner(model(), example(), bits=(4,))
    plans = [planner.plan(round(exact_peak * share)) for share in (0.55, 0.7, 0.85, 1.1)]
    for plan in plans:
        fitting = [c for c, peak in planner._peaks.items() if peak <= plan.budget]
        assert (RECOMPUTE,) * len(plan.choices) in planner._peaks
        known = [c for c in fitting if c in planner._seconds]
        assert tuple(plan.choices.values()) in known
    costs = [planner._cost(tuple(plan.choices.values()), 1.0) for plan in plans]
    assert costs == sorted(costs, reverse=True)  # a larger budget never costs more


@pytest.mark.slow
def test_no_plan_is_worse_than_one_choice_for_all_units(exact_peak):
    planner = Planner(model(), example(), bits=(8, 4))
    plan = planner.plan(round(exact_peak * 0.7))
    best = planner._cost(tuple(plan.choices.values()), 1.0)
    for choice in planner.costs.of:
        uniform = (choice,) * len(plan.choices)
        if planner.costs.peak(uniform) <= plan.budget:
            assert planner._peaks[uniform] > plan.budget or planner._cost(uniform, 1.0) >= best


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")
def test_a_model_compiled_as_one_is_a_plan(monkeypatch):
    monkeypatch.setattr(blocks, "_backend", lambda form: "aot_eager")
    monkeypatch.setattr(sys.modules[Planner.__module__], "MEMORY_SHARES", (0.5,))
    net, x = model(blocks=2), example()
    expected = gradients(copy.deepcopy(net), x)
    planner = Planner(net, x, bits=(4,), compile=True)
    units, seconds = len(planner._units), planner._measurement.seconds
    exact_peak = planner.costs.peak((KEEP,) * units)
    # A compiled block among others holds codes, whatever those do.
    noise = planner._noise((KEEP, BlockChoice("compress", 4, fused=True), KEEP, KEEP))
    assert noise == pytest.approx(
        planner.costs.noise((BlockChoice("compress", 4, fused=True),) * 4) / 2, rel=0.5
    )
    # Make it the fastest, whatever this machine's noise is.
    monkeypatch.setattr(
        planner._measurement, "seconds", lambda plan: seconds(plan) * (0.01 if plan[0].whole else 1)
    )
    plan = planner.plan(round(exact_peak * 1.05))
    assert all(choice.whole and choice.bits is None for choice in plan.choices.values())
    assert len(plan.choices) == units
    assert str(plan).startswith("the model  compiled as one")
    assert plan.peak <= exact_peak * 1.05
    assert all(map(torch.equal, gradients(net, x), expected))
    # Codes have noise, and a price.
    tight = planner.plan(round(exact_peak * 0.7), noise_price=0.0)
    assert set(tight.choices.values()) == {BlockChoice("compress", 4, fused=True, whole=True)}
    assert 0 < tight.noise < 0.1
    dear = planner.plan(round(exact_peak * 0.7), noise_price=1e9)
    assert dear.noise == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")
def test_nothing_is_compiled_after_a_plan_that_compiles(monkeypatch):
    monkeypatch.setattr(blocks, "_backend", lambda form: "aot_eager")
    net, x = nn.Sequential(Block(8), nn.Linear(8, 8)), torch.randn(64, 8)
    actnn.fit(net, x, "1 GiB", bits=(), compile=True)
    actnn.uncompress(net)
    assert not [name for module in net.modules() for name in vars(module) if "actnn" in name]
    actnn.fit(net, x, "1 GiB", bits=(), compile=True)
    actnn.fit(net, x, "1 GiB", bits=())
    assert not any(isinstance(module, blocks.CompiledBlock) for module in net.modules())


def test_plans_are_for_one_device():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
    with pytest.raises(actnn.ActNNError, match="one device, got parameters on cpu and meta"):
        actnn.fit(net, torch.randn(4, 8), "1 GiB")


def test_a_planner_goes_on_after_an_error(exact_peak):
    net, x = model(), example()
    planner = Planner(net, x, bits=())
    with pytest.raises(actnn.ActNNError, match="Expected budget to be at least"):
        planner.plan("1 MiB")
    plan = planner.plan(round(exact_peak * 0.6))
    assert plan.peak <= exact_peak * 0.6
    gradients(net, x)


def test_what_the_device_cannot_hold_is_in_no_plan(exact_peak, monkeypatch):
    planner = Planner(model(), example(), bits=())
    peak, too_large = planner._measurement.peak, True

    def peak_of(plan):
        if too_large or plan[0] == KEEP:
            raise torch.OutOfMemoryError
        return peak(plan)

    monkeypatch.setattr(planner._measurement, "peak", peak_of)
    with pytest.raises(actnn.ActNNError, match="Expected budget to be at least"):
        planner.plan(round(exact_peak * 1.5))
    too_large = False
    plan = planner.plan("1 GiB")
    assert next(iter(plan.choices.values())) != KEEP


def test_noise_of_units_without_parameters_counts():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    planner = Planner(net, torch.randn(1024, 64), bits=(2,))
    noise = planner._noise((KEEP, BlockChoice("compress", 2), KEEP))
    assert 1e-4 < noise < planner._noise((BlockChoice("compress", 2),) * 3)
    assert planner._noise((KEEP, RECOMPUTE, KEEP)) == 0.0


class Normed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def norms_in_a_row(blocks=6, width=8):
    torch.manual_seed(0)
    stem = nn.Conv2d(3, width, 3, padding=1)
    return nn.Sequential(
        stem,
        *[Normed(width) for _ in range(blocks)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 4),
    )


def rounds_from(first, planner):
    """A plan whose units recompute, from `first` on from inputs of 4 bits."""
    units = len(planner._units)
    return (RECOMPUTE,) * first + (BlockChoice("recompute", 4),) * (units - first)


def test_noise_is_that_of_the_codes_of_a_unit_also_in_units_before_it():
    """Norms take it there: the parameters of the first unit get most of it, and it makes none."""
    planner = Planner(norms_in_a_row(), torch.randn(16, 3, 16, 16), bits=(4,))
    noise = planner.costs.of[BlockChoice("recompute", 4)].noise
    assert noise[0] < 0.1 * noise.max()
    for first in (2, 5, 6):
        plan = rounds_from(first, planner)
        assert planner.costs.noise(plan) == pytest.approx(planner._noise(plan), rel=0.3)


@pytest.mark.slow
def test_noise_of_groups_where_a_model_has_many_units(monkeypatch):
    monkeypatch.setattr(measure, "GROUPS", 4)
    planner = Planner(norms_in_a_row(), torch.randn(16, 3, 16, 16), bits=(4,))
    plan = rounds_from(6, planner)  # where the third group begins
    assert planner.costs.noise(plan) == pytest.approx(planner._noise(plan), rel=0.3)


@pytest.mark.slow
def test_noise_of_units_is_not_measured_after_the_time(monkeypatch):
    is_over = iter([False] * 3 + [True] * 9)
    monkeypatch.setattr(Measuring, "is_over", property(lambda self: next(is_over, True)))
    planner = Planner(norms_in_a_row(), torch.randn(16, 3, 16, 16), bits=(4,))
    monkeypatch.undo()
    assert "which blocks make the noise of 'recompute 4 bits'" in planner._measurement.notes[0]
    plan = rounds_from(6, planner)
    assert planner.costs.noise(plan) < 0.1 * planner._noise(plan)


@pytest.mark.slow
def test_plans_for_blocks_that_checkpoint_themselves():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(64, 64)
            self.blocks = nn.ModuleList(Block(64) for _ in range(4))

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    net, x = Net(), torch.randn(1024, 64)
    planner = Planner(net, x, bits=(8, 4))
    planner._measurement.apply([BlockChoice("compress", bits) for bits in (32, 8, 4, 2, 4)])
    net(x)
    inputs = [record for record in net.actnn.records if record.op == "checkpoint"]
    # An input is made by the unit before, whose choice it has.
    assert [record.choice.bits for record in inputs] == [32, 8, 4, 4]
    keep, eight, four = (
        planner._measurement.peak([choice] * 5)
        for choice in (KEEP, BlockChoice("compress", 8), BlockChoice("compress", 4))
    )
    assert four < eight < keep
    plan = planner.plan(eight)
    assert plan.peak <= eight
    assert 0 < plan.noise < 0.1
    assert any(choice.bits for choice in plan.choices.values())


@pytest.mark.slow
def test_too_small_a_budget_is_an_error_with_one_that_is_feasible():
    net, x = model(), example()
    with pytest.raises(actnn.ActNNError, match="Expected budget to be at least") as caught:
        actnn.fit(net, x, "1 MiB")
    assert not hasattr(net, "actnn")
    needed = int(str(caught.value).split("at least ")[1].split(" ")[0])
    assert actnn.fit(net, x, round(needed * 1.02)).peak <= needed * 1.02


def test_nothing_of_the_model_changes():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
    state = copy.deepcopy(net.state_dict())
    net[0].weight.grad = torch.ones_like(net[0].weight)
    x = torch.randn(4, 3, 16, 16, requires_grad=True)
    random = torch.random.get_rng_state()
    actnn.fit(net, x, "1 GiB")
    assert x.grad is None
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.equal(net[0].weight.grad, torch.ones_like(net[0].weight))
    assert net[0].bias.grad is None
    assert torch.equal(torch.random.get_rng_state(), random)
    assert list(actnn.uncompress(net).state_dict()) == list(state)


def test_examples_and_losses():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            return {"sum": self.a(x) + self.b(y), "index": torch.arange(3)}

    x = torch.randn(8, 4)
    for given in ((x, x), {"x": x, "y": x}):
        actnn.fit(Pair(), given, "1 GiB", bits=())
    target = torch.randn(8, 4)

    def loss(net, batch):
        return nn.functional.mse_loss(net(*batch[0])["sum"], batch[1])

    actnn.fit(Pair(), ((x, x), target), "1 GiB", loss=loss, bits=())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": "6 Gb"}, "budget to be bytes"),
        ({"reserve": "much"}, "reserve to be bytes"),
        ({"reserve": "2 GiB"}, "reserve to be less than"),
        ({"bits": 4}, "bits to be widths such as"),
        ({"bits": (16,)}, "bits to be 1 to 8"),
        ({"loss": 5}, "loss to be a function"),
        ({"noise_price": -1}, "noise_price to be a number"),
        ({"noise_price": "x"}, "noise_price to be a number"),
        ({"loss": lambda net, x: net(x)}, "scalar tensor"),
        ({"model": nn.Linear(32, 2)}, "to have submodules"),
        ({"model": model().eval()}, "training mode"),
        ({"model": nn.Sequential(nn.ReLU())}, "require gradients"),
    ],
)
def test_errors(change, message):
    arguments = {"model": model(), "example": example(), "budget": "1 GiB"} | change
    with pytest.raises(actnn.ActNNError, match=message):
        actnn.fit(**arguments)
    assert not hasattr(arguments["model"], "actnn")
