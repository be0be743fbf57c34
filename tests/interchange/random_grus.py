"""Random GRUs of several layers and directions as frozen modules, without calibration."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quant_gru import FrozenQuantGRU, QuantConfig, QuantGRU
from quant_gru.integer.plan import CellPlan, build_frozen, build_weights, stack
from quant_gru.integer.quantizer import Quantizer
from quant_gru.interchange.frozen_file import with_metadata
from quant_gru.interchange.plan_tensors import derived_tensors
from quant_gru.parameters.document import to_document
from quant_gru.parameters.schema import Shape

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]

from random_plans import KINDS, far_inputs, random_qparams

from kept import kept

HIDDEN = (1, 2, 3, 5, 8, 15, 16, 17, 20, 33)


@kept
def random_gru(
    seed: int,
    kind: str,
    hidden: Sequence[int] = HIDDEN,
    features: int = 20,
    far: bool = False,
    rounding: str = "half_even",
    rounding_input: str | None = None,
) -> tuple[FrozenQuantGRU, random.Random]:
    """The same GRU for the same arguments, and the source of what follows.

    Args:
        seed: Any number.
        kind: Of the widths, see `KINDS`.
        hidden: Numbers of units to choose from.
        features: The most features of the input.
        far: Whether the range of the input may exclude 0.
        rounding: The rule of all sums.
        rounding_input: The rule of real values; None for that of sums.
    """
    rng = random.Random(f"{seed} {kind} gru")
    generator = torch.Generator().manual_seed(seed)
    layers, both = rng.choice((1, 1, 2, 3)), rng.random() < 0.4
    H, C = rng.choice(hidden), rng.randint(1, features)
    zoneout = rng.choice((0.0, 0.0, 0.5, 1.0, 0.2))
    scale_kind, bias = rng.choice(("pot", "free")), rng.random() < 0.8
    activation = rng.choice(("exact", "exact", "pwl", "quadratic"))
    spread = 2.0 ** rng.uniform(-3, 2)
    shape = Shape(
        input_size=C, hidden_size=H, num_layers=layers, bias=bias, bidirectional=both,
        zoneout=zoneout,
    )  # fmt: skip

    def weights(*sizes: int) -> Tensor:
        return spread * torch.randn(sizes, generator=generator) * C**-0.5

    qparams = [
        [
            replace(random_qparams(rng, kind, scale_kind, activation, rounding), zoneout=zoneout)
            for _ in range(shape.directions)
        ]
        for _ in range(layers)
    ]
    qparams = [
        [
            replace(each, config=each.config.replace_globals(rounding_input=rounding_input))
            for each in directions
        ]
        for directions in qparams
    ]
    first = qparams[0]
    if both:  # forward_integer needs one quantizer of the input
        name = "input.x"
        x, config = first[0].quantizers[name], first[1].config
        config = config.replace(
            name,
            bitwidth=x.bits,
            is_symmetric=first[0].config[name].is_symmetric,
            is_unsigned=not x.signed,
        )
        first[1] = replace(first[1], quantizers={**first[1].quantizers, name: x}, config=config)
    if far:
        qparams[0] = far_inputs(random.Random(f"{seed} {kind} far"), qparams[0])
        excludes = qparams[0][0].config.input_excludes_zero
        qparams = [
            [
                replace(each, config=each.config.replace_globals(input_excludes_zero=excludes))
                for each in directions
            ]
            for directions in qparams
        ]
    cells = [
        [
            CellPlan(
                build_frozen(each, torch.device("cpu")),
                build_weights(
                    each,
                    weights(3 * H, C if layer == 0 else shape.directions * H),
                    weights(3 * H, H),
                    weights(3 * H) if bias else None,
                    weights(3 * H) if bias else None,
                ),
            )
            for each in directions
        ]
        for layer, directions in enumerate(qparams)
    ]
    document = to_document(shape, qparams[0][0].config, qparams)
    return FrozenQuantGRU(document, rng.random() < 0.5, stack(cells)), rng


def random_codes(quantizer: Quantizer, rng: random.Random, *shape: int) -> Tensor:
    """Codes (shape), some of them at the ends of the range."""
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    found = torch.randint(quantizer.lo, quantizer.hi + 1, shape, generator=generator)
    ends = torch.rand(shape, generator=generator)
    found = torch.where(ends < 0.1, quantizer.lo, found)
    return torch.where(ends > 0.9, quantizer.hi, found)


@kept
def with_weights(bits: int, base: str, C: int, H: int, extreme: bool = False) -> FrozenQuantGRU:
    """A calibrated GRU with W and R of `bits` bits.

    Args:
        bits: Width of the weights.
        base: Preset of all else.
        C: Features.
        H: Units.
        extreme: Whether most codes of weights are the smallest or the largest.
    """
    config = getattr(QuantConfig, base)()
    for name in ("weight.W", "weight.R"):
        config = config.replace(name, bitwidth=bits)
    generator = torch.Generator().manual_seed(bits)
    gru = QuantGRU(C, H, config=config)
    with torch.no_grad():
        for weight in gru.parameters():
            values = 2 * torch.rand(weight.shape, generator=generator) - 1
            weight.copy_((values.sign() if extreme else values) * H**-0.5)
    gru.calibrate(2 * torch.randn(20, 4, C, generator=generator))
    gru.finalize_calibration()
    return gru.freeze()


def first_version(gru: FrozenQuantGRU) -> bytes:
    """The file of version 1."""
    tensors = {name: each for name, each in gru.state_dict().items() if name != "plan"}
    metadata = {
        "format": "quant-gru-frozen",
        "version": "1",
        "batch_first": json.dumps(gru.batch_first),
        "document": json.dumps(gru._document()),
    }
    return with_metadata({**tensors, **derived_tensors(gru._plan())}, metadata)


__all__ = ["KINDS", "first_version", "random_codes", "random_gru", "with_weights"]
