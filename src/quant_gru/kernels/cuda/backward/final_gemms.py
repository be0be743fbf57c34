"""The last products of a backward: gradients of inputs and weights, of all steps at once.

Where the machine can prepare them, they are launches like the others; torch makes them otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_runtime.cuda.cublaslt import Product
from kernel_runtime.cuda.launch import Machine, Prepared
from kernel_runtime.cuda.workspace import Memory


class Matrix:
    """A matrix in the memory of a call."""

    def __init__(self, start: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.start, self.rows, self.columns, self.dtype = start, rows, columns, dtype

    def of(self, memory: Tensor, first: int = 0, count: int | None = None) -> Tensor:
        """Some of its rows, of all memory seen as its dtype."""
        count = self.rows if count is None else count
        start = self.start // self.dtype.itemsize + first * self.columns
        return memory.as_strided((count, self.columns), (self.columns, 1), start)


class Factors(NamedTuple):
    """What is multiplied: left times right, or left' times right."""

    left: Matrix
    right: Matrix
    transposed: bool

    @property
    def product(self) -> Product:
        """Its sizes."""
        m, k = self.left.rows, self.left.columns
        if self.transposed:
            m, k = k, m
        return Product(m, self.right.columns, k, self.transposed)

    def of(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What torch multiplies, in all memory seen as its dtype."""
        left = self.left.of(memory)
        return left.t() if self.transposed else left, self.right.of(memory)


class LastProducts:
    """The products of the directions of a layer.

    Args:
        machine: Where kernels run.
        memory: The memory of a call, where matrices are and a workspace is to be.
        factors: Of each direction what gives the wanted ones of the gradients 'x', 'W' and 'R'.

    Attributes:
        launch: Starts all of them; None where `made` has them made.
        results: Of each direction where results are to go, by name, where launches write them.
    """

    def __init__(
        self, machine: Machine, memory: Memory, factors: Sequence[Mapping[str, Factors]]
    ) -> None:
        self._factors = factors
        self.launch: Prepared | None = None
        self.results: list[dict[str, Memory]] = [{} for _ in factors]
        every = [each for group in factors for each in group.values()]
        if not every or any(
            each.left.dtype is not torch.bfloat16 or 0 in each.product[:3] for each in every
        ):
            return
        prepared = [machine.multiply(each.product) for each in every]
        launches = [each for each in prepared if each is not None]
        if len(launches) != len(every):
            return
        # they use it one after the other
        workspace = memory.take(max(each.workspace for each in launches))
        waiting = iter(launches)
        for group, results in zip(factors, self.results, strict=True):
            for name, (left, right, _) in group.items():
                record = next(waiting).record
                memory.point(record, "a", right.start)
                memory.point(record, "b", left.start)
                memory.point(record, "workspace", workspace)
                results[name] = Memory()
                results[name].point(record, "c")
                results[name].point(record, "d")
        self.launch = machine.join([each.launch for each in launches])

    def shapes(self, direction: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of the results of a direction, by name."""
        products = {name: each.product for name, each in self._factors[direction].items()}
        return {name: (product.m, product.n) for name, product in products.items()}

    def new(self, direction: int, name: str, device: torch.device) -> Tensor:
        """Room for a result, (rows, columns)."""
        product = self._factors[direction][name].product
        return torch.empty((product.m, product.n), dtype=torch.float32, device=device)

    def made(self, direction: int, name: str, memory: Tensor) -> Tensor:
        """A result that torch makes, of all memory seen as its dtype."""
        return multiply(*self._factors[direction][name].of(memory))

    def write(self, direction: int, name: str, memory: Tensor, to: Tensor) -> None:
        """`made`, written to a tensor (rows, columns)."""
        multiply_into(*self._factors[direction][name].of(memory), to)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """A product of operands, in float32."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.dtype == torch.bfloat16 and a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a.to(torch.float64) @ b.to(torch.float64)).to(torch.float32)


def multiply_into(a: Tensor, b: Tensor, result: Tensor) -> None:
    """`multiply`, written to a tensor."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=result)
    elif a.dtype == torch.bfloat16 and a.is_cuda:
        torch.mm(a, b, out_dtype=torch.float32, out=result)
    else:
        result.copy_(multiply(a, b))
