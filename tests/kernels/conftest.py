"""Shared by the tests of kernels."""

import pytest

from quant_gru.kernels import _native


@pytest.fixture
def cheap_threads():
    """Native work is divided among threads however little it is."""
    _native.set_thread_price(1e-9)
    yield
    _native.set_thread_price(1.0)
