"""The float passes over raw pointers against nn.GRU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from c_access import Access, address, cells, numbers
from cpp_build import NEEDS_TOOLS
from float_passes import SIZES, Passes, check_against_gru, reference
from random_calibrations import float_weights
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from quant_gru.parameters.schema import Shape

pytestmark = NEEDS_TOOLS


@pytest.mark.parametrize("by_steps", [False, True], ids=["run", "iterate"])
@pytest.mark.parametrize("zoneout", [False, True], ids=["plain", "zoneout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_states_and_gradients(
    access: Access, size: tuple[int, ...], dtype: torch.dtype, zoneout: bool, by_steps: bool
) -> None:
    check_against_gru(access, size, dtype, zoneout=zoneout, by_steps=by_steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
def test_any_number_of_threads(access: Access, small_parts: None, dtype: torch.dtype) -> None:
    """States and gradients have the same bits."""
    T, N, C, H = 7, 13, 20, 37
    torch.manual_seed(0)
    gru = torch.nn.GRU(C, H, dtype=dtype)
    x, h0 = torch.randn(T, N, C, dtype=dtype), torch.randn(N, H, dtype=dtype)
    grad = torch.randn(T + 1, N, H, dtype=dtype)
    found = []
    for threads in (1, 2, 5, 17):
        passes = Passes(access, gru, False, threads)
        h, v = passes.forward(x, h0, 0.0, None, True)
        found.append([h, v, *passes.backward(x, h, v, grad, None).values()])
    for others in found[1:]:
        for ours, theirs in zip(others, found[0], strict=True):
            assert torch.equal(ours, theirs)


def test_zoneout_in_inference(access: Access) -> None:
    """Without training, a share of the old state remains, and the mask is not read."""
    gru = torch.nn.GRU(3, 5)
    x, h0 = torch.randn(4, 2, 3), torch.randn(2, 5)
    h, _ = Passes(access, gru, False).forward(x, h0, 0.25, torch.zeros(4, 2, 5), False)
    with torch.no_grad():
        expected = reference(gru, x, h0, torch.full((4, 2, 5), 0.75))
    assert torch.allclose(h[1:], expected, atol=1e-6, rtol=0)


def test_states_in_place(access: Access) -> None:
    """A step may write its state over the one before."""
    gru, x, h = torch.nn.GRU(3, 40), torch.randn(1, 2, 3), torch.randn(2, 40)
    with torch.no_grad():
        expected = gru(x, h[None])[0][0]
    assert torch.allclose(Passes(access, gru, True).in_place(x[0], h), expected, atol=1e-6)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_float_gru_of_layers(access: Access, both: bool, packed: bool) -> None:
    gru = torch.nn.GRU(6, 5, 2, bidirectional=both)
    T, N, D = 7, 4, 1 + both
    x, h0 = torch.randn(T, N, 6), torch.randn(2 * D, N, 5)
    lengths = torch.tensor([7, 5, 5, 1]) if packed else None
    with torch.no_grad():
        given = x if lengths is None else pack_padded_sequence(x, lengths)
        expected, last = gru(given, h0)
        if packed:
            expected, _ = pad_packed_sequence(expected, total_length=T)
    y, h_n = torch.zeros(T, N, D * 5), torch.zeros_like(h0)
    shape = Shape(input_size=6, hidden_size=5, num_layers=2, bias=True, bidirectional=both)
    weights = float_weights(gru)
    access.native.float_gru(
        numbers(shape), cells(weights), ctypes.c_int64(len(weights)), address(x),
        ctypes.c_int64(T), ctypes.c_int64(N), *map(address, (y, h_n, h0, lengths)),
    )  # fmt: skip
    assert torch.allclose(y, expected, atol=1e-6, rtol=0)
    assert torch.allclose(h_n, last, atol=1e-6, rtol=0)
