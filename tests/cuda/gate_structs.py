"""The gate arithmetic of a plan as kernels read it, in the structures of the CUDA sources."""

import ctypes

from quant_gru.kernel_runtime.cuda.ctypes_structs import structure

SUMS = "z_pre r_pre rRh g_pre old_contrib new_contrib h zoneout"
_REAL = {"float": ctypes.c_float, "double": ctypes.c_double}
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


def _all(kind, names):
    return dict.fromkeys(names.split(), kind)


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
        **_all(SUM_C[name], SUMS),
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


def cell_of(frozen, real):
    """The arithmetic of `FrozenNumbers` in 'float' or 'double'."""
    return CELL_C[real].from_buffer_copy(frozen.native.cell(real, frozen.places))


def saturated_of(frozen):
    """The constants of saturating.cuh; None if that arithmetic would not be exact."""
    made = frozen.native.saturated()
    return made and SaturatedC.from_buffer_copy(made)
