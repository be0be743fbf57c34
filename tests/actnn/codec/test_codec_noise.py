"""The noise: known answers, positions, independence."""

import math

import pytest
import torch

from actnn.codec import Key, encode, noise_state
from actnn.codec.noise import noise_of, philox
from actnn.codec.packing import unpack

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
# the first words of pi as counter and key; from the test vectors of Random123
KNOWN = [
    (7, (0,) * 4, (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (ONES,) * 4, (ONES,) * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (10, (0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, (ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN)
def test_philox_returns_the_known_answers(rounds, counter, key, words):
    found = philox((torch.tensor(counter[0]), *counter[1:]), key, rounds)
    assert " ".join(f"{int(word):08x}" for word in found) == words


def test_two_runs_share_eight_blocks():
    state = torch.tensor([0x0123456789ABCDEF, 77])
    noise = noise_of(state, 9, 5)
    assert noise.shape == (5, 32)
    for run in range(5):
        for element in range(32):
            words = philox(
                (torch.tensor(run // 2 * 8 + element // 4), 0, 9, 77), (0x89ABCDEF, 0x01234567)
            )
            word = int(words[run % 2 * 2 + element % 4 // 2])
            assert int(noise[run, element]) == word >> 16 * (element % 2) & 0xFFFF


def test_ranks_and_seeds_have_different_states():
    states = {
        tuple(noise_state(seed, rank=rank).tolist()) for seed in range(-3, 30) for rank in range(30)
    }
    assert len(states) == 33 * 30
    assert noise_state(1, step=5)[1] == 5


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def codes_of(x, key, bits=1):
    return unpack(encode(x, bits, key).data, bits)


def test_noise_is_uniform():
    noise = noise_of(noise_state(1), 0, 1 << 13)
    for shift in (0, 8):
        counts = torch.bincount((noise.flatten() >> shift) & 255, minlength=256).double()
        # 255 degrees of freedom: mean 255, deviation 22.6
        assert 255 - 4.5 * 22.6 < chi_square(counts, noise.numel() / 256) < 255 + 4.5 * 22.6


@pytest.mark.parametrize("other", ["step", "rank", "tensor", "position"])
def test_other_noise_is_independent(other):
    x = torch.full((1 << 16,), 0.5)
    x[::256] = 1
    x[1::256] = 0
    first = Key(noise_state(3), 5)
    second = {
        "step": Key(noise_state(3, step=1), 5),
        "rank": Key(noise_state(3, rank=1), 5),
        "tensor": Key(noise_state(3), 6),
        "position": first,
    }[other]
    a, b = codes_of(x, first), codes_of(x, second)
    if other == "position":
        b = b.roll(1)
    middle = (x == 0.5) & ((x == 0.5).roll(1) if other == "position" else True)
    a, b = a[middle], b[middle]
    pairs = torch.bincount(2 * a + b, minlength=4).double()
    # 3 degrees of freedom; exceeded with probability 1e-5
    assert chi_square(pairs, len(a) / 4) < 25.9


def test_equal_keys_give_equal_codes(key):
    x = torch.randn(1000)
    assert torch.equal(encode(x, 2, key).data, encode(x, 2, Key(noise_state(3), 5)).data)


def test_neighbouring_draws_do_not_correlate():
    noise = noise_of(noise_state(2), 1, 1 << 12).double() / 65536 - 0.5
    flat = noise.flatten()
    for lag in (1, 2, 4, 8, 32, 64):
        product = (flat[lag:] * flat[:-lag]).mean() * 12
        assert abs(product) < 4.5 / math.sqrt(len(flat) - lag)
