"""C structures that kernels take as arguments, with the same fields as in the CUDA sources."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from quant_gru.kernel_runtime.cuda.ctypes_structs import structure

# Field of a cell -> operator of its weighted sum.
SUMS = {
    "z_pre": "gate.z_pre",
    "r_pre": "gate.r_pre",
    "rRh": "op.rRh",
    "g_pre": "gate.g_pre",
    "old_contrib": "op.old_contrib",
    "new_contrib": "op.new_contrib",
    "h": "output.h",
}
KINDS = {torch.int8: 0, torch.uint8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4}
_REAL = {"float": ctypes.c_float, "double": ctypes.c_double}


def _all(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

MatrixC = structure(
    "MatrixC",
    **_all(_POINTER, "codes bias M k m"),
    **_all(_INT, "kind bias_shift zero lo hi code_lo"),
)
TableC = structure(
    "TableC",
    **_all(_POINTER, "direct bounds coefficients"),
    **_all(_INT, "entries pre_lo pre_zero segments degree shift last segment_shift lo hi"),
    scale=ctypes.c_double,
    lines=_POINTER,
    **_all(_INT, "line_origin line_count least"),
)
SUM_C = {
    name: structure(
        f"Sum_{name}",
        m=real * 2,
        lo=real,
        hi=real,
        M=_INT * 2,
        **_all(_INT, "k low high in_words"),
    )
    for name, real in _REAL.items()
}
CELL_C = {
    name: structure(
        f"Cell_{name}",
        **dict.fromkeys((*SUMS, "zoneout"), SUM_C[name]),
        **_all(TableC, "z r g"),
        **_all(real, "one Rh_lo Rh_hi Wx_offset"),
        **_all(_INT, "h_zero h_offset one_integer"),
    )
    for name, real in _REAL.items()
}
LimitsC = structure("LimitsC", **_all(ctypes.c_float, "less top"))
BeforeC = structure("BeforeC", **_all(ctypes.c_float, "early late offset"))
SaturatedC = structure(
    "SaturatedC",
    **_all(LimitsC, "Rh rRh old_contrib new_contrib"),
    **_all(BeforeC, "z r g"),
    **_all(ctypes.c_float, "rest rest_offset of_z of_left h_old h_new h_offset"),
)
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
)
