"""Products of weight matrices, requantized, for the integer profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.interchange.onnx.builder import Builder, Value
from quant_gru.interchange.onnx.exact import (
    FLOAT32,
    FLOAT64,
    Objects,
    Rule,
    beside,
    clipped,
    converted,
    fitting,
    number,
    rounded_quotient,
    rule_of,
    scaled,
    stored,
    summed,
)

_NARROW = 1 << 8  # magnitudes of 8 bits are below
_SMALL = 1 << 12  # entries of a matrix for which float32 gains less than a Cast costs


@dataclass(frozen=True)
class Product:
    """The product of a weight matrix with a value, requantized.

    Attributes:
        name: The operator of the result.
        blocks: Codes (rows of a block, K of a block) of operands side by side.
        bias: Bias in accumulator units (rows,), Python integers.
        bounds: The largest magnitude of each accumulator (rows,), Python integers.
        rule: Multipliers and shifts (rows,), and limits.
        last_is_one: Whether a last operand of one value is 1, so that the bias is its weights.
    """

    name: str
    blocks: tuple[NDArray[np.int64], ...]
    bias: Objects
    bounds: Objects
    rule: Rule
    last_is_one: bool = False

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
        return cls(name, (W,), B, bounds, rule_of(total))

    @classmethod
    def identity(cls, h: Quantizer, size: int, like: Rule) -> Product:
        """Return the product that gives a state (.., size) as it is, and as many 1 behind it.

        Args:
            h: The quantizer of the state.
            size: Units.
            like: A rule whose limits are taken if they hold all codes, so that one Clip does.
        """
        least, most = min(h.lo - h.zero_point, 1), max(h.hi - h.zero_point, 1)
        ends = [np.array(end, np.float64) for end in (least, most)]
        if np.all(like.lo <= ends[0]) and np.all(like.hi >= ends[1]):
            ends = [like.lo, like.hi]
        rule = Rule((np.array(1, object),), np.array(0), ends[0], ends[1], like.rounding)
        bias, bounds = (
            np.repeat(np.array(each, object), size) for each in ((0, 1), (h.max_abs, 1))
        )
        return cls("output.h", (np.eye(2 * size, size, dtype=np.int64),), bias, bounds, rule)

    @classmethod
    def beside(cls, products: Sequence[Product]) -> Product:
        """Return one product of operands side by side, with results side by side."""
        return cls._joined(products, tuple(block for each in products for block in each.blocks))

    @classmethod
    def stacked(cls, products: Sequence[Product]) -> Product:
        """Return one product of one operand, with results side by side."""
        return cls._joined(products, (np.concatenate([each.blocks[0] for each in products]),))

    @classmethod
    def _joined(cls, products: Sequence[Product], blocks: tuple[NDArray[np.int64], ...]) -> Product:
        bias, bounds = (
            np.concatenate([getattr(each, name) for each in products])
            for name in ("bias", "bounds")
        )
        rule = beside([each.rule for each in products], [len(each.bias) for each in products])
        return cls(products[0].name, blocks, bias, bounds, rule)

    @property
    def size(self) -> int:
        """How many entries the matrix has, zeros between blocks among them."""
        rows, columns = zip(*(block.shape for block in self.blocks), strict=True)
        return int(sum(rows) * sum(columns))

    def fits(self, dtype: str) -> bool:
        """Return whether a float type has accumulators and results exactly."""
        return self.rule.fits([self.bounds], dtype)

    def __call__(self, b: Builder, v: Value, dtype: str) -> Value:
        """Return the result less its zero point: (.., K) -> (.., rows), both in `dtype`."""
        factor, wide = self.rule.factor(0), self._accumulator(dtype)
        fits, rule = self.fits(dtype), self.rule
        if fits and wide == dtype and all(M & (M - 1) == 0 for M in rule.Ms[0].flat):
            # powers of two commute with sums, so that the weights take them in
            found = self._accumulate(b, v, dtype, wide, factor)
            found = rounded_quotient(b, found, rule, dtype)
        elif self.fits("DOUBLE") and wide != "INT64":
            (found,) = converted(b, [self._accumulate(b, v, dtype, wide)], wide, "DOUBLE")
            found = rounded_quotient(b, scaled(b, found, factor, "DOUBLE"), rule, "DOUBLE")
            (found,) = converted(b, [found], "DOUBLE", dtype)
        else:
            (found,) = converted(b, [self._accumulate(b, v, dtype, wide)], wide, "INT64")
            found = summed(b, self.name, [found], rule, [self.bounds])
            (found,) = converted(b, [found], "DOUBLE", dtype)
        return clipped(b, found, rule.lo, rule.hi, dtype)

    def _accumulator(self, dtype: str) -> str:
        """Return the type of the accumulators: the narrowest that is exact."""
        bound = fitting(self.name, int(self.bounds.max()))
        if bound >= FLOAT64:
            return "INT64"
        narrow = bound < FLOAT32 and (dtype == "FLOAT" or self.size > _SMALL)
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
        weight, bias = self._matrix(b, wide), self.bias
        if factor is not None:
            weight = scaled(b, weight, factor, wide)
        product = b.op("MatMul", v, weight)
        if self.last_is_one or not np.any(bias):
            return product
        added = stored(b, bias, wide)
        return b.op("Add", product, added if factor is None else scaled(b, added, factor, wide))

    def _matrix(self, b: Builder, wide: str) -> Value:
        """Return the matrix (K, rows), with the bias if `last_is_one`."""
        if not self.last_is_one:
            return self._weights(b, wide)
        return b.op("Concat", self._weights(b, wide), stored(b, self.bias[None], wide), axis=0)

    def _weights(self, b: Builder, wide: str) -> Value:
        """Return the weights (K, rows); a file has no zeros between their blocks."""
        if len(self.blocks) == 1:
            matrix = stored(b, self.blocks[0].T, wide)
            if wide == "INT64" or np.abs(self.blocks[0]).max() >= _NARROW:
                return matrix
            # OpenVINO rounds what it multiplies with a matrix of 8 bits, but not with a maximum
            return b.op("Max", matrix, number(b, -_NARROW, wide))
        K = sum(block.shape[1] for block in self.blocks)
        columns, start = [], 0
        for block in self.blocks:
            pads = b.int64([start, 0, K - start - block.shape[1], 0])
            columns.append(b.op("Pad", stored(b, block.T, wide), pads))
            start += block.shape[1]
        return b.op("Concat", *columns, axis=1)
