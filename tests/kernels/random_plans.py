"""Random plans: any widths, scales, zero points and shapes, without calibration."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quant_gru import QuantConfig
from quant_gru.config import ACTIVATIONS, FIXED_RANGE, FUSIBLE, WEIGHTS
from quant_gru.integer.bias_correction import InputMean
from quant_gru.integer.plan import CellPlan, build_frozen, build_weights
from quant_gru.integer.qparams import QParams, float32, make_qparams
from quant_gru.integer.quantizer import Quantizer, code_limits

REACH = {
    "input.x": 4.0,
    "output.h": 1.0,
    "matmul.Wx": 3.0,
    "matmul.Rh": 3.0,
    "gate.z_pre": 6.0,
    "gate.r_pre": 6.0,
    "gate.g_pre": 6.0,
    "op.rRh": 2.0,
    "op.old_contrib": 1.0,
    "op.new_contrib": 1.0,
}
HIDDEN = (1, 2, 3, 5, 8, 15, 16, 17, 21, 32, 33, 48)
# widths of activations and of weights
KINDS = {
    "w8a8": (range(6, 9), range(4, 9)),
    "w8a16": (range(12, 17), range(4, 9)),
    "w16a16": (range(9, 17), range(9, 17)),
    "mixed": (range(1, 17), range(1, 17)),
    "wide": (range(1, 33), range(1, 33)),
    "few": (range(8, 17), range(1, 5)),
}


@dataclass(frozen=True)
class Case:
    """A plan with codes to run it on."""

    plan: CellPlan
    x: Tensor
    h0: Tensor
    lengths: Tensor | None
    reverse: bool


def random_qparams(
    rng: random.Random,
    kind: str,
    scale_kind: str | None = None,
    activation: str | None = None,
    rounding: str = "half_even",
    reach: Mapping[str, float] = REACH,
) -> QParams:
    """Quantizers and tables of a cell, without zoneout; arguments that are given are not drawn."""
    widths, weight_widths = KINDS[kind]
    # one width for most operators, as real configurations have it
    common = rng.choice(widths)
    rough = rng.random() < 0.3
    operators: dict[str, dict[str, object]] = {}
    for name in ACTIVATIONS:
        bits = rng.choice(widths) if rng.random() < 0.4 else common
        unsigned = rng.random() < (0.8 if name in ("gate.z_out", "gate.r_out") else 0.2)
        operators[name] = {
            "bitwidth": None if name in FUSIBLE and rng.random() < 0.3 else bits,
            "is_symmetric": rng.random() < 0.4,
            "is_unsigned": unsigned,
        }
    for name in WEIGHTS:
        operators[name] = {
            "bitwidth": rng.choice(weight_widths),
            "granularity": rng.choice(("tensor", "gate", "channel")),
        }
    drawn = rng.choice(("pwl", "quadratic")) if rng.random() < 0.03 else "exact"
    config = QuantConfig(
        operators=operators,
        scale_kind=rng.choice(("pot", "free")) if scale_kind is None else scale_kind,
        activation=drawn if activation is None else activation,
        rounding=rounding,
    )
    quantizers = {}
    for name, most in reach.items():
        operator = config[name]
        if operator.bitwidth is None:
            continue
        signed = not operator.is_unsigned
        lo, hi = code_limits(operator.bitwidth, signed)
        if rough:
            most *= 2.0 ** rng.uniform(-6, 6)
        exponent = round(torch.tensor(most / (hi - lo + 1) * 2).log2().item())
        scale = 2.0**exponent
        if config.scale_kind == "free":
            scale = float32(scale * rng.uniform(0.6, 1.4))
        zero_point = 0
        if not operator.is_symmetric:
            middle = (lo + hi) // 2
            zero_point = rng.choice((lo, hi, middle, rng.randint(lo, hi)))
        quantizers[name] = Quantizer(operator.bitwidth, signed, scale, zero_point)
    for name in FIXED_RANGE:
        # scales set by hand: 1 as a code may be far from the width
        operator = config[name]
        if rng.random() < 0.15 and operator.bitwidth is not None:
            scale = 2.0 ** -rng.randint(0, 24)
            if config.scale_kind == "free":
                scale = float32(1 / rng.randint(1, 1 << 24))
            quantizers[name] = Quantizer(operator.bitwidth, not operator.is_unsigned, scale)
    return make_qparams(config, quantizers)


def far_inputs(rng: random.Random, cells: Sequence[QParams]) -> list[QParams]:
    """The cells of a first layer, some with ranges of inputs that exclude 0."""
    name, chosen, above = "input.x", rng.random() < 0.4, rng.random() < 0.5
    distance = rng.choice((1, 2, 300, rng.randint(1, 1 << 20)))
    found = []
    for each in cells:
        old = each.quantizers[name]
        if not chosen or old.bits > 20 or each.config[name].is_symmetric:
            found.append(each)
            continue
        zero_point = old.hi + distance if above else old.lo - distance
        new = replace(old, zero_point=zero_point, far=True)
        config = each.config.replace_globals(input_excludes_zero=True)
        found.append(replace(each, config=config, quantizers={**each.quantizers, name: new}))
    return found


def random_mean(rng: random.Random, C: int) -> InputMean | None:
    """The mean of each input feature, of any size; None for no correction of the bias."""
    if rng.random() < 0.3:
        return None
    spread, middle = rng.choice((0, 3, 40)), rng.choice((-30, -3, 0, 5, 20))
    found = [rng.gauss(0, 1) * 2.0 ** rng.uniform(middle - spread, middle) for _ in range(C)]
    if rng.random() < 0.5:
        found = [rng.choice((0.0, -0.0, 1.5, value)) for value in found]
    return InputMean(tuple(map(float32, found)))


def scales_apart(rng: random.Random) -> dict[str, float]:
    """Ranges of which one to three are up to 2^26 times as large or as small as the values."""
    moved = rng.sample(sorted(REACH), rng.randint(1, 3))
    return {**REACH, **{name: REACH[name] * 2.0 ** rng.randint(-26, 26) for name in moved}}


def random_case(
    seed: int,
    kind: str,
    rounding: str = "half_even",
    apart: bool = False,
    hidden: Sequence[int] = HIDDEN,
) -> Case:
    """The same case for the same seed, kind and sizes; only its rule of rounding and scales differ.

    Args:
        seed: Of all that is random.
        kind: Of `KINDS`.
        rounding: The rule of rounding.
        apart: Whether scales do not fit the values, see `scales_apart`.
        hidden: The values of H of which one is drawn.
    """
    rng = random.Random(f"{seed} {kind}")
    generator = torch.Generator().manual_seed(seed)
    reach = scales_apart(random.Random(f"{seed} {kind} apart")) if apart else REACH
    qparams = random_qparams(rng, kind, rounding=rounding, reach=reach)
    # a source of its own: plans stay the same but for their zoneout
    kept = random.Random(f"{seed} {kind} zoneout")
    p = kept.choice((2.0**-15, 0.5, 1.0, kept.random())) if kept.random() < 0.3 else 0.0
    H, C = rng.choice(hidden), rng.randint(1, 36)
    mean = random_mean(random.Random(f"{seed} {kind} mean"), C)
    qparams = replace(qparams, zoneout=p, input_mean=mean)
    (qparams,) = far_inputs(random.Random(f"{seed} {kind} far"), [qparams])
    spread = 2.0 ** rng.uniform(-3, 2)

    def weights(*shape: int) -> Tensor:
        return spread * torch.randn(shape, generator=generator) * C**-0.5

    bias = rng.random() < 0.85
    part = build_weights(
        qparams,
        weights(3 * H, C),
        weights(3 * H, H),
        weights(3 * H) if bias else None,
        weights(3 * H) if bias else None,
    )
    plan = CellPlan(build_frozen(qparams, torch.device("cpu")), part)
    T, N = rng.randint(1, 4), rng.choice((1, 2, 3, 4, 5, 7, 9))

    def codes(quantizer: Quantizer, *shape: int) -> Tensor:
        found = torch.randint(quantizer.lo, quantizer.hi + 1, shape, generator=generator)
        ends = torch.rand(shape, generator=generator)
        found = torch.where(ends < 0.1, quantizer.lo, found)
        return torch.where(ends > 0.9, quantizer.hi, found).to(quantizer.container)

    lengths = torch.randint(1, T + 1, (N,), generator=generator) if rng.random() < 0.3 else None
    return Case(plan, codes(plan.x, T, N, C), codes(plan.h, N, H), lengths, rng.random() < 0.4)


__all__ = ["FIXED_RANGE", "KINDS", "Case", "random_case", "random_mean", "random_qparams"]
