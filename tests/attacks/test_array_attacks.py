"""Arrays as Haste and Keras give them: anything is a GRU or an error of ours."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from limits import refused

from quant_gru import QuantGRU, QuantGRUError

HASTE = {
    "kernel": np.zeros((5, 12)),
    "recurrent_kernel": np.zeros((4, 12)),
    "bias": np.zeros(12),
    "recurrent_bias": np.zeros(12),
}

ARRAYS = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.integers(-2, 1 << 70),
    st.floats(),
    st.lists(st.integers(0, 3), max_size=3),
    hnp.arrays(
        st.sampled_from([np.float32, np.int8, np.complex64, np.dtype("U1"), np.dtype(object)]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=13),
    ),
    st.sampled_from([*HASTE.values(), torch.zeros(12), torch.zeros(4, 12, device="meta")]),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.dictionaries(st.sampled_from([*HASTE, "x", 3]), ARRAYS),
        st.fixed_dictionaries({name: ARRAYS for name in HASTE}),
        st.lists(ARRAYS, max_size=4),
        st.lists(st.lists(ARRAYS, max_size=4), max_size=3),
    )
)
def test_any_objects(given_parameters: Any) -> None:
    for read in (QuantGRU.from_haste, QuantGRU.from_keras):
        with contextlib.suppress(QuantGRUError):
            read(given_parameters)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1).expand(1 << 20, 12), "to have values, got an expanded tensor"),
        (torch.zeros(1 << 20, 1 << 20, device="meta"), "to have values, got a tensor on device"),
        (torch.zeros(5, 12).to_sparse(), "to be an array of real numbers"),
        (torch.zeros(5, 12, dtype=torch.complex64), "to be an array of real numbers"),
        (np.full((5, 12), 1e300), r"numbers that float32 can hold, got 1e\+300"),
        (torch.full((5, 12), -1e300, dtype=torch.float64), r"can hold, got -1e\+300"),
        (np.full((5, 12), 2**1000, dtype=object), "to be an array of real numbers"),
    ],
    ids=["expanded", "meta", "sparse", "complex", "1e300", "-1e300", "integers"],
)
def test_kernels_that_are_none(value: Any, message: str) -> None:
    with refused(f"kernel {message}|kernel to .*{message}"):
        QuantGRU.from_haste({**HASTE, "kernel": value})
    with refused(message):
        QuantGRU.from_keras([value, np.zeros((4, 12))])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38, 1e-300])
def test_numbers_that_float32_has(value: float) -> None:
    gru = QuantGRU.from_haste({**HASTE, "kernel": np.full((5, 12), value)})
    assert np.array_equal(gru.weight_ih_l0.detach(), np.full((12, 5), value, "f4"), equal_nan=True)
