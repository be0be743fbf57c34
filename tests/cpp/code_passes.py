"""The passes over codes of the C++ library beside QuantGRU."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import torch
from c_access import Access, address
from torch import Tensor

from quant_gru import QuantConfig, QuantGRU
from quant_gru.config import ACTIVATIONS, FUSIBLE
from quant_gru.integer.plan import update_first


class Codes:
    """A calibrated QuantGRU in the arguments of the pass over codes.

    Args:
        seed: Any number.
        zoneout: Of the QuantGRU.
        size: C, H, N and T; random and small if None.
    """

    def __init__(
        self, seed: int, zoneout: float, size: tuple[int, int, int, int] | None = None
    ) -> None:
        rng = random.Random(seed)
        small = [rng.randint(1, most) for most in (20, 33, 5, 8)]
        self.C, self.H, self.N, self.T = size or small
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
        device: str = "cpu",
        weights: str = "cpu",
    ) -> Tensor:
        """Return the codes of all states (T, N, H).

        `device` is where inputs and states are, `weights` where weights and scales are.
        """
        T, N, _ = x.shape
        h = torch.cat((h0[None].to(self.dtype), torch.zeros(T, N, self.H, dtype=self.dtype)))
        h = h.to(device)
        kept = [each.to(weights) for each in (self.W, self.R, self.bx, self.br)]
        kept += [x.to(device, self.dtype), h]
        mask = None if mask is None else mask.to(device)
        rest = [mask, self.scale.to(weights), self.zero.to(weights)]
        steps = 0 if not by_steps else 1 if device == "cpu" else 2  # 1: in place
        access.call(
            f"codes_int{self.bits}", threads, int(training), T, N, self.C, self.H,
            *map(address, kept), ctypes.c_float(p), *map(address, rest), steps,
        )  # fmt: skip
        return h[1:].to("cpu", torch.int64)

    def gradients(
        self,
        access: Access,
        x: Tensor,
        h: Tensor,
        grad: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """Return all gradients; the arguments are those of `backward`."""
        found, run = self.backward(access, x, h, grad, mask, **options)
        run()
        return found

    def backward(
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
        device: str = "cpu",
        weights: str | None = None,
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return gradients and the function that computes them.

        Codes are x (T, N, C) and h (T + 1, N, H). `start` is what gradients of weights and biases
        are added to. `device` is where arrays are, `weights` where weights and scales are.
        """
        (T, N, C), H = x.shape, self.H
        sizes: dict[str, tuple[int, ...]] = {
            "dx": (T, N, C), "dW": (C, 3 * H), "dR": (H, 3 * H), "dbx": (3 * H,), "dbr": (3 * H,),
            "dh": (N, H),
        }  # fmt: skip
        found = {name: torch.full(size, start, device=device) for name, size in sizes.items()}
        found["dh"].zero_()
        x, h = x.to(self.dtype), h.to(self.dtype)
        x_t = x.permute(0, 2, 1) if by_steps else x.permute(2, 0, 1)
        of_weights = [self.W.T.contiguous(), self.R.T.contiguous(), self.bx, self.br]
        of_weights += [self.scale, self.zero]
        *kept, scale, zero = (each.to(weights or device) for each in of_weights)
        given = [
            x_t.contiguous(), h.permute(0, 2, 1).contiguous() if by_steps else h,
            torch.cat((torch.full((1, N, H), 7.0), grad)),
        ]  # fmt: skip
        held = None if mask is None else mask.to(device)
        given = [*kept, *(each.to(device) for each in given), *found.values()]

        def run() -> None:
            access.call(
                f"codes_backward_int{self.bits}", threads, T, N, C, H, *map(address, given),
                *map(address, (held, scale, zero)), int(by_steps),
            )  # fmt: skip

        return found, run


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

    def python(self, case: Codes, device: str = "cpu") -> tuple[Tensor, dict[str, Tensor]]:
        """Return the real outputs of QuantGRU in training, and all gradients.

        The precision of gradients on a GPU is 'fp32'.
        """
        gru = case.gru.to(device).train()
        gru.use_quantization, gru.precision = True, "fp32"
        qx, qh = case.q["input.x"], case.q["output.h"]
        x = qx.dequantize(self.x).to(device).requires_grad_()
        h0 = qh.dequantize(self.h0).to(device).requires_grad_()
        mask = None if self.mask is None else self.mask.to(device)
        y, _ = gru(x, h0[None], zoneout_mask=mask)
        y.backward(self.grad.to(device))
        gradients = [update_first(each.grad) for each in gru.parameters() if each.grad is not None]
        dW, dR, dbx, dbr = gradients
        assert x.grad is not None
        assert h0.grad is not None
        return y.detach(), {
            "dx": x.grad, "dW": dW.T, "dR": dR.T, "dbx": dbx, "dbr": dbr, "dh": h0.grad
        }  # fmt: skip
