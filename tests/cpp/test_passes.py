"""The float passes over raw pointers against nn.GRU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from c_access import Access, address, cells, numbers
from cpp_build import NEEDS_TOOLS
from random_calibrations import float_weights
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from quant_gru.integer.plan import update_first
from quant_gru.parameters.schema import Shape

pytestmark = NEEDS_TOOLS
SIZES = [(1, 1, 1, 1), (5, 3, 4, 7), (9, 8, 40, 64), (12, 33, 100, 100), (3, 2, 300, 17)]


def reference(gru: torch.nn.GRU, x: Tensor, h0: Tensor, mask: Tensor | None) -> Tensor:
    """All states (T, N, H) of nn.GRU; where mask is 0 a unit keeps its state."""
    if mask is None:
        return gru(x, h0[None])[0]
    h, found = h0, []
    for t in range(len(x)):
        h = h + (gru(x[t : t + 1], h[None])[1][0] - h) * mask[t]
        found.append(h)
    return torch.stack(found)


class Passes:
    """Forward and backward of the library, with the weights of an nn.GRU."""

    def __init__(self, access: Access, gru: torch.nn.GRU, by_steps: bool, threads: int = 1) -> None:
        self.by_steps, self.dtype = int(by_steps), gru.weight_ih_l0.dtype
        self.threads, self.call = threads, access.call
        self.name = "float" if self.dtype is torch.float32 else "double"
        weights = [update_first(each.detach()) for each in gru.parameters()]
        self.W, self.R = (each.T.contiguous() for each in weights[:2])
        self.bx, self.br = weights[2:]

    def forward(
        self, x: Tensor, h0: Tensor, p: float, mask: Tensor | None, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Return states (T + 1, N, H) and v (T, N, 4H)."""
        T, N, C = x.shape
        H = h0.shape[1]
        h = torch.cat((h0[None], torch.full((T, N, H), torch.nan, dtype=self.dtype)))
        v, Wx, Rh = (h.new_zeros(T * N * n * H) for n in (4, 3, 3))
        self.call(
            f"forward_{self.name}", self.threads, int(training), T, N, C, H,
            *map(address, (self.W, self.R, self.bx, self.br, x, h, v, Wx, Rh)),
            ctypes.c_float(p), address(mask), self.by_steps,
        )  # fmt: skip
        return h, v.view(T, N, 4 * H)

    def backward(
        self, x: Tensor, h: Tensor, v: Tensor, dh_new: Tensor, mask: Tensor | None
    ) -> dict[str, Tensor]:
        """Return all gradients."""
        T, N, C = x.shape
        H = h.shape[2]
        sizes: dict[str, tuple[int, ...]] = {
            "dx": (T, N, C), "dW": (C, 3 * H), "dR": (H, 3 * H), "dbx": (3 * H,), "dbr": (3 * H,),
            "dh": (N, H), "dp": (T, N, 3 * H), "dq": (T, N, 3 * H),
        }  # fmt: skip
        found = {name: torch.zeros(size, dtype=self.dtype) for name, size in sizes.items()}
        x_t = x.permute(0, 2, 1) if self.by_steps else x.permute(2, 0, 1)
        kept = [
            self.W.T.contiguous(), self.R.T.contiguous(), x_t.contiguous(),
            h.permute(0, 2, 1).contiguous() if self.by_steps else h, v, dh_new,
        ]  # fmt: skip
        arguments = (*kept, *found.values(), mask)
        self.call(
            f"backward_{self.name}", self.threads, T, N, C, H,
            *map(address, arguments), self.by_steps,
        )  # fmt: skip
        return found


@pytest.mark.parametrize("by_steps", [False, True], ids=["run", "iterate"])
@pytest.mark.parametrize("zoneout", [False, True], ids=["plain", "zoneout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_states_and_gradients(
    access: Access, size: tuple[int, ...], dtype: torch.dtype, zoneout: bool, by_steps: bool
) -> None:
    T, N, C, H = size
    torch.manual_seed(T)
    gru = torch.nn.GRU(C, H, dtype=dtype)
    x, h0 = torch.randn(T, N, C, dtype=dtype), torch.randn(N, H, dtype=dtype)
    mask = (torch.rand(T, N, H) < 0.7).to(dtype) if zoneout else None
    grad = torch.randn(T, N, H, dtype=dtype)
    passes = Passes(access, gru, by_steps)
    h, v = passes.forward(x, h0, 0.3 * zoneout, mask, True)
    found = passes.backward(x, h, v, torch.cat((torch.full_like(h0, 7)[None], grad)), mask)
    exact = gru.double()  # the reference in float64, so that only our own error counts
    x, h0 = x.double().requires_grad_(), h0.double().requires_grad_()
    y = reference(exact, x, h0, None if mask is None else mask.double())
    y.backward(grad.double())
    tolerance = 1e-6 if dtype is torch.float32 else 1e-13
    assert (h[1:] - y).abs().max() <= tolerance
    gradients: list[Any] = [update_first(each.grad) for each in exact.parameters()]
    dW, dR, dbx, dbr = gradients
    expected = {"dx": x.grad, "dW": dW.T, "dR": dR.T, "dbx": dbx, "dbr": dbr, "dh": h0.grad}
    for name, gradient in expected.items():
        assert gradient is not None
        scale = max(float(gradient.abs().max()), 1.0)
        assert float((found[name] - gradient).abs().max()) <= tolerance * scale, name


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
