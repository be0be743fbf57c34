"""Functions of tables: accurate, and the same bits on every machine."""

import math

import numpy as np
import pytest

from quant_gru.integer.elementary import cube_root, sigmoid, tanh

X = np.concatenate([np.linspace(-40, 40, 4001), np.geomspace(1e-12, 1, 200), [0.0]])


@pytest.mark.parametrize(
    ("ours", "exact"),
    [
        (sigmoid, lambda x: 1 / (1 + math.exp(-x))),
        (tanh, math.tanh),
        (lambda x: cube_root(np.abs(x)), lambda x: abs(x) ** (1 / 3)),
    ],
    ids=["sigmoid", "tanh", "cube_root"],
)
def test_accuracy(ours, exact):
    expected = np.array([exact(x) for x in X.tolist()])
    assert np.all(np.abs(ours(X) - expected) <= 8 * np.spacing(np.abs(expected)))


def test_limits():
    huge = np.array([-1e300, 1e300])
    assert sigmoid(huge)[1] == 1.0
    assert 0 <= sigmoid(huge)[0] < 1e-300
    assert tanh(huge).tolist() == [-1.0, 1.0]
    assert cube_root(np.array([0.0, 1e-300, 8.0])).tolist() == [0.0, 1e-100, 2.0]


def test_the_bits_of_some_values():
    """They must not depend on the machine."""
    x = np.array([0.1, -1.0, 3.7])
    bits = [[value.hex() for value in f(x).tolist()] for f in (sigmoid, tanh)]
    bits.append([value.hex() for value in cube_root(np.abs(x)).tolist()])
    assert bits == BITS


BITS = [
    ["0x1.0cca12729afb8p-1", "0x1.136561454ba86p-2", "0x1.f3a59f801f582p-1"],
    ["0x1.983d7795f413ap-4", "-0x1.85efab514f394p-1", "0x1.ff5fdc948488cp-1"],
    ["0x1.db4c7760bcff3p-2", "0x1.0000000000000p+0", "0x1.8bf33eb6b7486p+0"],
]
