"""The final GEMMs of a backward: gradients of inputs and weights, for all steps at once.

If the machine can prepare them, they are launches like the others. Otherwise torch runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quant_gru.kernel_runtime.cuda.cublaslt import Product
from quant_gru.kernel_runtime.cuda.launch import Machine, Multiplication, Prepared
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
    """GEMMs one after the other, as a launch if the machine can prepare all of them.

    Args:
        machine: The machine that runs the kernels.
        products: Factors of each GEMM, and the memory with the offset to which it writes.

    Attributes:
        workspace: Bytes that the launch needs; None if torch has to run the GEMMs.
    """

    def __init__(self, machine: Machine, products: Sequence[tuple[Factors, Memory, int]]) -> None:
        self._machine, self._products = machine, products
        self._launches: list[Multiplication] = []
        self.workspace: int | None = None
        kinds = [(each.left.dtype, 0 in each.product[:3]) for each, *_ in products]
        if set(kinds) == {(torch.bfloat16, False)}:
            prepared = [machine.multiply(each.product) for each, *_ in products]
            self._launches = [each for each in prepared if each is not None]
            if len(self._launches) == len(products):
                self.workspace = max(each.workspace for each in self._launches)

    def launch(self, memory: Memory, workspace: int) -> Prepared:
        """Return the launch of all GEMMs.

        Args:
            memory: The memory of a call, with the matrices.
            workspace: Offset of the workspace in it.
        """
        for (factors, to, offset), found in zip(self._products, self._launches, strict=True):
            memory.point(found.record, "a", factors.right.start)
            memory.point(found.record, "b", factors.left.start)
            memory.point(found.record, "workspace", workspace)
            to.point(found.record, "c", offset)
            to.point(found.record, "d", offset)
        return self._machine.join([each.launch for each in self._launches])


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
