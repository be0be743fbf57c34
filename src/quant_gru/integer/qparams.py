"""Quantization parameters of one layer and direction: everything but the weights.

Calibration produces them, and checkpoints and parameter files contain them. Together with the
weights they determine a plan: the scales of weights, and the input bias with its correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from quant_gru.config import ACTIVATIONS, FIXED_RANGE, WEIGHTS, QuantConfig
from quant_gru.errors import QuantGRUError, note_once
from quant_gru.integer.bias_correction import InputMean, corrected
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table, build_table
from quant_gru.integer.weights import bias_scales, groups_of, matrix_scales, quantize_rows

# Limit of the real value 1 as a code of gate.z_out: far beyond any width, it bounds the sums.
_LARGEST_ONE = 1 << 40

PRE_ACTIVATION = {
    "gate.z_out": "gate.z_pre",
    "gate.r_out": "gate.r_pre",
    "gate.g_out": "gate.g_pre",
}


def float32(value: float) -> float:
    """Return the nearest float32 number, as a Python float; infinite beyond float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def fixed_range_quantizer(
    name: str, bits: int, *, signed: bool, symmetric: bool, scale_kind: str
) -> Quantizer:
    """Return the quantizer of a sigmoid or tanh output, with a scale from the function's range.

    Args:
        name: 'gate.z_out', 'gate.r_out' (sigmoid) or 'gate.g_out' (tanh).
        bits: Width, 1..32.
        signed: Whether the codes are signed.
        symmetric: Whether the zero point has to be 0.
        scale_kind: 'pot' (`2^-n`) or 'free' (`1/(2^n-1)`). n is one less if a sign, or a range
            on both sides of zero, needs a bit.
    """
    is_tanh = name == "gate.g_out"
    halved = is_tanh or (signed and symmetric)
    n = bits - 1 if halved else bits
    scale = 2.0**-n if scale_kind == "pot" else 1.0 / max((1 << n) - 1, 1)
    zero_point = 0
    if not symmetric:
        if is_tanh and not signed:
            zero_point = 1 << (bits - 1)
        elif not is_tanh and signed:
            zero_point = -(1 << (bits - 1))
    return Quantizer(bits, signed, float32(scale), zero_point)


def reciprocal_scale(scale: float, name: str) -> float:
    """Return `1 / rint(1 / scale)` in float32, so that the real value 1 is a code; noted once.

    Args:
        scale: Scale of a sigmoid output, from a user or a file.
        name: The operator, for the note.
    """
    rounded = float32(1.0 / max(round(1.0 / scale), 1))
    if rounded != scale:
        note_once(f"the scale of '{name}' was rounded to 1 / integer, so that 1 is a code")
    return rounded


@dataclass(frozen=True)
class QParams:
    """Quantizers and tables of one layer and direction.

    Attributes:
        config: The configuration these parameters follow.
        quantizers: Operator name -> quantizer, for every activation that is not fused.
        tables: 'gate.z_out', 'gate.r_out', 'gate.g_out' -> table.
        pinned: Weight operator -> scales that a user set, in the row order of PyTorch's parameters
            (1, 3 or 3H of them). The scales of other weights follow their values.
        zoneout: Share of a state that each step keeps; in training the probability that a unit
            keeps its state.
        input_mean: The mean of the input, for the correction of the input bias; None without it.
    """

    config: QuantConfig
    quantizers: Mapping[str, Quantizer]
    tables: Mapping[str, Table]
    pinned: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    zoneout: float = 0.0
    input_mean: InputMean | None = None

    def __post_init__(self) -> None:
        for name in ACTIVATIONS:
            bits = self.config[name].bitwidth
            quantizer = self.quantizers.get(name)
            if (bits is None) != (quantizer is None) or (quantizer and quantizer.bits != bits):
                raise QuantGRUError(
                    f"Expected a quantizer of {bits} bits, got {quantizer} (operator '{name}')"
                )
        if round(1.0 / self.quantizers["gate.z_out"].scale) > _LARGEST_ONE:
            raise QuantGRUError(
                f"Expected scale to be at least 2^-40, got {self.quantizers['gate.z_out'].scale!r} "
                "(operator 'gate.z_out')"
            )
        for name in FIXED_RANGE:
            if name not in self.tables:
                raise QuantGRUError(f"Expected a table, got none (operator '{name}')")
            if self.tables[name].rounding != self.config.rounding:
                raise QuantGRUError(
                    f"Expected a table of rounding {self.config.rounding!r}, got one of "
                    f"{self.tables[name].rounding!r} (operator '{name}')"
                )
        for name in self.pinned:
            if name not in WEIGHTS:
                raise QuantGRUError(f"Expected a weight, got operator '{name}'")

    @property
    def pot(self) -> bool:
        """Whether all scales are powers of two."""
        return self.config.scale_kind == "pot"

    def remade(
        self,
        config: QuantConfig,
        quantizers: Mapping[str, Quantizer],
        pinned: Mapping[str, tuple[float, ...]],
        tables: Mapping[str, Table],
    ) -> QParams:
        """Return parameters with other quantizers; arguments are those of `make_qparams`."""
        made = make_qparams(config, quantizers, pinned, tables)
        return replace(made, zoneout=self.zoneout, input_mean=self.input_mean)


def make_qparams(
    config: QuantConfig,
    quantizers: Mapping[str, Quantizer],
    pinned: Mapping[str, tuple[float, ...]] | None = None,
    tables: Mapping[str, Table] | None = None,
) -> QParams:
    """Complete calibrated quantizers with fixed-range ones, and build the missing tables.

    Args:
        config: The configuration of this layer and direction.
        quantizers: All calibrated quantizers that are not fused, and those of fixed range that
            should not use their default.
        pinned: Weight scales that a user set.
        tables: Tables to keep unchanged.
    """
    complete: dict[str, Quantizer] = {}
    for name in ACTIVATIONS:
        operator = config[name]
        if operator.bitwidth is None:
            continue
        if name in quantizers:
            complete[name] = quantizers[name]
        elif name in FIXED_RANGE:
            complete[name] = fixed_range_quantizer(
                name,
                operator.bitwidth,
                signed=not operator.is_unsigned,
                symmetric=operator.is_symmetric,
                scale_kind=config.scale_kind,
            )
        else:
            raise QuantGRUError(f"Expected a quantizer, got none (operator '{name}')")
    built = dict(tables or {})
    for name, pre in PRE_ACTIVATION.items():
        if name not in built:
            function = "tanh" if name == "gate.g_out" else "sigmoid"
            try:
                built[name] = build_table(
                    function,
                    complete[pre],
                    complete[name],
                    config.activation,
                    config.segments,
                    config.rounding,
                )
            except QuantGRUError as error:
                raise QuantGRUError(f"{error} (operator '{name}')") from None
    return QParams(config, complete, built, dict(pinned or {}))


def weight_scales(qparams: QParams, name: str, w: Tensor) -> Tensor:
    """Return scales of a weight or bias, per tensor, gate or channel, in PyTorch's row order.

    Args:
        qparams: Width, granularity and kind of the scales.
        name: 'weight.W', 'weight.R', 'weight.bw' or 'weight.br'.
        w: (3H, K) or (3H,).

    Returns:
        float32 (1,), (3,) or (3H,).
    """
    return _of_groups(qparams.config, name, scales_of(qparams, name, finite_values(w)))


def unpinned_scales(config: QuantConfig, name: str, w: Tensor) -> Tensor:
    """Return `weight_scales` of finite weights, as the weights alone determine them."""
    return _of_groups(config, name, _chosen_scales(config, name, w))


def _of_groups(config: QuantConfig, name: str, scales: Tensor) -> Tensor:
    """Return one scale for each group, of those of all rows."""
    rows = scales.shape[0]
    return scales[:: rows // groups_of(config[name].granularity or "channel", rows)]


def corrected_bias(qparams: QParams, W: Tensor, bw: Tensor) -> Tensor:
    """Return the input bias that is quantized: with the mean error of the weights.

    Args:
        qparams: Quantizers, and the mean of the input.
        W: (3H, C), rows reset, update, candidate.
        bw: (3H,), zeros for a GRU without biases.
    """
    if not _moves_bias(qparams):
        return bw
    values = finite_values(W)
    scale = scales_of(qparams, "weight.W", values)
    code = quantize_rows(values, scale, qparams.config["weight.W"].bitwidth or 1)
    return moved_bias(qparams, bw, values, code, scale)


def moved_bias(qparams: QParams, bw: Tensor, W: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return `corrected_bias`, from finite weights, their codes and their scales."""
    if not _moves_bias(qparams):
        return bw
    bits = qparams.config["weight.W"].bitwidth or 1
    offset = qparams.quantizers["input.x"].offset
    return corrected(finite_values(bw), W, codes, scales, qparams.input_mean, bits, offset)


def _moves_bias(qparams: QParams) -> bool:
    return qparams.input_mean is not None or qparams.quantizers["input.x"].is_outside


def finite_values(w: Tensor) -> Tensor:
    """Return float32 weights, 0 for those that are not finite."""
    return torch.nan_to_num(w.detach().to(torch.float32), nan=0.0, posinf=0.0, neginf=0.0)


def scales_of(qparams: QParams, name: str, w: Tensor) -> Tensor:
    """Return the scale of each row of finite weights, float32 (3H,)."""
    if name not in qparams.pinned:
        return _chosen_scales(qparams.config, name, w)
    rows = w.shape[0]
    groups = groups_of(qparams.config[name].granularity or "channel", rows)
    scale = torch.tensor(qparams.pinned[name], dtype=torch.float32, device=w.device)
    return scale.repeat_interleave(rows // groups, output_size=rows)


def _chosen_scales(config: QuantConfig, name: str, w: Tensor) -> Tensor:
    operator = config[name]
    assert operator.bitwidth is not None
    choose = matrix_scales if w.dim() == 2 else bias_scales
    return choose(w, operator.bitwidth, operator.granularity or "channel", config.scale_kind)
