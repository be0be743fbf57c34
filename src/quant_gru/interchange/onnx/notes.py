"""Metadata of a file: what reads it without Python needs to know of its GRUs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quant_gru.integer.plan import GRUPlan
from quant_gru.interchange.onnx.source import Source

PREFIX = "quant_gru"


def write_notes(model: Any, profile: str, sources: Mapping[str, Source]) -> None:
    """Write profile, version, kind of scales, and scale and zero point of every state.

    Args:
        model: An onnx_ir model; changed in place.
        profile: See `PROFILES`.
        sources: Name -> GRU; the name of a GRU by itself is ''.
    """
    notes = {"profile": profile, "version": package_version()}
    for name, source in sources.items():
        if source.plan is not None:
            before = f"{name}." if name else ""
            notes.update({f"{before}{key}": value for key, value in notes_of(source.plan).items()})
    model.metadata_props.update({f"{PREFIX}.{key}": value for key, value in notes.items()})


def package_version() -> str:
    """Return the version of the package."""
    try:
        return version("quant-gru")
    except PackageNotFoundError:  # a source tree on sys.path
        return "(not installed)"


def notes_of(plan: GRUPlan) -> dict[str, str]:
    """Return the kind of scales, and 'state_l0.scale', 'state_l0.zero_point', .. of a plan.

    The reverse direction of a layer is 'state_l0_reverse'. The code c of a state is the real value
    scale * (c - zero_point).
    """
    cells = [cell for layer in plan.cells for cell in layer]
    scales = [q.scale for cell in cells for q in cell.frozen.quantizers.values()]
    pot = all(math.frexp(scale)[0] == 0.5 for scale in scales)
    notes = {"scale_kind": "pot" if pot else "free"}
    for layer, directions in enumerate(plan.cells):
        for d, cell in enumerate(directions):
            state = f"state_l{layer}{'_reverse' * d}"
            notes[f"{state}.scale"] = repr(float(cell.h.scale))
            notes[f"{state}.zero_point"] = str(cell.h.zero_point)
    return notes
