"""C structures that kernels take as arguments, with the same fields as in the CUDA sources."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kernel_runtime.cuda.ctypes_structs import structure

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

SequenceC = structure(
    "SequenceC",
    **_all(_POINTER, "x h0 out last lengths workspace"),
    **_all(_INT, "x_kind h_kind T N C H reverse"),
    held=_POINTER,
)
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
GenericC = structure("GenericC", s=SequenceC, W=MatrixC, R=MatrixC, cell=CELL_C["double"])
ProjectC = structure(
    "ProjectC",
    s=SequenceC,
    W=MatrixC,
    **_all(_POINTER, "folded product bytes Wx"),
    **_all(_INT, "planes_x planes_W columns padded_C x_offset NB tiles groups wide"),
)
DivisionC = structure(
    "DivisionC", **_all(ctypes.c_float, "scale inverse least most"), exact=ctypes.c_int32
)
_PROJECTED = {
    **_all(_POINTER, "weights folded m folded_bytes m_float exact_float Wx"),
    **_all(_INT, "T N H padded NB tiles groups wide lo hi code_lo"),
}
ProjectBytesC = structure("ProjectBytesC", bytes=_POINTER, **_PROJECTED)
ProjectPassingC = structure(
    "ProjectPassingC", bytes=_POINTER, **_PROJECTED, share=_INT, counts=_POINTER, stretch=_INT
)
ProjectRealsC = structure(
    "ProjectRealsC",
    **_PROJECTED,
    **_all(_POINTER, "real nan"),
    **_all(_INT, "step next C nan_stride parts zero"),
    division=DivisionC,
    fours=_INT,
)
ProjectFewC = structure(
    "ProjectFewC",
    **_all(_POINTER, "real nan Wx weights"),
    **_all(_INT, "step next N C H padded nan_stride NB tiles groups wide"),
    division=DivisionC,
    W=MatrixC,
    fours=_INT,
)
RealBoundaryC = structure(
    "RealBoundaryC",
    **_all(_POINTER, "h0 values last last_nan h0_nan nan finite"),
    **_all(_INT, "next stride"),
    **_all(ctypes.c_float, "scale lo hi"),
)
LimitsC = structure("LimitsC", **_all(ctypes.c_float, "less top"))
BeforeC = structure("BeforeC", **_all(ctypes.c_float, "early late offset"))
SaturatedC = structure(
    "SaturatedC",
    **_all(LimitsC, "Rh rRh old_contrib new_contrib"),
    **_all(BeforeC, "z r g"),
    **_all(ctypes.c_float, "rest rest_offset of_z of_left h_old h_new h_offset"),
)
RECURRENT_C = {
    name: structure(
        f"Recurrent_{name}",
        s=SequenceC,
        **_all(_POINTER, "weights Wx bias m exact_float"),
        cell=CELL_C[name],
        boundary=RealBoundaryC,
        saturated=SaturatedC,
        counts=_POINTER,
    )
    for name in _REAL
}
STEP_C = {
    name: structure(
        f"Step_{name}",
        s=SequenceC,
        **_all(_POINTER, "m folded product bytes Wx"),
        **_all(_INT, "planes_h planes_R columns padded_H groups wide t before"),
        cell=CELL_C[name],
    )
    for name in _REAL
}

TargetC = structure(
    "TargetC",
    **_all(_POINTER, "codes bytes nan"),
    **_all(_INT, "kind planes padded x_offset T N features nan_stride"),
    counts=_POINTER,
    stretches=_INT,
)
FlagsC = structure(
    "FlagsC",
    nan=_POINTER,
    **_all(_POINTER * 2, "h0_nan finite"),
    **_all(_INT, "T stride"),
)
QuantizeInputC = structure(
    "QuantizeInputC",
    to=TargetC,
    real=_POINTER,
    **_all(_INT, "step next zero"),
    **_all(ctypes.c_float, "scale lo hi"),
    division=DivisionC,
    fours=ctypes.c_int32,
)
RequantizeLayersC = structure(
    "RequantizeLayersC",
    to=TargetC,
    below=FlagsC,
    codes=_POINTER * 2,
    **_all(_INT * 2, "kind zero M k"),
    **_all(_INT, "H directions lo hi out_zero"),
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
