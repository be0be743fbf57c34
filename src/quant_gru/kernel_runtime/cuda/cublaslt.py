"""bfloat16 GEMMs of cuBLASLt as prepared launches; torch has already loaded the library.

Descriptors and the algorithm are chosen once; a start only passes addresses. The algorithm is the
first choice of the library's heuristic for a size, so equal sizes give bit-equal results.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from quant_gru.kernel_runtime.cuda.ctypes_structs import structure

_Pointer = ctypes.c_void_p
_R_32F, _R_16BF = 0, 14  # cudaDataType_t
_COMPUTE_32F = 68  # cublasComputeType_t
_OP_N, _OP_T = 0, 1  # cublasOperation_t
_TRANSA, _TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
_MOST_WORKSPACE = 32 << 20  # torch's size on the largest GPUs

# The arguments of cublasLtMatmul; `Product` in launch_list.hpp has the same layout.
ProductC = structure(
    "ProductC",
    **dict.fromkeys("handle operation alpha a a_layout b b_layout".split(), _Pointer),
    **dict.fromkeys("beta c c_layout d d_layout algorithm workspace".split(), _Pointer),
    workspace_size=ctypes.c_size_t,
    stream=_Pointer,
)
# cublasLtMatmulHeuristicResult_t
_FoundC = structure(
    "FoundC",
    algorithm=ctypes.c_uint64 * 8,
    workspace_size=ctypes.c_size_t,
    status=ctypes.c_int,
    waves=ctypes.c_float,
    reserved=ctypes.c_int * 4,
)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Create": (_Pointer,),
    "MatmulDescCreate": (_Pointer, ctypes.c_int, ctypes.c_int),
    "MatmulDescDestroy": (_Pointer,),
    "MatmulDescSetAttribute": (_Pointer, ctypes.c_int, _Pointer, ctypes.c_size_t),
    "MatrixLayoutCreate": (
        _Pointer,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
    ),
    "MatrixLayoutDestroy": (_Pointer,),
    "MatmulPreferenceCreate": (_Pointer,),
    "MatmulPreferenceDestroy": (_Pointer,),
    "MatmulPreferenceSetAttribute": (_Pointer, ctypes.c_int, _Pointer, ctypes.c_size_t),
    "MatmulAlgoGetHeuristic": (*[_Pointer] * 7, ctypes.c_int, _Pointer, _Pointer),
    "Matmul": (),
}


class Product(NamedTuple):
    """left (m, k) times right (k, n), bfloat16, with a float32 result; all matrices row-major.

    Attributes:
        m: Rows of the result.
        n: Columns of the result.
        k: Number of terms of each sum.
        transposed: Whether left is (k, m) in memory.
    """

    m: int
    n: int
    k: int
    transposed: bool


class Described:
    """A GEMM with descriptors and algorithm.

    Attributes:
        function: Address of cublasLtMatmul.
        record: A `ProductC` without addresses of matrices and workspace. Left is its `b`, right its
            `a`, the result its `c` and `d`; all addresses must be multiples of 256.
        workspace: Size of its workspace in bytes; its address must be a multiple of 256, too.
    """

    def __init__(self, function: int, record: Any, keep: Any) -> None:
        self.function, self.record, self._keep = function, record, keep
        self.workspace = int(record.workspace_size)


class Library:
    """cuBLASLt on the current device.

    Args:
        functions: The library's functions by name, without 'cublasLt'; each returns a status.

    Attributes:
        works: Whether the library could be initialized.
    """

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self._handle = _Pointer()
        self._scalars = (ctypes.c_float * 2)(1.0, 0.0)
        self.works = functions["Create"](ctypes.byref(self._handle)) == 0

    def describe(self, product: Product) -> Described | None:
        """Choose descriptors and algorithm of a GEMM; return None if the library has none.

        Args:
            product: The GEMM; its matrices must not be empty.
        """
        try:
            return self._describe(product)
        except _RefusedError:
            return None

    def _describe(self, product: Product) -> Described:
        m, n, k, transposed = product
        # A row-major matrix is its transpose in column-major order: compute right' times left'.
        right = self._layout(_R_16BF, n, k)
        left = self._layout(_R_16BF, m, k) if transposed else self._layout(_R_16BF, k, m)
        result = self._layout(_R_32F, n, m)
        operation = self._made("MatmulDesc", _COMPUTE_32F, _R_32F)
        for attribute, value in ((_TRANSA, _OP_N), (_TRANSB, _OP_T if transposed else _OP_N)):
            self._call(
                "MatmulDescSetAttribute",
                operation.value,
                attribute,
                ctypes.byref(ctypes.c_int32(value)),
                4,
            )
        preference = self._made("MatmulPreference")
        self._call(
            "MatmulPreferenceSetAttribute",
            preference.value,
            _MAX_WORKSPACE_BYTES,
            ctypes.byref(ctypes.c_uint64(_MOST_WORKSPACE)),
            8,
        )
        found: Any = _FoundC()
        count = ctypes.c_int(0)
        layouts = (right.value, left.value, result.value, result.value)
        self._call(
            "MatmulAlgoGetHeuristic",
            self._handle,
            operation.value,
            *layouts,
            preference.value,
            1,
            ctypes.byref(found),
            ctypes.byref(count),
        )
        if count.value < 1 or found.status:
            raise _RefusedError
        record: Any = ProductC(handle=self._handle.value, operation=operation.value)
        record.a_layout, record.b_layout, record.c_layout, record.d_layout = layouts
        record.alpha = ctypes.addressof(self._scalars)
        record.beta = record.alpha + 4
        record.algorithm = ctypes.addressof(found)
        record.workspace_size = found.workspace_size
        function = ctypes.cast(self._functions["Matmul"], _Pointer).value
        assert function is not None
        return Described(function, record, (self, found, operation, right, left, result))

    def _layout(self, kind: int, rows: int, columns: int) -> _Owned:
        return self._made("MatrixLayout", kind, rows, columns, rows)

    def _made(self, kind: str, *arguments: int) -> _Owned:
        handle = _Pointer()
        self._call(f"{kind}Create", ctypes.byref(handle), *arguments)
        return _Owned(handle.value, self._functions[f"{kind}Destroy"])

    def _call(self, name: str, *arguments: Any) -> None:
        if self._functions[name](*arguments):
            raise _RefusedError


class _RefusedError(Exception):
    """The library does not support a GEMM."""


class _Owned:
    """An object of the library, destroyed together with this one."""

    def __init__(self, value: int | None, destroy: Callable[[int | None], int]) -> None:
        self.value = value
        weakref.finalize(self, destroy, value).atexit = False


@cache
def loaded() -> dict[str, Any] | None:
    """Return the functions of the cuBLASLt that torch has loaded; None if it has not loaded it."""
    version = torch.version.cuda
    if version is None or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        name = f"libcublasLt.so.{version.split('.')[0]}"
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        functions = {each: getattr(library, f"cublasLt{each}") for each in _ARGUMENTS}
    except (OSError, AttributeError):
        return None
    for each, arguments in _ARGUMENTS.items():
        functions[each].argtypes, functions[each].restype = arguments, ctypes.c_int
    return functions
