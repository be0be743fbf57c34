"""Philox4x32-10 against its published vectors, and the events drawn from it."""

import pytest
import torch

from quant_gru.integer.random import chance, events, philox
from quant_gru.kernels.cpu import executor as cpu

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_vectors(counter, key, expected):
    seed = key[0] | key[1] << 32
    seed = torch.tensor(seed - (1 << 64) if seed >> 63 else seed)
    assert tuple(int(word) for word in philox(counter, seed)) == expected


def test_events_depend_on_place_and_seed_alone():
    seed = torch.tensor(1234567890123456789)
    whole = events(seed, 0.3, (7, 5, 11), 3)
    assert torch.equal(events(seed, 0.3, (4, 3, 9), 3), whole[:4, :3, :9])
    assert not torch.equal(events(seed, 0.3, (7, 5, 11), 2), whole)
    assert not torch.equal(events(seed + 1, 0.3, (7, 5, 11), 3), whole)
    assert not torch.equal(events(seed + (1 << 32), 0.3, (7, 5, 11), 3), whole)


@pytest.mark.parametrize("p", [0.0, 0.01, 0.25, 0.9, 1.0])
def test_events_happen_as_often_as_they_should(p):
    found = events(torch.tensor(99), p, (40, 25, 50), 0).double()
    error = 5 * (p * (1 - p) / found.numel()) ** 0.5
    assert abs(float(found.mean()) - p) <= error
    for dim in range(3):  # no place is preferred
        others = [d for d in range(3) if d != dim]
        assert (found.mean(others) - p).abs().max() <= 6 * error * found.shape[dim] ** 0.5


@pytest.mark.parametrize("seed", [0, 5, -7, (1 << 62) + 12345])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_native_events(seed, p):
    if cpu.chosen() == cpu.REFERENCE:
        pytest.skip("the reference executor is in use")
    seed, shape = torch.tensor(seed), (3, 4, 37)
    assert torch.equal(cpu.events(seed, p, shape, 1 << 30), events(seed, p, shape, 1 << 30))


def test_chances_at_the_ends():
    assert chance(0.0) == 0
    assert chance(1.0) == 1 << 32
