"""Products of weight matrices, requantized, for the integer profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    def identity(cls, h: Quantizer, size: int, like: Rule) -> Product:
        """Return the product that gives a state (.., size) as it is.

        Args:
            h: The quantizer of the state.
            size: Units.
            like: A rule whose limits are taken if they hold all codes, so that one Clip does.
        """
        ends = [np.array(end - h.zero_point, np.float64) for end in (h.lo, h.hi)]
        if np.all(like.lo <= ends[0]) and np.all(like.hi >= ends[1]):
            ends = [like.lo, like.hi]
        rule = Rule((np.array(1, object),), np.array(0), *ends)
        return cls(
            "output.h",
            np.eye(size, dtype=np.int64),
            np.zeros(size, object),
            np.full(size, h.max_abs, object),
            rule,
        )

    def rows(self, order: NDArray[np.int64]) -> Product:
        """Return the product with its results in another order."""

        def taken(values: Any) -> Any:
            return values if values.ndim == 0 else values[order]

        rule = Rule(
            tuple(map(taken, self.rule.Ms)), *map(taken, (self.rule.k, self.rule.lo, self.rule.hi))
        )
        return replace(
            self,
            weight=self.weight[order],
            bias=self.bias[order],
            bounds=self.bounds[order],
            rule=rule,
        )

    @classmethod
    def beside(cls, products: Sequence[Product]) -> Product:
        """Return one product of operands side by side, with results side by side."""
        widths = [each.weight.shape[1] for each in products]
        starts = np.cumsum([0, *widths])
        wide = [
            np.pad(each.weight, ((0, 0), (int(start), int(starts[-1] - start - width))))
            for each, start, width in zip(products, starts, widths, strict=False)
        ]
        return cls.stacked(
            [replace(each, weight=weight) for each, weight in zip(products, wide, strict=True)]
        )

    @classmethod
    def stacked(cls, products: Sequence[Product]) -> Product:
        """Return one product of one operand, with results side by side."""
        weight, bias, bounds = (
            np.concatenate([getattr(each, name) for each in products])
            for name in ("weight", "bias", "bounds")
        )
        rule = beside([each.rule for each in products], [len(each.bias) for each in products])
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
