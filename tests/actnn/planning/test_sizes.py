"""Sizes of memory as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actnn.errors import ActNNError
from actnn.planning import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        (6e9, 6 * 10**9),
        ("7 B", 7),
        ("1.5 kB", 1500),
        ("500 MB", 500_000_000),
        ("500MB", 500_000_000),
        ("6 GiB", 6 * 2**30),
        ("0.5 KiB", 512),
        ("2 TiB", 2**41),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "6",
        "6 gib",
        "6 Gib",
        "6  GiB",
        " 6 GiB",
        "-1 GiB",
        "1e3 MB",
        "6 G",
        0,
        -5,
        True,
        1.5,
        float("inf"),
        float("nan"),
        None,
    ],
)
def test_anything_else_is_an_error(text):
    with pytest.raises(ActNNError, match="Expected budget to be"):
        parse_bytes(text, "budget")


@given(st.integers(1, 2**45))
def test_a_formatted_size_is_within_a_percent(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.01)
