"""The steps of a backward that native code has planned, with its GEMMs, for all steps in time.

The final GEMMs are gradients of inputs and weights. If the machine can prepare all that follow each
other, they are launches like the others. Otherwise torch runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant_gru.kernel_runtime.cuda.cublaslt import Product
from quant_gru.kernel_runtime.cuda.driver import Device, Multiplication
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.planned_launches import Steps, Work, multiply_bytes

_ELEMENTS = (torch.int8, torch.int32, torch.float32, torch.bfloat16, torch.float64)
_FLOAT32 = _ELEMENTS.index(torch.float32)


def add_steps(
    steps: Steps, given: Sequence[_native.BackwardStep], size: int, space: int, made: int
) -> int:
    """Add the steps of a backward.

    Args:
        steps: Receives launches and work of torch.
        given: What native code has planned.
        size: Bytes of a call's memory that this reads and writes.
        space: The index of that memory among the tensors of a call.
        made: The index of the first gradient.

    Returns:
        Bytes of a call's memory, with the workspace of GEMMs.
    """
    memory = steps.memories[space]
    memory.take(size)
    launched = [_multiplications(steps.machine, products) for *_, products in given]
    # all GEMMs run one after the other, so they share a workspace
    workspace = memory.take(max((m.workspace for found in launched for m in found), default=0))
    for (launch, matrices, products), found in zip(given, launched, strict=True):
        if launch is not None:
            steps.launch(launch)
        elif matrices:
            steps.add(_work_of(matrices))
        elif not found:
            steps.add(_products_of_torch(products, space, made))
        for ((left, right, _), (tensor, offset)), each in zip(products, found, strict=False):
            memory.point(each.record, "a", right[0])
            memory.point(each.record, "b", left[0])
            memory.point(each.record, "workspace", workspace)
            for name in "cd":
                steps.memories[tensor].point(each.record, name, offset)
            steps.add(each.launch, (space, tensor))
    return memory.size


def matrix_in(memory: Tensor, matrix: _native.NativeMatrix) -> Tensor:
    """Return a matrix in the memory of a call."""
    start, rows, columns, element = matrix
    dtype = _ELEMENTS[element]
    return memory.view(dtype).as_strided((rows, columns), (columns, 1), start // dtype.itemsize)


def _size_of(product: _native.LastProduct) -> Product:
    (_, m, k, _), (_, _, n, _), transposed = product
    return Product(k, n, m, True) if transposed else Product(m, n, k, False)


def _multiplications(
    machine: Device, products: Sequence[tuple[_native.LastProduct, tuple[int, int]]]
) -> list[Multiplication]:
    """Return GEMMs as launches; none if the machine cannot prepare all of them."""
    found = []
    for product, _ in products:
        size, kind = _size_of(product), _ELEMENTS[product[0][3]]
        fits = kind is torch.bfloat16 and 0 not in size[:3]
        made = machine.multiply(size) if fits else None
        if made is None:
            return []
        found.append(made)
    return found


def _products_of_torch(
    products: Sequence[tuple[_native.LastProduct, tuple[int, int]]], space: int, made: int
) -> Work:
    def run(memory: Tensor, gradients: Sequence[Tensor | None] | None) -> None:
        with torch.autocast(memory.device.type, enabled=False):
            for (left, right, transposed), (tensor, offset) in products:
                a, b = matrix_in(memory, left), matrix_in(memory, right)
                a = a.t() if transposed else a
                size = (a.shape[0], b.shape[1])
                if tensor == space:
                    result = matrix_in(memory, (offset, *size, _FLOAT32))
                else:
                    gradient = None if gradients is None else gradients[tensor - made]
                    assert gradient is not None
                    result = gradient.view(size)
                multiply_into(a, b, result)

    return run


def _work_of(matrices: Sequence[_native.NativeMatrix]) -> Work:
    """Return a product of matrices, or the filling of a single one."""

    def run(memory: Tensor, _: Sequence[Tensor | None] | None) -> None:
        first, *others = [matrix_in(memory, each) for each in matrices]
        if not others:
            first.fill_(-1)
        elif first.dtype is torch.int8:
            multiply_bytes(first, others[0].t(), others[1])
        else:
            multiply_into(first, *others)

    return run


def multiply_into(a: Tensor, b: Tensor, result: Tensor) -> None:
    """Write the product of operands to a float32 tensor."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=result)
    elif a.dtype == torch.bfloat16 and a.is_cuda:
        torch.mm(a, b, out_dtype=torch.float32, out=result)
    else:
        result.copy_(a.to(torch.float64) @ b.to(torch.float64))
