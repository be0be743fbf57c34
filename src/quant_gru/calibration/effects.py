"""Quantizers that change the states of the cell least, and the check that they do.

The search is native code, which the C++ library shares: kernels/cpu/calibration/effects.hpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from quant_gru.calibration.covering import covering_scale, reachable_range
from quant_gru.calibration.observers import Observer
from quant_gru.calibration.windows import CellSteps
from quant_gru.config import QuantConfig
from quant_gru.integer.quantizer import Quantizer, code_limits
from quant_gru.kernels import _native

# in the order of the native enumeration `Quantized`
_NUMBERS = {
    name: i
    for i, name in enumerate(
        (
            "matmul.Wx",
            "matmul.Rh",
            "gate.z_pre",
            "gate.r_pre",
            "gate.g_pre",
            "op.rRh",
            "op.old_contrib",
            "op.new_contrib",
            "output.h",
        )
    )
}

# Rounding to wider codes is finer than the float32 values that the search compares.
_WIDEST = 16


def effective_quantizers(
    steps: CellSteps, observers: Mapping[str, Observer], config: QuantConfig
) -> dict[str, Quantizer]:
    """Return quantizers of a cell whose effect on its states is least.

    Operators are absent that this search does not choose: input.x, those wider than 16 bits, fused
    ones, and those whose quantization has no effect in these steps.

    Args:
        steps: Steps of the float cell.
        observers: Operator name -> its range in all data.
        config: Widths and kinds of the operators.
    """
    rows = steps.before.shape[0]
    effects = _native.Effects(
        steps.before.shape[1],
        steps.batch_sizes,
        steps.reverse,
        steps.Wx.data_ptr(),
        steps.Rh.data_ptr(),
        steps.before.data_ptr(),
    )
    found: dict[str, Quantizer] = {}
    for name, number in _NUMBERS.items():
        operator = config[name]
        bits = operator.bitwidth
        if rows == 0 or bits is None or bits > _WIDEST:
            continue
        signed, symmetric = not operator.is_unsigned, operator.is_symmetric
        observer = observers[name]
        low, high = reachable_range(
            observer.minimum, observer.maximum, bits=bits, signed=signed, symmetric=symmetric
        )
        if low == high:
            continue
        covering = covering_scale(
            low, high, bits=bits, signed=signed, symmetric=symmetric, scale_kind=config.scale_kind
        )
        lo, hi = code_limits(bits, signed)
        codes = {
            "lo": lo,
            "hi": hi,
            "symmetric": symmetric,
            "free": config.scale_kind == "free",
            "low": low,
            "high": high,
            "covering": covering,
        }
        chosen, scale, zero_point = effects.choose(number, codes)
        if chosen:
            found[name] = Quantizer(bits, signed, scale, int(zero_point))
    return found
