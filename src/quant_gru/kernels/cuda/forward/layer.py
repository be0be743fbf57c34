"""One layer and direction as native code reads it: numbers, and the addresses of its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quant_gru.integer.plan import CellPlan
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.plan.structure import planes_of
from quant_gru.kernels.cuda.plan.tensors import Numbers, numbers_of


class Cell:
    """The data of one layer and direction that calls need.

    Args:
        plan: Its plan.
        between: The weighted sums that requantize codes of the lower layer, by direction.
    """

    def __init__(self, plan: CellPlan, between: Sequence[WeightedSum] = ()) -> None:
        self.numbers: Numbers = numbers_of(plan)
        self.finite = plan.weights.finite.contiguous()
        self._between = [(int(each.shift), int(each.multipliers[0])) for each in between]

    def native(self, keep: list[Any]) -> _native.CellNumbers:
        """Return the cell as an argument of `_native.launches_of`.

        Args:
            keep: Receives the owners of all memory whose addresses the launches have.
        """
        n = self.numbers
        keep += [n, self.finite]
        return (
            n.frozen.native,
            n.form,
            (n.C, n.H),
            (n.W_bits, n.R_bits),
            n.frozen.places,
            self._between,
            Arrays(n, self.finite, keep),
        )


class Arrays:
    """Addresses of a cell's arrays, which are created when native code asks for them.

    Args:
        numbers: The numbers of the cell.
        finite: Whether its weights are finite.
        keep: Receives the arrays.
    """

    def __init__(self, numbers: Numbers, finite: Tensor, keep: list[Any]) -> None:
        self._numbers, self._finite, self._keep = numbers, finite, keep

    def _address(self, tensor: Tensor) -> int:
        self._keep.append(tensor)
        return tensor.data_ptr()

    def finite(self) -> int:
        """Whether weights are finite."""
        return self._address(self._finite)

    def exact_W(self) -> int:
        """`Numbers.exact_float` of W x."""
        return self._address(self._numbers.exact_float[0])

    def exact_R(self) -> int:
        """`Numbers.exact_float` of R h."""
        return self._address(self._numbers.exact_float[1])

    def multipliers_R(self) -> int:
        """`Numbers.multipliers` of R h."""
        return self._address(self._numbers.multipliers[1])

    def tiles(self) -> int:
        """`Numbers.tiles`."""
        return self._address(self._numbers.tiles)

    def W(self) -> bytes:
        """`Numbers.W`."""
        return bytes(self._numbers.W)

    def transposed(self) -> tuple[bytes, bytes]:
        """`Numbers.transposed`."""
        W, R = self._numbers.transposed
        return bytes(W), bytes(R)

    def gemm(self, which: int) -> tuple[int, int, int, int, int]:
        """`Numbers.gemm` of W (0) or R (1): addresses, columns, padded features, and planes."""
        weights, folded = self._numbers.gemm[which]
        padded, columns = weights.shape
        bits = (self._numbers.W_bits, self._numbers.R_bits)[which]
        return self._address(weights), self._address(folded), columns, padded, planes_of(bits)

    def bytes(self) -> tuple[int, int, int, int, int]:
        """Weights, folded biases and multipliers of a projection of bytes; padded features."""
        n = self._numbers
        weights, folded = n.gemm[0]
        return (*map(self._address, (weights, folded, *n.of_bytes)), weights.shape[0])

    def fragments(self, features: int, units: int) -> tuple[int, ...]:
        """`Numbers.fragments`."""
        return tuple(map(self._address, self._numbers.fragments(features, units)))
