"""Random weights and quantizers, and what has to be equal after an update."""

from __future__ import annotations

import random

import torch

from quant_gru import QuantConfig
from quant_gru.config import WEIGHTS
from quant_gru.integer.plan import CellPlan, build_frozen, build_weights
from quant_gru.integer.qparams import float32, make_qparams
from quant_gru.integer.quantizer import Quantizer, code_limits
from quant_gru.kernels.live_weights import LiveWeights, tensors_of

REACH = {"input.x": 4.0, "output.h": 1.0, "matmul.Wx": 3.0, "matmul.Rh": 3.0, "op.rRh": 2.0}
REACH |= dict.fromkeys(("gate.z_pre", "gate.r_pre", "gate.g_pre"), 6.0)
REACH |= dict.fromkeys(("op.old_contrib", "op.new_contrib"), 1.0)


def random_qparams(rng: random.Random, *, fast: bool = True, narrow: bool = True):
    """Quantizers of random widths; scales of weights per channel if `fast`."""
    kind = rng.choice(("pot", "free"))
    widths = (8, 16) if narrow else (8, 16, 24)
    activations = rng.choice(widths)
    operators: dict[str, dict[str, object]] = {
        name: {
            "bitwidth": activations,
            "is_symmetric": rng.random() < 0.5,
            "is_unsigned": rng.random() < 0.3,
        }
        for name in REACH
    }
    for name in WEIGHTS:
        most = 16 if fast else 24
        bits = rng.choice((8, 8, 4, rng.randint(1, most)))
        granularity = "channel" if fast else rng.choice(("tensor", "gate", "channel"))
        operators[name] = {"bitwidth": bits, "granularity": granularity}
    config = QuantConfig(operators=operators, scale_kind=kind)
    quantizers = {}
    for name, reach in REACH.items():
        signed = not config[name].is_unsigned
        lo, hi = code_limits(activations, signed)
        scale = 2.0 ** (
            round(torch.tensor(reach / (hi - lo) * 2).log2().item()) + rng.choice((0, 0, 3))
        )
        if kind == "free":
            scale = float32(scale * rng.uniform(0.6, 1.4))
        zero = 0 if config[name].is_symmetric else rng.randint(lo, hi)
        quantizers[name] = Quantizer(activations, signed, scale, zero)
    return make_qparams(config, quantizers)


def random_weights(rng: random.Random, H: int, C: int, dtype=torch.float32, finite=True):
    """W, R, bw, br with rows of every odd kind."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))

    def one(*shape):
        w = torch.randn(shape, generator=generator) * 2.0 ** rng.uniform(-4, 2)
        style = rng.choice(("plain", "plain", "wild", "grid", "zero", "heavy"))
        if style == "wild":
            w = w * 2.0 ** torch.randint(-140, 120, shape[:1], generator=generator).reshape(
                -1, *[1] * (len(shape) - 1)
            )
        elif style == "grid":
            w = (w * 8).round() / 8
        elif style == "zero":
            w = w * (torch.rand(shape[:1], generator=generator) < 0.5).reshape(
                -1, *[1] * (len(shape) - 1)
            )
        elif style == "heavy":
            w = w * torch.randn(shape, generator=generator).exp() ** 3
        if rng.random() < 0.1:
            w = torch.zeros(shape)
        if rng.random() < 0.2:
            w = torch.where(torch.rand(shape, generator=generator) < 0.1, -0.0, w)
        if not finite and rng.random() < 0.4:
            bad = rng.choice((torch.inf, -torch.inf, torch.nan))
            w.view(-1)[rng.randrange(w.numel())] = bad
        return w.to(dtype)

    biases = (one(3 * H), one(3 * H)) if rng.random() < 0.8 else (None, None)
    return one(3 * H, C), one(3 * H, H), *biases


def same_part(ours, theirs):
    """Names of what differs between two weight parts."""
    names = ("W", "R", "bw", "br", "Bw", "Br", "finite", "Mx", "kx", "Mh", "kh", *theirs.scales)
    pairs = zip(names, tensors_of(ours), tensors_of(theirs), strict=True)
    return [n for n, a, b in pairs if a.dtype != b.dtype or not torch.equal(a, b)]


def live_and_fresh(qparams, weights, machine=None, dropped=None, p=0.0):
    """A plan that follows weights, and how to make one of them by the definition."""
    frozen = build_frozen(qparams, weights[0].device)
    live = LiveWeights(qparams, frozen, weights[0], weights[1], machine)

    def fresh(weights, dropped=None, p=0.0):
        return CellPlan(frozen, build_weights(qparams, *weights, dropped, p))

    return live, CellPlan(frozen, live.part), fresh
