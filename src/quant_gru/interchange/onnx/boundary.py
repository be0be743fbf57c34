"""Real values and codes at the border of the integer profile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quant_gru.integer.quantizer import Quantizer
from quant_gru.interchange.onnx.builder import Builder, Value
from quant_gru.interchange.onnx.exact import clipped, converted, nearest, number


def quantized(b: Builder, x: Value, quantizer: Quantizer, dtype: str = "DOUBLE") -> Value:
    """Return the code of a real value less its zero point; NaN counts as 0.

    Args:
        b: The builder.
        x: float32.
        quantizer: The quantizer.
        dtype: 'FLOAT' or 'DOUBLE', of the result.
    """
    return quantized_beside(b, x, [quantizer], [1], dtype)


def quantized_beside(
    b: Builder, x: Value, quantizers: Sequence[Quantizer], sizes: Sequence[int], dtype: str
) -> Value:
    """Return codes as `quantized`, of values side by side that have a quantizer each.

    Args:
        b: The builder.
        x: float32 (.., sum of sizes).
        quantizers: The quantizers.
        sizes: How many values have each; not read if there is one quantizer.
        dtype: 'FLOAT' or 'DOUBLE', of the result.
    """

    def of_all(numbers: Sequence[float]) -> NDArray[np.float64]:
        values = np.array(numbers, np.float64)
        return values[0] if np.all(values == values[0]) else np.repeat(values, sizes)

    y = b.op("Div", x, b.float32(of_all([q.scale for q in quantizers])))
    y = nearest(b, y, quantizers[0].rounding, "FLOAT")
    y = b.op("Where", b.op("Equal", x, x), y, b.float32(0))  # some runtimes have no IsNaN
    (y,) = converted(b, [y], "FLOAT", dtype)
    lo, hi = (of_all([getattr(q, end) - q.zero_point for q in quantizers]) for end in ("lo", "hi"))
    return clipped(b, y, lo, hi, dtype)


def real(b: Builder, v: Value, quantizer: Quantizer, dtype: str = "") -> Value:
    """Return the real value, float32, of codes less their zero point.

    Args:
        b: The builder.
        v: The codes, of any type.
        quantizer: The quantizer.
        dtype: ONNX type of `v`, if it is known.
    """
    (v,) = converted(b, [v], dtype, "FLOAT")
    return b.op("Mul", v, b.float32(quantizer.scale))


def moved(b: Builder, codes: Value, quantizer: Quantizer, dtype: str) -> Value:
    """Return codes of any type of integers less their zero point, 'FLOAT' or 'DOUBLE'."""
    v, zero = b.cast(codes, dtype), quantizer.zero_point
    return b.op("Sub", v, number(b, zero, dtype)) if zero else v


def code_of(b: Builder, v: Value, quantizer: Quantizer, dtype: str, wanted: str) -> Value:
    """Return codes in a type of integers from codes less their zero point in `dtype`."""
    zero = quantizer.zero_point
    return b.cast(b.op("Add", v, number(b, zero, dtype)) if zero else v, wanted)


def code_real(b: Builder, codes: Value, quantizer: Quantizer) -> Value:
    """Return the real values, float32, of codes in any type of integers."""
    return real(b, moved(b, codes, quantizer, "DOUBLE"), quantizer)


def real_code(b: Builder, x: Value, quantizer: Quantizer, dtype: str) -> Value:
    """Return the codes, of an ONNX type of integers, of real values."""
    return code_of(b, quantized(b, x, quantizer), quantizer, "DOUBLE", dtype)
