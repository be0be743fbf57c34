"""The float passes of the C++ library beside nn.GRU, on the CPU or on a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from c_access import Access, address
from torch import Tensor

from quant_gru.integer.plan import update_first

SIZES = [(1, 1, 1, 1), (5, 3, 4, 7), (9, 8, 40, 64), (12, 33, 100, 100), (3, 2, 300, 17)]
"""T, N, C, H."""


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
        h = torch.cat((h0[None], h0.new_full((T, N, H), torch.nan)))
        v, Wx, Rh = (h.new_zeros(T * N * n * H) for n in (4, 3, 3))
        self.call(
            f"forward_{self.name}", self.threads, int(training), T, N, C, H,
            *map(address, (self.W, self.R, self.bx, self.br, x, h, v, Wx, Rh)),
            ctypes.c_float(p), address(mask), self.by_steps,
        )  # fmt: skip
        return h, v.view(T, N, 4 * H)

    def in_place(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the states after a step with x (N, C), written over those before it."""
        (N, C), H = x.shape, h.shape[1]
        h, Wx, Rh = h.clone(), x.new_zeros(N, 3 * H), x.new_zeros(N, 3 * H)
        arrays = (self.W, self.R, self.bx, self.br, x, h, Wx, Rh)
        self.call(f"in_place_{self.name}", N, C, H, *map(address, arrays))
        return h

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
        found = {name: x.new_zeros(size) for name, size in sizes.items()}
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


def check_against_gru(
    access: Access,
    size: tuple[int, ...],
    dtype: torch.dtype,
    *,
    zoneout: bool,
    by_steps: bool,
    device: str = "cpu",
) -> None:
    """Check states and gradients: 1e-6 in float, 1e-13 in double, more for sums of over 400 terms.

    Args:
        access: The library.
        size: T, N, C, H.
        dtype: float32 or float64.
        zoneout: Whether there is a mask of held units.
        by_steps: Whether steps are separate calls.
        device: Where the passes run. nn.GRU runs on the CPU in float64.
    """
    T, N, C, H = size
    torch.manual_seed(T)
    gru = torch.nn.GRU(C, H, dtype=dtype)
    x, h0 = torch.randn(T, N, C, dtype=dtype), torch.randn(N, H, dtype=dtype)
    mask = (torch.rand(T, N, H) < 0.7).to(dtype) if zoneout else None
    grad = torch.randn(T, N, H, dtype=dtype)
    dh_new = torch.cat((torch.full_like(h0, 7)[None], grad)).to(device)
    passes = Passes(access, gru.to(device), by_steps)
    given, held = x.to(device), None if mask is None else mask.to(device)
    h, v = passes.forward(given, h0.to(device), 0.3 * zoneout, held, True)
    found = passes.backward(given, h, v, dh_new, held)
    exact = gru.cpu().double()  # the reference in float64, so that only our own error counts
    x, h0 = x.double().requires_grad_(), h0.double().requires_grad_()
    y = reference(exact, x, h0, None if mask is None else mask.double())
    y.backward(grad.double())
    y = y.detach()
    tolerance = 1e-6 if dtype is torch.float32 else 1e-13
    error = float((h[1:].cpu() - y).abs().max())
    assert error <= tolerance, f"states differ by {error}"
    gradients: list[Any] = [update_first(each.grad) for each in exact.parameters()]
    dW, dR, dbx, dbr = gradients
    expected = {"dx": x.grad, "dW": dW.T, "dR": dR.T, "dbx": dbx, "dbr": dbr, "dh": h0.grad}
    tolerance *= max(1.0, (T * N / 400) ** 0.5)
    for name, gradient in expected.items():
        assert gradient is not None
        scale = max(float(gradient.abs().max()), 1.0)
        error = float((found[name].cpu() - gradient).abs().max()) / scale
        assert error <= tolerance, f"{name} differs by {error} of the largest gradient"
