"""Signal-to-noise ratio of every operator of a calibrated QuantGRU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.analysis.sqnr import sqnr
from quant_gru.calibration.float_run import float_layers, valid
from quant_gru.calibration.trace import trace
from quant_gru.config import ACTIVATIONS, OPERATORS, WEIGHTS
from quant_gru.execution.integer_io import cell_codes
from quant_gru.execution.layers import border_codes, run_codes
from quant_gru.integer.plan import update_first
from quant_gru.modules.gru import QuantGRU


def operator_sqnr(
    gru: QuantGRU, input: Tensor | PackedSequence, hx: Tensor | None = None
) -> dict[str, float]:
    """How far each operator's codes are from the float GRU's own values.

    Both networks run on their own: an operator's noise includes what came before it.

    Args:
        gru: A calibrated QuantGRU, of any `use_quantization`.
        input: As for its forward.
        hx: As for its forward.

    Returns:
        Operator name with the suffix of nn.GRU's parameters ('gate.z_out_l0') -> SQNR in dB,
        10 log10(sum(real^2) / sum((real - quantized)^2)); fused operators are left out.
    """
    plan, sequence = gru._plan(), gru._normalize(input, hx)
    x, lengths = sequence.x.detach(), sequence.lengths
    inputs, h0 = border_codes(plan, x, sequence.h0)
    real_runs = float_layers(x, sequence.h0, lengths, gru._float_weights())
    found: dict[str, float] = {}
    for real_run, run in zip(real_runs, run_codes(plan, inputs, h0, lengths), strict=True):
        suffix = f"_l{run.layer}{'_reverse' if run.direction else ''}"
        real = trace(real_run.weights, *real_run.rows(lengths))
        codes = cell_codes(run)
        for name in OPERATORS:
            if name in ACTIVATIONS and name in codes:
                quantized = run.plan.frozen.quantizers[name].dequantize(codes[name])
                value = real[name]
                if name in ("matmul.Wx", "matmul.Rh"):
                    value = update_first(value.T).T
                found[name + suffix] = sqnr(value, valid(quantized, lengths))
            elif name in WEIGHTS:
                w = (
                    real_run.weights.W,
                    real_run.weights.R,
                    real_run.weights.bw,
                    real_run.weights.br,
                )[WEIGHTS.index(name)]
                if w is not None:
                    s = run.plan.weights.scales[name].to(torch.float64)
                    s = s[:, None] if w.dim() == 2 else s
                    found[name + suffix] = sqnr(update_first(w), codes[name] * s)
    return found
