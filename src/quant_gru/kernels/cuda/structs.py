"""C structures that kernels take as arguments, with the same fields as in the CUDA sources."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from quant_gru.kernel_runtime.cuda.ctypes_structs import structure

KINDS = {torch.int8: 0, torch.uint8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4}


def _all(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

OperandC = structure(
    "OperandC",
    **_all(_POINTER, "w b dropped w_scale b_scale codes b_codes scales b_scales B M k m"),
    **_all(_POINTER, "gemm tiles folded folded_bytes m_float exact_float factors corrected"),
    **_all(_INT, "w_real b_real kind b_kind K padded planes significant fold fold_words reach"),
    **_all(ctypes.c_double, "lo hi b_lo b_hi operand_scale result_scale b_unit limit term_limit"),
    **_all(_INT, "bits b_bits whole long_sums unit_exponent"),
    added=ctypes.c_double,
)
FragmentsC = structure(
    "FragmentsC", **_all(_POINTER, "bytes bias m"), **_all(_INT, "features units")
)
WeightsC = structure(
    "WeightsC",
    operands=OperandC * 2,
    fragments=FragmentsC * 4,
    finite=_POINTER,
    **_all(_INT, "H count planes_R free"),
    keep=ctypes.c_float,
    columns=_POINTER * 2,
)
