"""The passes over pointers to codes against QuantGRU: codes and gradients, bit for bit."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from c_access import Access, address
from cpp_build import NEEDS_TOOLS
from torch import Tensor

from quant_gru import QuantConfig, QuantGRU
from quant_gru.config import ACTIVATIONS, FUSIBLE
from quant_gru.integer.plan import update_first
from quant_gru.kernels.cpu import executor

pytestmark = NEEDS_TOOLS


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

    def run(
        self,
        access: Access,
        x: Tensor,
        h0: Tensor,
        *,
        p: float = 0.0,
        mask: Tensor | None = None,
        training: bool = False,
        by_steps: bool = False,
        threads: int = 1,
    ) -> Tensor:
        """Return the codes of all states (T, N, H)."""
        T, N, _ = x.shape
        h = torch.cat((h0[None].to(self.dtype), torch.zeros(T, N, self.H, dtype=self.dtype)))
        kept = [self.W, self.R, self.bx, self.br, x.to(self.dtype), h]
        access.call(
            f"codes_int{self.bits}", threads, int(training), T, N, self.C, self.H,
            *map(address, kept), ctypes.c_float(p), *map(address, (mask, self.scale, self.zero)),
            int(by_steps),
        )  # fmt: skip
        return h[1:].to(torch.int64)

    def gradients(
        self,
        access: Access,
        x: Tensor,
        h: Tensor,
        grad: Tensor,
        mask: Tensor | None,
        *,
        start: float = 0.0,
        by_steps: bool = False,
        threads: int = 1,
    ) -> dict[str, Tensor]:
        """Return all gradients from codes x (T, N, C) and h (T + 1, N, H).

        `start` is what gradients of weights and biases are added to.
        """
        (T, N, C), H = x.shape, self.H
        sizes: dict[str, tuple[int, ...]] = {
            "dx": (T, N, C), "dW": (C, 3 * H), "dR": (H, 3 * H), "dbx": (3 * H,), "dbr": (3 * H,),
            "dh": (N, H),
        }  # fmt: skip
        found = {name: torch.full(size, start) for name, size in sizes.items()}
        found["dh"].zero_()
        x, h = x.to(self.dtype), h.to(self.dtype)
        x_t = x.permute(0, 2, 1) if by_steps else x.permute(2, 0, 1)
        W_t, R_t = self.W.T.contiguous(), self.R.T.contiguous()
        given = [
            W_t, R_t, self.bx, self.br, x_t.contiguous(),
            h.permute(0, 2, 1).contiguous() if by_steps else h,
            torch.cat((torch.full((1, N, H), 7.0), grad)), *found.values(), mask, self.scale,
            self.zero,
        ]  # fmt: skip
        access.call(
            f"codes_backward_int{self.bits}", threads, T, N, C, H, *map(address, given),
            int(by_steps),
        )  # fmt: skip
        return found


class Drawn:
    """Random codes, a mask, and gradients of the outputs of a case."""

    def __init__(self, case: Codes, seed: int, zoneout: bool) -> None:
        torch.manual_seed(seed)
        qx, qh = case.q["input.x"], case.q["output.h"]
        self.x = torch.randint(qx.lo, qx.hi + 1, (case.T, case.N, case.C))
        self.h0 = torch.randint(qh.lo, qh.hi + 1, (case.N, case.H))
        self.mask = (torch.rand(case.T, case.N, case.H) < 0.7).float() if zoneout else None
        self.code_mask = None if self.mask is None else self.mask.to(case.dtype)
        self.grad = torch.randn(case.T, case.N, case.H)

    def python(self, case: Codes) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the real outputs of QuantGRU in training, and all gradients."""
        gru = case.gru.train()
        gru.use_quantization = True
        qx, qh = case.q["input.x"], case.q["output.h"]
        x = qx.dequantize(self.x).requires_grad_()
        h0 = qh.dequantize(self.h0).requires_grad_()
        y, _ = gru(x, h0[None], zoneout_mask=self.mask)
        y.backward(self.grad)
        gradients = [update_first(each.grad) for each in gru.parameters() if each.grad is not None]
        dW, dR, dbx, dbr = gradients
        assert x.grad is not None
        assert h0.grad is not None
        return y.detach(), {
            "dx": x.grad, "dW": dW.T, "dR": dR.T, "dbx": dbx, "dbr": dbr, "dh": h0.grad
        }  # fmt: skip


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries use the same instruction set."""
    monkeypatch.setenv(executor.VARIABLE, "portable")


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("seed", range(12))
def test_gradients(access: Access, seed: int) -> None:
    """Training equals Python's: codes of the forward and all gradients."""
    case = Codes(seed, 0.0)
    drawn = Drawn(case, seed, zoneout=seed % 3 == 0)
    y, expected = drawn.python(case)
    states = case.run(access, drawn.x, drawn.h0, p=0.4, mask=drawn.code_mask, training=True)
    assert torch.equal(case.q["output.h"].dequantize(states), y)
    h = torch.cat((drawn.h0[None], states))
    found = case.gradients(access, drawn.x, h, drawn.grad, drawn.code_mask)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert all(float(gradient.abs().max()) > 0 for gradient in expected.values())
    # step by step the sums of weight gradients round at other places
    found = case.gradients(access, drawn.x, h, drawn.grad, drawn.code_mask, by_steps=True)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-5), name
        if name in ("dx", "dh"):
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("bits", [8, 16])
def test_any_number_of_threads(access: Access, small_parts: None, bits: int) -> None:
    case = next(case for case in (Codes(seed, 0.0) for seed in range(20)) if case.bits == bits)
    drawn = Drawn(case, 3, zoneout=True)
    found = []
    for threads in (1, 2, 7):
        states = case.run(
            access, drawn.x, drawn.h0, mask=drawn.code_mask, training=True, threads=threads
        )
        h = torch.cat((drawn.h0[None], states))
        gradients = case.gradients(access, drawn.x, h, drawn.grad, drawn.code_mask, threads=threads)
        found.append([states, *gradients.values()])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


def test_gradients_are_added(access: Access) -> None:
    """Gradients of weights are added to what is there; without steps, nothing changes."""
    case = Codes(4, 0.0)
    drawn = Drawn(case, 4, zoneout=False)
    h = torch.cat((drawn.h0[None], case.run(access, drawn.x, drawn.h0, training=True)))
    once = case.gradients(access, drawn.x, h, drawn.grad, None)
    more = case.gradients(access, drawn.x, h, drawn.grad, None, start=8.0)
    none = case.gradients(access, drawn.x[:0], h[:1], drawn.grad[:0], None, start=8.0)
    for name in ("dW", "dR", "dbx", "dbr"):
        assert torch.equal(more[name], once[name] + 8)
        assert (none[name] == 8).all()
    assert torch.equal(more["dx"], once["dx"])
    assert torch.equal(more["dh"], once["dh"])


@pytest.mark.parametrize("seed", range(12))
def test_codes(access: Access, seed: int) -> None:
    zoneout = (0.0, 0.3)[seed % 2]
    case = Codes(seed, zoneout)
    drawn = Drawn(case, seed, zoneout=False)
    expected = case.gru.forward_integer(drawn.x, drawn.h0[None])[0].to(torch.int64)
    for by_steps in (False, True):
        found = case.run(access, drawn.x, drawn.h0, p=zoneout, by_steps=by_steps)
        assert torch.equal(found, expected)


def test_codes_that_are_held(access: Access) -> None:
    """A mask counts in training only."""
    case = Codes(1, 0.0)
    x, h0 = torch.zeros(2, case.N, case.C), torch.ones(case.N, case.H)
    mask = torch.zeros(2, case.N, case.H, dtype=case.dtype)
    plain = case.run(access, x, h0)
    assert (case.run(access, x, h0, mask=mask, training=True) == 1).all()
    assert torch.equal(case.run(access, x, h0, mask=mask), plain)
    assert torch.equal(case.run(access, x, h0, mask=mask + 1, training=True), plain)
    assert not (plain == 1).all()


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
        case.run(access, torch.zeros(1, 1, case.C), torch.zeros(1, case.H))


def test_zero_points_are_checked(access: Access) -> None:
    case = Codes(0, 0.0)
    case.zero[5] = -1.0  # gate.z_out is unsigned
    with pytest.raises(ValueError, match=r"zero_point.*\[0, .*got -1.*gate\.z_out"):
        case.run(access, torch.zeros(1, 1, case.C), torch.zeros(1, case.H))
