"""What must not be recomputed is found, named and left out."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import actnn
from actnn.planning import Planner, blocks
from actnn.planning.blocks import BlockChoice
from actnn.planning.comparison import KEEP, LOSSLESS, RECOMPUTE
from actnn.planning.units import find_units, units_that_run
from sweeps import first_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def changed(self, x):
        return x

    def forward(self, x, *_):
        return x + torch.tanh(self.out(self.changed(self.inner(x))))


class Python(Block):
    def changed(self, x):
        return x * (0.5 + random.random())


class Numpy(Block):
    def changed(self, x):
        return x * float(np.random.rand() + 0.5)


class Own(Block):
    """Random numbers of a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def changed(self, x):
        return x * torch.rand(x.shape, generator=self.generator)


class Counter(Block):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def changed(self, x):
        self.calls += 1
        return x * self.calls


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x, *_):
        return functional.rrelu(self.linear(x), training=True)


class Cache(Block):
    def forward(self, x, cache):
        cache.append(self.inner(x))
        return x + torch.tanh(self.out(sum(cache)))


class Object:
    def __init__(self):
        self.keys = {}


class KeyCache(Block):
    def forward(self, x, cache):
        held = cache.keys.get("keys")
        cache.keys["keys"] = self.inner(x) if held is None else held + self.inner(x)
        return x + torch.tanh(self.out(cache.keys["keys"]))


class Net(nn.Module):
    def __init__(self, kind, count=4, cache=list):
        super().__init__()
        self.cache = cache
        self.blocks = nn.ModuleList((kind if i == 1 else Block)() for i in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.cache())
        return x


def gradients(model, x):
    model.zero_grad()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def smallest_plan(model, x):
    with pytest.raises(actnn.ActNNError, match="Expected budget to be at least") as caught:
        actnn.fit(model, x, "1 KiB", bits=())
    least = int(str(caught.value).split("at least ")[1].split()[0])
    return actnn.fit(model, x, int(1.02 * least), bits=())


@pytest.mark.parametrize(
    ("kind", "why"),
    first_of(
        [
            (Python, "take random numbers of torch alone"),
            (Own, "two equal steps differ"),
            (Counter, "give the same result when its forward runs again"),
            (Cache, "changes its argument '1'"),
            (Numpy, "take random numbers of torch alone"),
            (KeyCache, "changes its argument '1'"),
        ],
        4,
    ),
)
def test_units_that_do_something_else_when_they_run_again_are_not_recomputed(kind, why):
    torch.manual_seed(0)
    model = Net(kind, cache=Object if kind is KeyCache else list)
    x = torch.randn(2048, 64)
    exact = gradients(model, x)
    if kind in (Counter, Own):  # nothing of it changes between steps
        model.blocks[1].calls, model.blocks[1].generator = 0, torch.Generator()
    plan = smallest_plan(model, x)
    assert plan.choices["blocks.1"].action == "keep"
    (note,) = plan.notes
    assert note.startswith("not recomputed: blocks.")
    assert why in note
    assert note in str(plan)
    assert plan.noise == 0
    if kind is not Own:  # of which no step can be repeated
        assert plan.choices["blocks.2"].action == "recompute"
        if kind is Counter:
            assert model.blocks[1].calls == 0
        assert torch.equal(gradients(model, x), exact)


def test_noise_that_is_filled_after_it_is_saved_is_recomputed_right():
    torch.manual_seed(0)
    model = nn.Sequential(*(Noise() for _ in range(3)))
    x = torch.randn(4096, 64)
    exact = gradients(model, x)
    plan = smallest_plan(model, x)
    assert {choice.action for choice in plan.choices.values()} == {"recompute"}
    for _ in range(3):
        assert torch.equal(gradients(model, x), exact)


@pytest.mark.parametrize("kind", [Python, Numpy, Counter, Cache])
def test_a_choice_by_hand_is_checked_in_its_first_step(kind):
    torch.manual_seed(0)
    model, x = Net(kind), torch.randn(256, 64)
    actnn.compress(model, bits=32, min_bytes=0)
    model.actnn.set_choices({"blocks.1": actnn.Choice("recompute")})
    with pytest.raises(actnn.ActNNError, match="Expected a module to recompute to") as caught:
        gradients(model, x)
    assert f"got {kind.__name__}, whose forward" in str(caught.value)
    model.actnn.set_choices({"blocks.0": actnn.Choice("recompute")})
    assert gradients(model, x).isfinite().all()


class Late(Counter):
    """Alternates from its 40th call on."""

    def changed(self, x):
        self.calls += 1
        return x * (1 if self.calls < 40 else 1 + self.calls % 2)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_module_that_does_something_else_later_is_found(bits):
    torch.manual_seed(0)
    model, x = Net(Late), torch.randn(256, 64)
    actnn.compress(model, bits=32, min_bytes=0)
    model.actnn.set_choices({"blocks.1": actnn.Choice("recompute", bits)})
    for _ in range(31):  # other results from the 20th step on
        gradients(model, x)
    if bits is None:
        with pytest.raises(actnn.ActNNError, match="same result when its forward runs again"):
            gradients(model, x)
    else:  # the second run gets decoded codes: nothing can be compared
        gradients(model, x)


def test_a_choice_by_hand_that_ends_in_late_noise_is_right():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.RReLU()), nn.Linear(8, 8))
    x = torch.randn(4096, 8)
    exact = gradients(model, x)
    actnn.compress(model, bits=32)
    model.actnn.set_choices({"0": actnn.Choice("recompute")})
    for _ in range(3):
        assert torch.equal(gradients(model, x), exact)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")
def test_a_compiled_choice_with_other_gradients_is_left_out(monkeypatch):
    """As that of recomputed dropout, of which PyTorch draws other masks."""
    from torch._dynamo.backends.debugging import aot_eager

    def wrong(graph, inputs):
        run = aot_eager(graph, inputs)
        return lambda *arguments: [y * 1.1 for y in run(*arguments)]

    monkeypatch.setattr(blocks, "_backend", lambda form: aot_eager if form[0] == 1 else wrong)
    model, x = Net(Block, 2), torch.randn(64, 64)
    planner = Planner(model, x, bits=(), compile=True)
    assert not [choice for choice in planner.costs.of if choice.memory != 1]
    assert not planner._is_right(BlockChoice("keep", memory=0.2, whole=True))
    plan = planner.plan("1 GiB")
    assert not any(choice.memory != 1 for choice in plan.choices.values())
    assert not any(choice.memory != 1 for found in planner._seconds for choice in found)
    assert "'compiled for 50%' is left out: the gradient is wrong by 0." in str(plan)
    assert "'compiled as one for 20%' is left out: the gradient is wrong by 0." in str(plan)


def test_noise_does_not_count_masks_of_dropout_that_differ():
    """Compressed dropout draws masks of its own."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 64))
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(3)))
    planner = Planner(model, torch.randn(1024, 64), bits=(8,))
    assert LOSSLESS in planner.costs.of
    eight = BlockChoice("compress", 8)
    assert 0 < planner.costs.of[eight].noise.sum() < 1e-3
    assert 0 < planner._noise((KEEP, eight, RECOMPUTE)) < 1e-3
    assert not planner._measurement.notes


def test_the_reason_names_the_argument():
    model = Net(Cache)
    units = units_that_run(find_units(model), lambda: model(torch.randn(2, 64)))
    assert [unit.once.split(" (")[0] for unit in units] == [
        "",
        "its forward changes its argument '1'",
        "",
        "",
    ]
