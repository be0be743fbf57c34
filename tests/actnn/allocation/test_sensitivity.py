"""Statistics of training, and what is allocated from them."""

import pytest
import torch

from actnn.allocation import Sensitivities
from actnn.errors import ActNNError


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
    energy = 4 * (0.75 * 1 + 0.25 * 9)
    assert statistics.tensors["a"].variance.tolist() == pytest.approx([energy / 2] * 2)


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


def test_errors():
    with pytest.raises(ActNNError, match="average bits to be from 1 to 8, and"):
        Sensitivities(0.5)
    with pytest.raises(ActNNError, match="refresh to be at least 1"):
        Sensitivities(2.0, refresh=0)
