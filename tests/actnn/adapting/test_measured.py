"""Level L3: bits of tensors by measured costs, within an ordinary training loop."""

import copy
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from actnn_models import has_node
from torch import nn

import actnn
from actnn.adapting import measured as module
from actnn.adapting.costs import Saved, groups
from actnn.adapting.measured import Measured
from actnn.adapting.replay import Gradient
from sweeps import first_of


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 16 * 16, 5),
    )


def deep():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3))
    for _ in range(6):
        net.extend([nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)])
    return net


def images():
    return torch.randn(8, 3, 16, 16) * torch.logspace(-2, 1, 8).view(-1, 1, 1, 1)


def train(net, steps, batch=images):
    for _ in range(steps):
        net.zero_grad()
        net(batch()).square().mean().backward()


def measured(net, **settings) -> Measured:
    actnn.compress(net, level="L3", min_bytes=0, **settings)
    return net.actnn.adaptive


quiet = pytest.mark.filterwarnings("ignore:Compression adds", "ignore:Level L3 uses")


@quiet
def test_tensors_get_different_bits_within_the_budget():
    net = model()
    adaptive = measured(net)
    train(net, 2)
    assert adaptive.bits == {}
    train(net, 1)
    assert len(set(adaptive.bits.values())) > 1
    saved = adaptive._saved
    assert saved.keys() == adaptive.bits.keys() == adaptive.costs.keys()
    assert {each.kind for each in saved.values()} == {"input", "norm", "derivative"}
    elements = {name: each.elements for name, each in saved.items()}
    used = sum(bits * elements[name] for name, bits in adaptive.bits.items())
    assert used <= adaptive.budget * sum(elements.values())
    assert 2 <= adaptive.budget <= 2.5
    held = sum(r.held for r in net.actnn.records if r.choice.action == "compress")
    assert held <= used / 8 + sum(elements.values()) / 256 * 4 + 64 * len(elements)


@quiet
def test_training_does_not_notice_the_extra_steps():
    """Random numbers, buffers, gradients and the noise of steps are as without them."""
    found = []
    for trials in (True, False):
        net = model()
        adaptive = measured(net)
        adaptive._trials.failed = not trials
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        train(net, 2)
        fired = []
        net[0].weight.register_post_accumulate_grad_hook(fired.append)
        x = images()
        y = net(x)
        assert (adaptive._trials.runs > 0) == trials
        state = [y, *net.buffers(), *(p.grad for p in net.parameters()), torch.rand(3)]
        found.append([t.clone() for t in state])
        found[-1] += [random.random(), np.random.rand(), int(net.actnn._noise._step)]
        assert fired == []
        assert int(net.actnn.noise_state(torch.device("cpu"))[1]) == 3
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.o = nn.Linear(64, 64)
        self.mixed = nn.Linear(64, 64)

    def forward(self, x):
        x = self.o(x)
        y = self.q(x) * self.k(x) + self.v(x)
        z = self.o(y)
        return self.mixed(z) + torch.sin(z)


@quiet
def test_an_input_that_layers_share_costs_the_sum_of_all(monkeypatch):
    net = Shared()
    adaptive = measured(net)
    train(net, 2, lambda: torch.randn(32, 64))
    seen = {}
    measure = module.measure

    def watched(saved, energies, energy, average, error):
        seen.update(copy.deepcopy(saved), single=error({"q:0": 2}))
        return measure(saved, energies, energy, average, error)

    monkeypatch.setattr(module, "measure", watched)
    train(net, 1, lambda: torch.randn(32, 64))
    assert seen["q:0"].users == ["q", "k", "v"]
    assert seen["q:0"].kind == "input"
    assert seen["mixed:0"].kind == "other"  # the sine saves it, too
    assert adaptive.costs["q:0"][1] == pytest.approx(seen["single"], rel=0.4)


def test_groups_are_of_one_kind_and_few():
    saved = {f"{kind}{i}": Saved(8, kind) for i in range(70) for kind in ("norm", "other")}
    parts = groups(saved)
    assert 22 <= len(parts) <= 26
    assert sorted(name for group in parts for name in group) == sorted(saved)
    assert all(len({saved[name].kind for name in group}) == 1 for group in parts)


@quiet
def test_outputs_may_be_structures_and_depend_on_each_other():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.n, self.b = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)

        def forward(self, x, *, scale):
            y = self.b(self.n(self.a(x)) * scale)
            return {"loss": y.square().mean(), "logits": (y, None)}

    net = Net()
    plain = copy.deepcopy(net)
    adaptive = measured(net)
    gradients = []
    judge = adaptive._judge

    def keep(trial):
        gradients.append(trial.lossless_gradient())
        return judge(trial)

    adaptive._judge = keep
    x = torch.randn(32, 64)
    for _ in range(4):
        net.zero_grad()
        output = net(x, scale=2.0)
        output["loss"].backward()
    plain(x, scale=2.0)["loss"].backward()
    exact = Gradient([p.grad for p in plain.parameters()], [])
    assert gradients[0].relative(exact) < 1e-10
    assert adaptive.bits


@pytest.mark.parametrize("batch", [lambda: torch.randn(8, 3, 16, 16), None])
def test_too_few_bits_warn_within_20_steps_once_and_name_the_worst(batch):
    net = deep()
    adaptive = measured(net, bits=1)
    fixed = torch.randn(8, 3, 16, 16)
    with pytest.warns(actnn.ActNNWarning, match=r"most comes from '\d+:[0d]") as caught:
        train(net, 19, batch or (lambda: fixed))
    assert len([w for w in caught if "Compression adds" in str(w.message)]) == 1
    repeated = "squared norm of the gradient" in str(caught[0].message)
    assert repeated == (batch is None)
    assert adaptive.error > 0.3


@pytest.mark.parametrize("settings", [{"level": "L3"}, {"bits": 2}], ids=str)
def test_a_model_may_be_fitted_to_one_batch(settings):
    """Gradients differ by the updates alone, which is no variance over batches."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    actnn.compress(net, min_bytes=0, **settings)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    x, y = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
    for _ in range(5):  # warnings are errors here
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    assert net.actnn.adaptive._trials.runs > 0


def test_enough_bits_do_not_warn():
    net = model()
    measured(net, bits=7)
    train(net, 22)  # warnings are errors here


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11
@quiet
def test_a_step_between_trials_runs_what_equal_bits_run():
    def operations(net):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(net, 1, lambda: x)
        counts = {e.key: e.count for e in profile.key_averages() if "::" in e.key}
        counts.pop("aten::as_strided")
        return counts

    def plain():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.ReLU())

    x = images()
    equal, net = actnn.compress(plain(), bits=2, min_bytes=0), plain()
    adaptive = measured(net)
    adaptive._trials.failed = True
    train(equal, 6)
    train(net, 6)
    assert operations(net) == operations(equal)


@quiet
def test_a_forward_that_cannot_run_again_warns_and_keeps_equal_bits():
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, items):
            return self.b(self.a(x) * next(items))

    net = Once()
    adaptive = measured(net)

    def run():
        for _ in range(30):
            net(torch.randn(32, 64), iter([2.0])).square().mean().backward()

    with pytest.warns(actnn.ActNNWarning, match="run once more with the same inputs") as caught:
        run()
    assert len(caught) == 1
    assert adaptive.bits == {}
    assert net.a.weight.grad.isfinite().all()


@quiet
def test_a_gradient_that_codes_make_infinite_is_never_silent():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(32, 512)
            self.broken = False

        def forward(self, x):
            y = self.l(x)
            return _Broken.apply(y) if self.broken else y

    class _Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            ctx.before = y.detach().clone()
            return y.clone()

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensors
            return g if torch.equal(y, ctx.before) else g * float("nan")

    net = Masked()
    measured(net)
    net.actnn.set_choices({"": actnn.Choice("compress", 8)})  # what a Function saves, too
    net.broken = True
    with pytest.warns(actnn.ActNNWarning, match="infinite or NaN even at 8 bits"):
        train(net, 6, lambda: torch.randn(64, 32))


@quiet
def test_a_gradient_that_is_infinite_before_costs_are_measured_is_never_silent():
    class Steep(nn.Module):
        """Has a finite gradient if that of y is known to a tenth of its largest element."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 512), nn.Linear(512, 4)

        def forward(self, x):
            y = self.a(x)
            exact = 2 * y.detach()
            y.register_hook(lambda g: g / ((g - exact).abs().max() < 0.1 * exact.abs().max()))
            return self.b((y * y).detach()) + (y * y).sum()

    def run():
        for _ in range(6):
            net(torch.randn(64, 32)).sum().div(64 * 4).backward()

    net = Steep()
    adaptive = measured(net)
    with pytest.warns(actnn.ActNNWarning, match="infinite or NaN at 2 bits for all tensors"):
        run()
    assert adaptive.bits


@pytest.mark.filterwarnings("error::actnn.ActNNWarning")
def test_another_backward_during_a_comparison_changes_nothing():
    """As that of another thread, which runs backward twice."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.before = nn.Linear(8, 8), None

        def forward(self, x):
            if self.before is not None:
                torch.autograd.grad(self.before, self.l.weight, retain_graph=True)
            return self.l(x)

    net = actnn.compress(Net(), bits=2, min_bytes=1 << 30)  # nothing is rounded
    net.before = net(torch.randn(4, 8)).sum()
    net.before.backward(retain_graph=True)
    for _ in range(4):
        net(torch.randn(4, 8)).sum().backward()


@quiet
def test_gradients_that_are_zero_or_overflow_at_first_are_measured_later():
    net = model()
    adaptive = measured(net)
    for step in range(18):
        scale = (0.0, float("inf"), 1.0)[min(step // 4, 2)]
        net.zero_grad()
        (net(images()).square().mean() * scale).backward()
        assert step > 8 or adaptive.bits == {}
    assert adaptive.bits


@quiet
def test_several_forwards_before_one_backward():
    net = model()
    adaptive = measured(net)
    for _ in range(6):
        net.zero_grad()
        (net(images()) * net(images())).square().mean().backward()
    assert adaptive.bits


def test_a_model_that_is_never_called_itself_says_so():
    net = model()
    measured(net)

    def run():
        for _ in range(30):
            with net.actnn:
                y = net[2](net[1](net[0](images())))
            y.square().mean().backward()

    with pytest.warns(actnn.ActNNWarning, match="Call the compressed model itself") as caught:
        run()
    assert len(caught) == 1


@quiet
def test_a_captured_step_is_not_repeated(monkeypatch):
    net = model()
    adaptive = measured(net)
    train(net, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(actnn.ActNNWarning, match="at least 3 training steps before one is captured"):
        train(net, 5)
    assert adaptive._trials.runs == 0
    monkeypatch.undo()
    train(net, 3)
    assert adaptive._trials.runs > 0


@quiet
def test_copies_go_on_by_themselves():
    net = model()
    measured(net)
    train(net, 2)
    other = copy.deepcopy(net)
    train(net, 2)
    assert net.actnn.adaptive.bits
    assert not other.actnn.adaptive.bits
    train(other, 5)
    assert other.actnn.adaptive.bits


@quiet
def test_nothing_of_a_trial_is_held():
    net = model()
    adaptive = measured(net)
    inputs = []

    def batch():
        x = images()
        inputs.append(weakref.ref(x))
        return x

    train(net, 5, batch)
    old = weakref.ref(net[0].weight)
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    train(net, 2)
    gc.collect()
    assert old() is None
    assert all(each() is None for each in inputs)
    assert adaptive._trials._replays == []


@quiet
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.cfloat], ids=str)
def test_gradients_of_other_types(dtype):
    net = nn.Sequential(
        nn.Linear(64, 64, dtype=dtype),
        nn.Linear(64, 64, dtype=dtype),
        nn.Linear(64, 4, dtype=dtype),
    )
    adaptive = measured(net)
    for _ in range(4):
        net(torch.randn(16, 64, dtype=dtype)).abs().square().sum().backward()
    assert bool(adaptive.bits) == (not dtype.is_complex)


@quiet
def test_empty_batches():
    net = model().eval()
    measured(net)
    for step in range(8):
        train(net, 1, lambda step=step: torch.randn(0 if step == 3 else 2, 3, 16, 16))


def test_gradients_on_several_devices_are_compared():
    """Sums are added on the host; parts of other types and layouts stand for other devices."""
    a = [torch.randn(4, 4), torch.randn(3, dtype=torch.bfloat16), None, torch.randn(2).double()]
    exact = Gradient(a, [])
    assert exact.energy() == pytest.approx(
        sum(float(x.double().square().sum()) for x in a if x is not None), rel=1e-5
    )
    other = Gradient([None if x is None else x * 1.5 for x in a], [])
    assert other.relative(exact) == pytest.approx(0.25, rel=1e-2)
    assert Gradient([x if x is None else x * float("nan") for x in a], []).relative(exact) == float(
        "inf"
    )


@quiet
def test_autocast_and_frozen_parameters():
    net = model()
    for p in net[0].parameters():
        p.requires_grad_(False)
    adaptive = measured(net)
    for _ in range(5):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = net(images())
        y.float().square().mean().backward()
    assert adaptive.bits
    assert net[0].weight.grad is None


def test_equal_bits_that_are_few_warn_once_and_name_more():
    net = deep()
    actnn.compress(net, bits=1, min_bytes=0)
    with pytest.warns(actnn.ActNNWarning, match=r"variance .* bits=\d would add") as caught:
        train(net, 19, lambda: torch.randn(8, 3, 16, 16))
    assert len(caught) == 1


def test_4_bits_warn_where_batches_differ_less_than_codes():
    net, first = model(), images()
    actnn.compress(net, bits=4, min_bytes=0)
    with pytest.warns(actnn.ActNNWarning, match=r"of the variance .* bits=\d would add") as caught:
        train(net, 4, lambda: first + 0.01 * torch.randn_like(first))
    assert len(caught) == 1
    actnn.compress(net, bits=8, min_bytes=0)
    train(net, 3)
    assert net.actnn.adaptive is None  # it has looked once


def test_norms_have_4_bits_where_bits_are_equal():
    """By class, by values, and as functions inside of a norm's class; explicit choices, too."""
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 8, 1))
    x = torch.randn(4, 3, 16, 16)
    found = {}
    for bits in (2, 4, 8):
        net(x)
        actnn.compress(net, bits=bits, min_bytes=0)
        net(x).sum().backward()
        records = [r for r in net.actnn.records if r.choice.action == "compress"]
        found[bits] = {r.module: r.choice.bits for r in records}
    assert found == {2: {"1": 4, "2": 2}, 4: {"1": 4, "2": 4}, 8: {"1": 8, "2": 8}}


@quiet
@pytest.mark.parametrize("settings", first_of([{"level": "L3"}, {"bits": 2}, {"bits": 4}], 1))
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_models_run_no_trials(settings, fullgraph):
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    actnn.compress(net, min_bytes=0, **settings)
    run = torch.compile(net, backend="aot_eager", fullgraph=fullgraph)
    for _ in range(5):
        run(torch.randn(32, 64)).square().mean().backward()
    assert net.actnn.adaptive._trials.runs == 0
    assert net[0].weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore::actnn.ActNNWarning")
@pytest.mark.parametrize(("most", "corrects"), [(0.0, True), (1e9, False)])
def test_batch_norms_are_corrected_only_where_it_is_needed(monkeypatch, most, corrects):
    monkeypatch.setattr(module, "PLAIN_ERROR", most)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    actnn.compress(net, level="L3", min_bytes=0)
    for _ in range(4):
        y = net(torch.randn(4, 3, 12, 12))
        y.square().mean().backward()
    assert net.actnn.adaptive.bits
    assert net.actnn.adaptive.corrects == corrects
    y = net(torch.randn(4, 3, 12, 12))  # a graph lives as long as its result
    assert has_node(y, "_BatchNorm") == corrects
