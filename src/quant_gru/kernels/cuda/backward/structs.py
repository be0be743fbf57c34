"""The C structures that the backward's kernels take as arguments, as defined in their sources."""

from __future__ import annotations

import ctypes
from typing import Any

from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernels.cuda.structs import CELL_C


def _all(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

WeightC = structure(
    "WeightC",
    **_all(_POINTER, "codes scales bias M k bytes channels real"),
    **_all(_INT, "kind K padded planes offset zero max_abs activation_planes"),
    activation_scale=_FLOAT,
)
FragmentsC = structure(
    "FragmentsC",
    **_all(_POINTER, "codes scales to"),
    **_all(_INT, "kind H U CL MT KS KP WP groups count"),
    activation_scale=_FLOAT,
)
CodesC = structure(
    "CodesC",
    **_all(_POINTER, "codes before values bytes real"),
    **_all(_INT, "kind K padded planes offset zero N states reverse step next"),
    **_all(_FLOAT, "scale lo hi"),
)
ProjectedC = structure(
    "ProjectedC",
    **_all(_POINTER, "product channels"),
    **_all(_INT, "columns planes weight_planes"),
    **_all(ctypes.c_double, "lo hi"),
    **_all(_FLOAT, "low high"),
)
_GATES_C = {
    name: structure(f"Gates_{name}", **_all(_FLOAT, "s_z s_r s_g s_h s_Rh"), cell=CELL_C[name])
    for name in CELL_C
}
SLOPES_C = {
    name: structure(
        f"Derivatives_{name}",
        **_all(ProjectedC, "W R"),
        **_all(_POINTER, "out h0 lengths held of_R of_W"),
        **_all(_INT, "h_kind T N H reverse first rows"),
        gates=_GATES_C[name],
    )
    for name in CELL_C
}
_PRODUCT_C = structure(
    "ProductC",
    **_all(_POINTER, "weights channels rows"),
    padded=_INT,
    **_all(ctypes.c_double, "lo hi"),
    **_all(_FLOAT, "low high"),
)
SLOPES_BYTES_C = {
    name: structure(
        f"DerivativesBytes_{name}",
        **_all(_PRODUCT_C, "W R"),
        **_all(_POINTER, "lengths held of_R of_W"),
        **_all(_INT, "N H rows share h_less"),
        gates=_GATES_C[name],
    )
    for name in CELL_C
}
BackC = structure(
    "BackC",
    **_all(_POINTER, "weights derivatives scales grad_out grad_last nan lengths d dh0"),
    **_all(_INT, "T N H reverse stride_t stride_n stride_h"),
)
BackStepC = structure(
    "BackStepC",
    **_all(_POINTER, "product derivatives grad_out grad_last nan lengths d dh dRh"),
    **_all(_INT, "N H t started stride_t stride_n stride_h"),
    scale=_FLOAT,
)
BackGridC = structure(
    "BackGridC",
    **_all(_POINTER, "weights derivatives grad_out grad_last nan lengths d dh0 dRh"),
    **_all(_INT, "T N H reverse stride_t stride_n stride_h"),
    scale=_FLOAT,
)
OuterC = structure(
    "OuterC",
    **_all(_POINTER, "d of_R of_W dWx dRh partial bw br"),
    **_all(_INT, "rows H chunk chunks"),
    **_all(_FLOAT, "scale_x scale_h"),
)
# by number of directions; each direction has W and R, and the codes of x and of the states
_WEIGHTS_C = {n: structure("WeightsC", w=WeightC * (2 * n), H=_INT) for n in (1, 2)}
_TAKEN_C = {n: structure("TakenC", c=CodesC * (2 * n), **_all(_INT, "rows chunk")) for n in (1, 2)}
OPERANDS_C = {
    n: structure(
        "OperandsC",
        weights=_WEIGHTS_C[n],
        taken=_TAKEN_C[n],
        fragments=FragmentsC * n,
        **_all(_INT, "of_weights of_codes"),
    )
    for n in (1, 2)
}
