"""The passes over raw pointers: floats against nn.GRU, codes against QuantGRU."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch
from c_access import Access, address, cells, numbers
from cpp_build import NEEDS_TOOLS
from random_calibrations import float_weights
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from quant_gru import QuantConfig, QuantGRU
from quant_gru.config import ACTIVATIONS, FUSIBLE
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

    def __init__(self, access: Access, gru: torch.nn.GRU, by_steps: bool) -> None:
        self.by_steps, self.dtype = int(by_steps), gru.weight_ih_l0.dtype
        name = "float" if self.dtype is torch.float32 else "double"
        self.forward_pass = getattr(access.native, f"forward_{name}")
        self.backward_pass = getattr(access.native, f"backward_{name}")
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
        self.forward_pass(
            int(training), T, N, C, H,
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
        self.backward_pass(
            T, N, C, H, *map(address, (*kept, *found.values())), address(mask), self.by_steps
        )
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


def test_zoneout_in_inference(access: Access) -> None:
    """Without training, a share of the old state remains."""
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


class Codes:
    """A calibrated QuantGRU in the arguments of the pass over codes."""

    def __init__(self, seed: int, zoneout: float) -> None:
        rng = random.Random(seed)
        self.C, self.H, self.N, self.T = (rng.randint(1, most) for most in (20, 33, 5, 8))
        self.bits = rng.choice((8, 16))
        config = QuantConfig.uniform(self.bits, is_symmetric=False)
        for name in FUSIBLE:
            if rng.random() < 0.4:
                config = config.replace(name, bitwidth=None)
        config = config.replace_globals(scale_kind=rng.choice(("pot", "free")))
        torch.manual_seed(seed)
        self.gru = QuantGRU(self.C, self.H, config=config, zoneout=zoneout).eval()
        self.gru.calibrate(torch.randn(20, 4, self.C))
        self.gru.finalize_calibration()
        cell = self.gru._plan().cells[0][0]
        self.q, w = cell.frozen.quantizers, cell.weights
        self.dtype = torch.int8 if self.bits == 8 else torch.int16
        self.W, self.R = (each.to(self.dtype).T.contiguous() for each in (w.W, w.R))
        self.bx, self.br = w.bw.to(torch.int32), w.br.to(torch.int32)
        points = [self.q.get(name) for name in ACTIVATIONS]
        scales = [0.0 if q is None else q.scale for q in points]
        columns = [w.scales[f"weight.{name}"] for name in ("W", "R", "bw", "br")]
        self.scale = torch.cat((torch.tensor(scales), *columns))
        self.zero = torch.tensor([0.0 if q is None else float(q.zero_point) for q in points])

    def run(self, access: Access, x: Tensor, h0: Tensor, p: float, mask: Tensor | None, by: int):
        """Return the codes of all states (T, N, H)."""
        T, N, _ = x.shape
        h = torch.cat((h0[None].to(self.dtype), torch.zeros(T, N, self.H, dtype=self.dtype)))
        kept = [self.W, self.R, self.bx, self.br, x.to(self.dtype), h]
        access._answer(
            f"codes_int{self.bits}", T, N, self.C, self.H, *map(address, kept),
            ctypes.c_float(p), *map(address, (mask, self.scale, self.zero)), by,
        )  # fmt: skip
        return h[1:].to(torch.int64)


@pytest.mark.parametrize("seed", range(12))
def test_codes(access: Access, seed: int) -> None:
    zoneout = (0.0, 0.3)[seed % 2]
    case = Codes(seed, zoneout)
    qx, qh = case.q["input.x"], case.q["output.h"]
    x = torch.randint(qx.lo, qx.hi + 1, (case.T, case.N, case.C))
    h0 = torch.randint(qh.lo, qh.hi + 1, (case.N, case.H))
    expected = case.gru.forward_integer(x, h0[None])[0].to(torch.int64)
    for by_steps in (0, 1):
        assert torch.equal(case.run(access, x, h0, zoneout, None, by_steps), expected)


def test_codes_that_are_held(access: Access) -> None:
    case = Codes(1, 0.0)
    x, h0 = torch.zeros(2, case.N, case.C), torch.ones(case.N, case.H)
    mask = torch.zeros(2, case.N, case.H, dtype=case.dtype)
    held = case.run(access, x, h0, 0.0, mask, 0)
    assert (held == 1).all()
    assert torch.equal(
        case.run(access, x, h0, 0.0, mask + 1, 0), case.run(access, x, h0, 0.0, None, 0)
    )


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, -1.0, r"scale.*operator 'input\.x'"),
        (0, 0.0, "scale"),
        (13, torch.nan, "scale.*weights"),
    ],
)
def test_scales_are_checked(access: Access, place: int, value: float, said: str) -> None:
    case = Codes(0, 0.0)
    case.scale[place] = value
    with pytest.raises(ValueError, match=said):
        case.run(access, torch.zeros(1, 1, case.C), torch.zeros(1, case.H), 0.0, None, 0)


def test_zero_points_are_checked(access: Access) -> None:
    case = Codes(0, 0.0)
    case.zero[5] = -1.0  # gate.z_out is unsigned
    with pytest.raises(ValueError, match=r"zero_point.*\[0, .*got -1.*gate\.z_out"):
        case.run(access, torch.zeros(1, 1, case.C), torch.zeros(1, case.H), 0.0, None, 0)
