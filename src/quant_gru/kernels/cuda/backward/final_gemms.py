"""The final GEMMs of a backward: gradients of inputs and weights, for all steps at once.

If the machine can prepare them, they are launches like the others. Otherwise torch runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quant_gru.kernel_runtime.cuda.cublaslt import Product
from quant_gru.kernel_runtime.cuda.launch import Machine, Prepared
from quant_gru.kernel_runtime.cuda.workspace import Memory


class Matrix:
    """A matrix in the memory of a call."""

    def __init__(self, start: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.start, self.rows, self.columns, self.dtype = start, rows, columns, dtype

    def of(self, memory: Tensor) -> Tensor:
        """Return the matrix; `memory` is a call's memory."""
        size, start = (self.rows, self.columns), self.start // self.dtype.itemsize
        return memory.view(self.dtype).as_strided(size, (self.columns, 1), start)


class Factors(NamedTuple):
    """The factors of a GEMM: left times right or, if `transposed`, left' times right."""

    left: Matrix
    right: Matrix
    transposed: bool

    @property
    def product(self) -> Product:
        """The sizes of the GEMM."""
        m, k = self.left.rows, self.left.columns
        if self.transposed:
            m, k = k, m
        return Product(m, self.right.columns, k, self.transposed)

    def of(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensors that torch multiplies."""
        left = self.left.of(memory)
        return left.t() if self.transposed else left, self.right.of(memory)


class LastProducts:
    """The final GEMMs of the directions of a layer.

    Args:
        machine: The machine that runs the kernels.
        memory: The memory of a call, with the matrices; the workspace is reserved in it.
        factors: For each direction, the factors of the wanted gradients among 'x', 'W' and 'R'.

    Attributes:
        launch: Starts all GEMMs; None if torch runs them, see `made`.
        results: For each direction, the memory by name to which the launches write; empty if torch
            runs the GEMMs.
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
        # the GEMMs run one after the other, so they share a workspace
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
        """Return the rows and columns of the results of a direction, by name."""
        products = {name: each.product for name, each in self._factors[direction].items()}
        return {name: (product.m, product.n) for name, product in products.items()}

    def new(self, direction: int, name: str, device: torch.device) -> Tensor:
        """Allocate a result, float32 (rows, columns)."""
        product = self._factors[direction][name].product
        return torch.empty((product.m, product.n), dtype=torch.float32, device=device)

    def made(self, direction: int, name: str, memory: Tensor) -> Tensor:
        """Let torch compute and return a result."""
        return multiply(*self._factors[direction][name].of(memory))

    def write(self, direction: int, name: str, memory: Tensor, to: Tensor) -> None:
        """Let torch write a result to a tensor (rows, columns)."""
        multiply_into(*self._factors[direction][name].of(memory), to)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of operands, in float32."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.dtype == torch.bfloat16 and a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a.to(torch.float64) @ b.to(torch.float64)).to(torch.float32)


def multiply_into(a: Tensor, b: Tensor, result: Tensor) -> None:
    """Write the product of operands to a float32 tensor."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=result)
    elif a.dtype == torch.bfloat16 and a.is_cuda:
        torch.mm(a, b, out_dtype=torch.float32, out=result)
    else:
        result.copy_(multiply(a, b))
