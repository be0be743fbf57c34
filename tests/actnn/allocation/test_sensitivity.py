"""Statistics of training, and what is allocated from them."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from actnn._errors import ActNNError, ActNNWarning
from actnn.allocation import NoiseMonitor, Sensitivities


def one_step(statistics, ranges, energies, elements=64):
    statistics.step()
    bits = {
        name: statistics.bits_of(name, r, elements, source=name if name in energies else "")
        for name, r in ranges.items()
    }
    for name, energy in energies.items():
        statistics.observe_gradient(name, torch.full((4, 1), float(energy) ** 0.5))
    return bits


def test_bits_are_uniform_until_there_are_statistics():
    statistics = Sensitivities(2.0)
    bits, capacity = statistics.bits_of("a", torch.arange(4.0), 64, source="a")
    assert bits.tolist() == [2, 2, 2, 2]
    assert capacity == 8


def test_samples_with_large_ranges_get_more_bits():
    statistics = Sensitivities(2.0, per_layer=False)
    ranges = {"a": torch.tensor([1.0, 1000.0, 1.0, 1.0])}
    one_step(statistics, ranges, {"a": 1})
    bits, capacity = one_step(statistics, ranges, {"a": 1})["a"]
    assert bits[1] > bits[0]
    assert bits.sum() <= capacity == 8
    statistics.per_sample = False
    assert one_step(statistics, ranges, {"a": 1})["a"][0].tolist() == [2] * 4


def test_no_sample_gets_more_than_the_most():
    statistics = Sensitivities(2.0, most=3, per_layer=False)
    bits, _ = statistics.bits_of("a", torch.tensor([1.0, 1e9, 1.0, 1.0]), 64)
    assert bits.max() == 3


def test_layers_with_large_gradients_get_more_bits():
    statistics = Sensitivities(2.0, refresh=3)
    ranges = {name: torch.ones(8) for name in "ab"}
    for _ in range(4):
        one_step(statistics, ranges, {"a": 1, "b": 1e4})
    assert statistics.layer_bits("b") > 2 > statistics.layer_bits("a")
    assert statistics.layer_bits("a") + statistics.layer_bits("b") <= 4
    bits, capacity = statistics.bits_of("b", ranges["b"], 64, source="b")
    assert bits.sum() <= capacity == int(8 * statistics.layer_bits("b"))


def test_a_tensor_without_gradients_follows_the_one_before_within_the_budget():
    statistics = Sensitivities(2.0, refresh=2)
    ranges = {name: torch.ones(8) for name in ("a", "norm", "b")}
    for _ in range(5):
        one_step(statistics, ranges, {"a": 1e6, "b": 1})
    bits = {name: statistics.layer_bits(name) for name in ranges}
    assert bits["norm"] == bits["a"] > bits["b"]
    assert sum(bits.values()) <= 6


def test_energies_are_smoothed():
    statistics = Sensitivities(2.0, decay=0.75)
    statistics.observe_gradient("a", torch.full((4, 1), 1.0))
    statistics.observe_gradient("a", torch.full((4, 1), 3.0))
    statistics.bits_of("a", torch.ones(2), 64, factor=1.0, source="a")
    expected = 4 * (0.75 * 1 + 0.25 * 9) / (2**2 - 1) ** 2
    assert float(statistics.noise()) == pytest.approx(expected)


def test_each_sample_of_the_training_set_has_its_own_energy():
    statistics = Sensitivities(3.0, samples=10, per_layer=False)
    for norm in (2.0, 4.0):
        statistics.batch = torch.tensor([7, 1])
        statistics.observe_gradient("a", torch.tensor([[norm], [1000.0]]))
    statistics.batch = torch.tensor([1, 7, 3])
    bits, _ = statistics.bits_of("a", torch.ones(3), 64, factor=1.0, source="a")
    variance = statistics.tensors["a"].variance
    seven = (2.0**2 + 4.0**2) / 2
    assert variance.tolist() == pytest.approx([1e6, seven, (1e6 + seven) / 2])
    assert bits[0] >= bits[2] > bits[1]
    with pytest.raises(ActNNError, match="index of each of 2 samples, got 3"):
        statistics.observe_gradient("a", torch.ones(2, 1))


def test_gradients_are_observed_early_and_around_a_refresh():
    statistics = Sensitivities(2.0, refresh=50)
    observed = []
    for _ in range(100):
        statistics.step()
        observed.append(statistics.observing)
    assert all(observed[:10])
    assert sum(observed[10:]) == 3 + 3 + 3 + 1


def run_monitor(monitor, weight, noise, mean=0.0, scale=1.0, steps=40):
    """Steps whose gradients have a mean and a variance of 10 000 scale^2 in all."""
    modules = [nn.ParameterList([weight])]
    for _ in range(steps):
        monitor.begin_step(modules, torch.tensor(noise * scale**2), observing=True)
        (weight * (mean + scale * torch.randn(20_000) / 2**0.5)).sum().backward()


@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_noise_above_a_tenth_of_the_variance_warns_once(mean, scale):
    """The mean of the gradient does not count, nor do gradients that are accumulated."""
    weight = nn.Parameter(torch.zeros(20_000))
    quiet, loud = NoiseMonitor(2), NoiseMonitor(2)
    run_monitor(quiet, weight, 700.0, mean * scale, scale)
    with pytest.warns(ActNNWarning, match=r"adds \d\d% of the variance .* 3 bits would") as caught:
        run_monitor(loud, weight, 2000.0, mean * scale, scale)
    assert len(caught) == 1
    assert not quiet.warned
    added = int(str(caught[0].message).split("adds ")[1].split("%")[0])
    assert 20 <= added <= 30  # 2 000 of the measured 10 000 are noise: a quarter of the rest


def test_gradients_that_overflow_do_not_count():
    weight = nn.Parameter(torch.zeros(20_000))
    monitor = NoiseMonitor(2)
    run_monitor(monitor, weight, 500.0, steps=10)
    run_monitor(monitor, weight, 500.0, mean=float("inf"), steps=2)
    run_monitor(monitor, weight, 500.0, steps=10)
    assert monitor._added is not None
    assert abs(float(monitor._added) - 0.05) < 0.01


def test_a_copy_of_a_monitor_has_no_hooks():
    weight = nn.Parameter(torch.zeros(8))
    monitor = NoiseMonitor(2)
    monitor.begin_step([nn.ParameterList([weight])], None, observing=True)
    other = copy.deepcopy(monitor)
    assert weight._backward_hooks
    assert not other._handles
    monitor.stop()
    assert not weight._backward_hooks


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e6)), min_size=1, max_size=12),
    st.floats(1, 8),
)
def test_bits_per_tensor_are_integers_within_the_budget(tensors, average):
    statistics = Sensitivities(average, per_sample=False)
    names = [f"layer {index}" for index in range(len(tensors))]
    for step in range(6):
        statistics.step()
        bits = [statistics.tensor_bits(name) for name in names]
        assert min(bits) >= 1
        used = sum(b * elements for b, (elements, _) in zip(bits, tensors, strict=True))
        assert used <= average * sum(elements for elements, _ in tensors) * (1 + 1e-12)
        if statistics.observing:
            for name, (elements, ranges) in zip(names, tensors, strict=True):
                source = name if step % 2 or ranges > 1 else ""
                statistics.observe_tensor(name, torch.tensor(ranges), elements, source=source)
                statistics.observe_gradient(name, torch.ones(1, 1))


def test_a_tensor_that_is_no_longer_saved_takes_no_part():
    statistics = Sensitivities(2.0, per_sample=False, refresh=1)
    for step in range(6):
        statistics.step()
        names = "ab" if step < 3 else "b"
        for name in names:
            statistics.observe_tensor(name, torch.tensor(1.0), 64, source=name)
            statistics.observe_gradient(name, torch.full((1, 1), 1e3 if name == "b" else 1.0))
        if step == 2:
            assert statistics.tensor_bits("b") > 2 > statistics.tensor_bits("a")
    assert statistics.tensor_bits("b") == statistics.tensor_bits("a") == 2


def test_a_step_between_allocations_needs_no_statistics():
    statistics = Sensitivities(2.0, per_sample=False, refresh=20)
    observed = []
    for step in range(1, 61):
        statistics.step()
        if statistics.observing:
            observed.append(step)
    assert observed == [1, 4, 20, 40, 60]


def test_errors():
    with pytest.raises(ActNNError, match="per_sample to be True"):
        Sensitivities(2.0, per_sample=False, samples=5)
    with pytest.raises(ActNNError, match="average bits to be from 1 to 8, and"):
        Sensitivities(0.5)
    with pytest.raises(ActNNError, match="refresh to be at least 1"):
        Sensitivities(2.0, refresh=0)
