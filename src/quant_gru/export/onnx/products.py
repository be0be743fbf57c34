"""Products of weight matrices, requantized, for the integer profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quant_gru.export.onnx.builder import Builder, Value
from quant_gru.export.onnx.exact import (
    FLOAT32,
    FLOAT64,
    Objects,
    Rule,
    beside,
    clipped,
    converted,
    fitting,
    number,
    rule_of,
    scaled,
    stored,
    summed,
)
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum

_SMALL = 1 << 12  # entries of a matrix for which float32 gains less than a Cast costs


@dataclass(frozen=True)
class Product:
    """The product of a weight matrix with a value, requantized.

    Attributes:
        name: The operator of the result.
        weight: Codes (rows, K).
        bias: Bias in accumulator units (rows,), Python integers.
        bounds: The largest magnitude of each accumulator (rows,), Python integers.
        rule: Multipliers and shifts (rows,), and limits.
    """

    name: str
    weight: NDArray[np.int64]
    bias: Objects
    bounds: Objects
    rule: Rule

    @classmethod
    def of(
        cls,
        name: str,
        weight: Tensor,
        bias: Tensor,
        shift: int,
        operand: Quantizer,
        total: WeightedSum,
    ) -> Product:
        """Return the product of a plan.

        Args:
            name: The operator of the result.
            weight: Codes (rows, K).
            bias: Bias in 2^shift accumulator units (rows,).
            shift: See `bias`.
            operand: Quantizer of the value.
            total: Multipliers and shifts (rows,), and limits.
        """
        W = weight.cpu().numpy().astype(np.int64)
        B = bias.cpu().numpy().astype(object) * (1 << shift)
        bounds = np.abs(W).astype(object).sum(1) * operand.max_abs + abs(B)
        return cls(name, W, B, bounds, rule_of(total))

    @classmethod
    def beside(cls, products: Sequence[Product]) -> Product:
        """Return one product of operands side by side, with results side by side."""
        rows, columns = zip(*(each.weight.shape for each in products), strict=True)
        weight = np.zeros((sum(rows), sum(columns)), np.int64)
        at = [0, 0]
        for each in products:
            height, width = each.weight.shape
            weight[at[0] : at[0] + height, at[1] : at[1] + width] = each.weight
            at = [at[0] + height, at[1] + width]
        bias, bounds = (
            np.concatenate([getattr(each, name) for each in products])
            for name in ("bias", "bounds")
        )
        rule = beside([each.rule for each in products], rows)
        return cls(products[0].name, weight, bias, bounds, rule)

    def fits(self, dtype: str) -> bool:
        """Return whether a float type has accumulators and results exactly."""
        return self.rule.fits([self.bounds], dtype)

    def __call__(self, b: Builder, v: Value, dtype: str) -> Value:
        """Return the result less its zero point: (.., K) -> (.., rows), both in `dtype`."""
        factor, wide = self.rule.factor(0), self._accumulator(dtype)
        fits, rule = self.fits(dtype), self.rule
        if fits and wide == dtype and all(M & (M - 1) == 0 for M in rule.Ms[0].flat):
            # powers of two commute with sums, so that the weights take them in
            found = b.op("Round", self._accumulate(b, v, dtype, wide, factor))
        elif self.fits("DOUBLE") and wide != "INT64":
            (found,) = converted(b, [self._accumulate(b, v, dtype, wide)], wide, "DOUBLE")
            found = b.op("Round", scaled(b, found, factor, "DOUBLE"))
            (found,) = converted(b, [found], "DOUBLE", dtype)
        else:
            (found,) = converted(b, [self._accumulate(b, v, dtype, wide)], wide, "INT64")
            found = summed(b, self.name, [found], rule.Ms, [self.bounds], rule.k)
            (found,) = converted(b, [found], "DOUBLE", dtype)
        return clipped(b, found, rule.lo, rule.hi, dtype)

    def _accumulator(self, dtype: str) -> str:
        """Return the type of the accumulators: the narrowest that is exact."""
        bound = fitting(self.name, int(self.bounds.max()))
        if bound >= FLOAT64:
            return "INT64"
        narrow = bound < FLOAT32 and (dtype == "FLOAT" or self.weight.size > _SMALL)
        return "FLOAT" if narrow else "DOUBLE"

    def _accumulate(
        self,
        b: Builder,
        v: Value,
        dtype: str,
        wide: str,
        factor: NDArray[np.float64] | None = None,
    ) -> Value:
        """Return the accumulators with bias, or `factor` times as much."""
        (v,) = converted(b, [v], dtype, wide)
        weight, bias = stored(b, self.weight.T, wide), self.bias
        if factor is not None:
            weight = scaled(b, weight, factor, wide)
        product = b.op("MatMul", v, weight)
        if not np.any(bias):
            return product
        if factor is not None:
            return b.op("Add", product, number(b, bias.astype(np.float64) * factor, wide))
        return b.op("Add", product, stored(b, bias, wide))
