"""Parameter files of quant-gru-pytorch, read.

They have `model_info` and, for each direction, `operators` with `dtype`, `symmetric`, `scale` and
`zero_point`. Scales of weights are in the order of gates of Haste (z, r, n). Tables are not in
them: they are made as after a calibration.

Versions whose operators have the older names (`x`, `z_out`) round half away from zero, and those
with the newer names (`input`, `update_gate_output`) to even.
"""

from __future__ import annotations

import math
import re
from typing import Any

from quant_gru.config import ACTIVATIONS, OPERATORS, WEIGHTS, QuantConfig
from quant_gru.config.operators import resolve, suggest
from quant_gru.config.quant_gru_pytorch import NEWER_NAMES
from quant_gru.errors import ParameterError, QuantGRUError
from quant_gru.integer.qparams import QParams, float32, make_qparams, reciprocal_scale
from quant_gru.integer.quantizer import Quantizer
from quant_gru.parameters.checks import check_pinned, check_scale, exponent_of
from quant_gru.parameters.schema import Shape

# Operators of older versions that are part of others here.
_PARTS = ("Rh_add_br", "one_minus_update", "sub_one_minus_update")
_SIGMOIDS = ("gate.z_out", "gate.r_out")


def is_such(data: Any) -> bool:
    """Return whether this is a parameter file of quant-gru-pytorch."""
    return (
        isinstance(data, dict)
        and "format" not in data
        and isinstance(data.get("model_info"), dict)
        and "operators" in data
    )


def read(data: dict[str, Any], where: str) -> tuple[Shape, QuantConfig, list[list[QParams]]]:
    """Return shape, configuration and parameters [layer][direction] of a file.

    Args:
        data: The parsed JSON.
        where: Name of the source in errors.

    Raises:
        ParameterError: A part of the file is missing or invalid.
    """
    shape = _shape(data["model_info"], where)
    names = ("operators", "operators_reverse")[: shape.directions]
    found = [_operators(data.get(name), name, where) for name in names]
    scales = [scale for cell in found for operator in cell.values() for scale in operator["scale"]]
    pot = all(exponent_of(scale) is not None for scale in scales)
    given = data["model_info"].get("use_pot2_scale", pot)
    if given is True and not pot:
        raise ParameterError(
            f"Expected powers of two as scales (use_pot2_scale true), got others ({where})"
        )
    kind = "pot" if pot and given is not False else "free"
    rounding = _rounding_of(data["operators"])
    made = [
        _cell(cell, kind, rounding, shape, f"{name}, {where}")
        for cell, name in zip(found, names, strict=True)
    ]
    return shape, made[0].config, [made]


def _rounding_of(operators: dict[str, Any]) -> str:
    """Return how the version rounds that wrote a file, by its names of operators."""
    return "half_even" if any(name in NEWER_NAMES for name in operators) else "half_away"


def _shape(info: dict[str, Any], where: str) -> Shape:
    try:
        return Shape(
            input_size=info["input_size"],
            hidden_size=info["hidden_size"],
            num_layers=1,
            bias=info.get("bias", True),
            bidirectional=info.get("bidirectional", False),
        )
    except (KeyError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise ParameterError(
            f"Expected model_info to have the sizes of a GRU, got {text} ({where})"
        ) from None


def _operators(given: Any, section: str, where: str) -> dict[str, dict[str, Any]]:
    """Return the checked operators of one direction, by the names of this library."""
    if not isinstance(given, dict):
        raise ParameterError(
            f"Expected {section!r} to be an object, got {type(given).__name__} ({where})"
        )
    found: dict[str, dict[str, Any]] = {}
    for name, entry in given.items():
        if name in _PARTS:
            continue
        ours = NEWER_NAMES.get(name) or resolve(name)
        place = f"operator {name!r}, {section}, {where}"
        if ours not in OPERATORS:
            raise ParameterError(
                f"Expected a known operator, got {name!r}; "
                f"{suggest(name, [*NEWER_NAMES, *OPERATORS])} ({section}, {where})"
            )
        if ours in found:
            raise ParameterError(f"Expected operator {ours!r} once, got it twice ({place})")
        found[ours] = _entry(entry, ours, place)
    for name in OPERATORS:
        if name not in found:
            raise ParameterError(f"Expected operator {name!r}, got none ({section}, {where})")
    return found


def _entry(entry: Any, name: str, place: str) -> dict[str, Any]:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    kind = re.fullmatch(r"(U?)INT(\d{1,2})", dtype) if isinstance(dtype, str) else None
    if kind is None:
        raise ParameterError(
            f"Expected dtype to be INT or UINT with a width, got {dtype!r} ({place})"
        )
    symmetric = entry.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise ParameterError(f"Expected symmetric to be true or false, got {symmetric!r} ({place})")
    scales = _list(entry.get("scale"))
    if entry.get("scale") is None and "n" in entry:
        exponents = _list(entry["n"])
        if not all(type(n) is int and -127 <= n <= 126 for n in exponents):
            raise ParameterError(f"Expected n to be in -127..126, got {exponents!r:.80} ({place})")
        scales = [2.0**-n for n in exponents]
    if not all(type(s) in (int, float) and math.isfinite(s) and s > 0 for s in scales):
        raise ParameterError(
            f"Expected scales to be positive numbers, got {scales!r:.80} ({place})"
        )
    powers = [exponent_of(float32(scale)) for scale in scales]
    if "n" in entry and None not in powers and powers != _list(entry["n"]):
        raise ParameterError(
            f"Expected scale to be 2^-n, got {scales!r:.80} and n {entry['n']!r:.80} ({place})"
        )
    if entry.get("enc_type") == "PER_TENSOR" and len(scales) > 1:
        raise ParameterError(
            f"Expected one scale (enc_type 'PER_TENSOR'), got {len(scales)} ({place})"
        )
    points = _list(entry.get("zero_point", 0))
    if not all(type(point) is int for point in points):
        raise ParameterError(f"Expected zero_point to be an integer, got {points!r:.80} ({place})")
    if name in ACTIVATIONS and (len(scales) != 1 or len(points) != 1):
        raise ParameterError(f"Expected one scale and zero_point, got {scales!r:.80} ({place})")
    if name in WEIGHTS and (any(points) or kind[1] or not symmetric):
        raise ParameterError(f"Expected weights and biases to be signed and symmetric ({place})")
    return {
        "bitwidth": int(kind[2]),
        "is_symmetric": symmetric,
        "is_unsigned": bool(kind[1]),
        "scale": [float32(scale) for scale in scales],
        "zero_point": points[0] if points else 0,
        "place": place,
    }


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _cell(
    operators: dict[str, dict[str, Any]], kind: str, rounding: str, shape: Shape, where: str
) -> QParams:
    """Return the parameters of one direction."""
    H, place = shape.hidden_size, where
    kept = ("bitwidth", "is_symmetric", "is_unsigned")
    try:
        settings = {name: {key: found[key] for key in kept} for name, found in operators.items()}
        for name in WEIGHTS:
            count = len(operators[name]["scale"])
            settings[name]["granularity"] = {1: "tensor", 3: "gate"}.get(count, "channel")
        config = QuantConfig(
            operators=settings, scale_kind=kind, correct_bias=False, rounding=rounding
        )
        quantizers: dict[str, Quantizer] = {}
        pinned: dict[str, tuple[float, ...]] = {}
        for name, found in operators.items():
            place, scales = found["place"], found["scale"]
            if name in ACTIVATIONS:
                scale = reciprocal_scale(scales[0], name) if name in _SIGMOIDS else scales[0]
                signed = not found["is_unsigned"]
                quantizers[name] = Quantizer(found["bitwidth"], signed, scale, found["zero_point"])
                check_scale(quantizers[name], config, name)
            elif shape.bias or name in ("weight.W", "weight.R"):
                each = len(scales) // 3
                if len(scales) > 1:  # from z, r, n to r, z, n
                    scales = [*scales[each : 2 * each], *scales[:each], *scales[2 * each :]]
                pinned[name] = check_pinned(scales, config, name, H)
        place = where
        return make_qparams(config, quantizers, pinned)
    except (QuantGRUError, RuntimeError, OverflowError) as error:
        raise ParameterError(f"{error} ({place})") from None
