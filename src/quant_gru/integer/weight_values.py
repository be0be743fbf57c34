"""The float weights that are quantized: their scales, and the input bias with its correction."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.config import QuantConfig
from quant_gru.integer.bias_correction import corrected
from quant_gru.integer.qparams import QParams
from quant_gru.integer.weights import bias_scales, groups_of, matrix_scales, quantize_rows


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
