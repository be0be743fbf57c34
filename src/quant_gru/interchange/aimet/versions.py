"""The versions 0.6.1, 1.0.0 and 2.0.0 of AIMET's encodings, written and read.

With 0.6.1 and 1.0.0 an offset is the real value 0 on the unsigned grid, negated:
offset = lowest code - zero point. 2.0.0 has zero points of the stated type, as ONNX does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from quant_gru.errors import ParameterError, QuantGRUError
from quant_gru.interchange.aimet.entries import Entry

VERSIONS = ("0.6.1", "1.0.0", "2.0.0")
_READ_AS_2 = ("2.0.0", "2.1.0")
_SECTIONS = ("activation_encodings", "param_encodings")
_PRODUCER = {"name": "quant-gru"}


def check_version(version: Any) -> None:
    """Raise unless this version can be written."""
    if version not in VERSIONS:
        raise QuantGRUError(f"Expected version to be one of {', '.join(VERSIONS)}, got {version!r}")


def to_document(entries: Iterable[Entry], version: str) -> dict[str, Any]:
    """Return encodings as JSON-compatible data of one version."""
    check_version(version)
    if version == "2.0.0":
        return {
            "version": version,
            "producer": _PRODUCER,
            "encodings": [_to_2(entry) for entry in entries],
        }
    of_params = {name: name == "param_encodings" for name in _SECTIONS}
    if version == "0.6.1":
        sections: dict[str, Any] = {
            section: {e.name: _to_0(e) for e in entries if e.is_param == of_params[section]}
            for section in _SECTIONS
        }
        return {"version": version, **sections, "quantizer_args": {}}
    sections = {
        section: [_to_1(e) for e in entries if e.is_param == of_params[section]]
        for section in _SECTIONS
    }
    rest = {"producer": _PRODUCER, "excluded_layers": [], "quantizer_args": {}}
    return {"version": version, **sections, **rest}


def _to_0(entry: Entry) -> list[dict[str, Any]]:
    highest = entry.lowest + (1 << entry.bits) - 1
    return [
        {
            "bitwidth": entry.bits,
            "dtype": "int",
            "is_symmetric": str(entry.is_symmetric),
            "min": scale * (entry.lowest - zero_point),
            "max": scale * (highest - zero_point),
            "offset": entry.lowest - zero_point,
            "scale": scale,
        }
        for scale, zero_point in zip(entry.scales, entry.zero_points, strict=True)
    ]


def _to_1(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": "INT",
        "bw": entry.bits,
        "is_sym": entry.is_symmetric,
        "scale": list(entry.scales),
        "offset": [entry.lowest - zero_point for zero_point in entry.zero_points],
        "enc_type": "PER_TENSOR" if len(entry.scales) == 1 else "PER_CHANNEL",
    }


def _to_2(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": entry.name,
        "output_dtype": f"{'' if entry.signed else 'u'}int{entry.bits}",
    }
    if len(entry.scales) == 1:
        found["y_scale"] = entry.scales[0]
        if any(entry.zero_points):
            found["y_zero_point"] = entry.zero_points[0]
        return found
    found["y_scale"] = list(entry.scales)
    if any(entry.zero_points):
        found["y_zero_point"] = list(entry.zero_points)
    return {**found, "axis": entry.axis}


def from_document(data: Any, where: str) -> dict[str, Entry | str]:
    """Return the encodings of a file by the names of their tensors.

    Entries that are valid but not of this library's kind (floating point, blocks) are returned as
    the reason why, because they may belong to other layers.

    Args:
        data: The parsed JSON.
        where: Name of the source in errors.

    Raises:
        ParameterError: The version is unknown, or the file is malformed.
    """
    version = data.get("version") if isinstance(data, dict) else None
    if version not in (*VERSIONS, *_READ_AS_2):
        raise ParameterError(
            f"Expected version to be one of {', '.join((*VERSIONS, '2.1.0'))}, got {version!r} "
            f"({where})"
        )
    sections = ("encodings",) if version in _READ_AS_2 else _SECTIONS
    kind: type = dict if version == "0.6.1" else list
    found: dict[str, Entry | str] = {}
    for section in sections:
        entries = data.get(section)
        if not isinstance(entries, kind):
            raise ParameterError(
                f"Expected {section!r} to be a {kind.__name__}, got {type(entries).__name__} "
                f"({where})"
            )
        pairs = _pairs(entries)
        for name, entry in pairs:
            if name is None:
                name = entry.get("name") if isinstance(entry, dict) else None
                if not isinstance(name, str):
                    raise ParameterError(
                        f"Expected a 'name' in every entry of {section!r} ({where})"
                    )
            if name in found:
                raise ParameterError(f"Expected one encoding of {name!r}, got two ({where})")
            try:
                read = _READERS[version]
                found[name] = read(name, entry, section == "param_encodings")
            except _Malformed as error:
                raise ParameterError(f"{error} (tensor {name!r}, {where})") from None
    return found


def _pairs(entries: Any) -> list[tuple[str | None, Any]]:
    """Return names and entries of a section; names of None are in the entries."""
    if isinstance(entries, dict):
        return list(entries.items())
    return [(None, entry) for entry in entries]


class _Malformed(Exception):
    """An entry breaks a rule of the format."""


def _from_0(name: str, entry: Any, is_param: bool) -> Entry | str:
    if not isinstance(entry, list) or not entry or not all(isinstance(e, dict) for e in entry):
        raise _Malformed(f"Expected a list of encodings, got {entry!r:.80}")
    kinds = [(e.get("dtype"), e.get("bitwidth"), str(e.get("is_symmetric"))) for e in entry]
    if any(kind != kinds[0] for kind in kinds):
        raise _Malformed("Expected dtype, bitwidth and is_symmetric to be those of every channel")
    dtype, bits, symmetric = kinds[0]
    if dtype != "int":
        return f"dtype {dtype!r}"
    if symmetric not in ("True", "False"):
        raise _Malformed(f"Expected is_symmetric to be 'True' or 'False', got {symmetric!r}")
    scales, offsets = ([e.get(key) for e in entry] for key in ("scale", "offset"))
    found = _entry(name, bits, symmetric == "True", scales, offsets, None, is_param, shifted=True)
    _check_ends(found, entry)
    return found


def _from_1(name: str, entry: Any, is_param: bool) -> Entry | str:
    if entry.get("dtype") != "INT":
        return f"dtype {entry.get('dtype')!r}"
    if entry.get("enc_type") not in ("PER_TENSOR", "PER_CHANNEL"):
        return f"enc_type {entry.get('enc_type')!r}"
    if not isinstance(entry.get("is_sym"), bool):
        raise _Malformed(f"Expected is_sym to be true or false, got {entry.get('is_sym')!r}")
    if any(entry.get("zero_point_shift") or ()):
        return "zero_point_shift"
    scales, offsets = entry.get("scale"), entry.get("offset")
    if entry["enc_type"] == "PER_CHANNEL" and not is_param:
        return "enc_type 'PER_CHANNEL' of an activation"
    if entry["enc_type"] == "PER_TENSOR" and isinstance(scales, list) and len(scales) > 1:
        raise _Malformed(f"Expected one scale (enc_type 'PER_TENSOR'), got {len(scales)}")
    bits, symmetric = entry.get("bw"), entry["is_sym"]
    return _entry(name, bits, symmetric, scales, offsets, None, is_param, shifted=True)


def _from_2(name: str, entry: Any, is_param: bool) -> Entry | str:
    dtype = entry.get("output_dtype")
    if "bw" in entry or not isinstance(dtype, str):
        raise _Malformed(f"Expected output_dtype and no bw, got {dtype!r}")
    kind = re.fullmatch(r"(u?)int(\d{1,2})", dtype)
    if kind is None:
        return f"output_dtype {dtype!r}"
    if entry.get("block_size") is not None or "per_block_int_scale" in entry:
        return "blocks"
    scales = entry.get("y_scale")
    scales = scales if isinstance(scales, list) else [scales]
    zero_points = entry.get("y_zero_point")
    if zero_points is None:
        zero_points = 0
    if not isinstance(zero_points, list):
        zero_points = [zero_points] * len(scales)
    axis = entry.get("axis")
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise _Malformed(f"Expected axis to be an integer, got {axis!r}")
    bits, signed = int(kind[2]), not kind[1]
    return _entry(name, bits, signed, scales, zero_points, axis, is_param, shifted=False)


_READERS: dict[str, Callable[[str, Any, bool], Entry | str]] = {
    "0.6.1": _from_0,
    "1.0.0": _from_1,
    "2.0.0": _from_2,
    "2.1.0": _from_2,
}


def _entry(
    name: str,
    bits: Any,
    signed: bool,
    scales: Any,
    zero_points: Any,
    axis: int | None,
    is_param: bool,
    *,
    shifted: bool,
) -> Entry:
    """Check numbers and return them; `shifted` says that zero points are offsets."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 32:
        raise _Malformed(f"Expected a width from 1 to 32, got {bits!r}")
    for what, numbers in (("scale", scales), ("offset or zero point", zero_points)):
        if not isinstance(numbers, list) or not numbers:
            raise _Malformed(f"Expected a list of at least one {what}, got {numbers!r:.80}")
    if len(scales) != len(zero_points):
        raise _Malformed(f"Expected one offset per scale, got {len(zero_points)} and {len(scales)}")
    for scale in scales:
        if not _is_number(scale) or scale <= 0:
            raise _Malformed(f"Expected scales to be positive numbers, got {scale!r}")
    lowest = -(1 << (bits - 1)) if signed else 0
    points = []
    for each in zero_points:
        if not _is_number(each) or each != int(each):
            raise _Malformed(f"Expected offsets and zero points to be integers, got {each!r}")
        point = lowest - int(each) if shifted else int(each)
        if not lowest <= point < lowest + (1 << bits):
            raise _Malformed(f"Expected a zero point inside the codes, got {each!r} ({bits} bits)")
        # -1: AIMET's strict symmetry, which leaves out the lowest code; lowest: unsigned codes
        if shifted and signed and point not in (0, -1, lowest):
            raise _Malformed(
                f"Expected a symmetric encoding to have offset {lowest}, or {lowest + 1} or 0, got "
                f"{each!r}"
            )
        points.append(point)
    scales = tuple(float(scale) for scale in scales)
    return Entry(name, bits, signed, scales, tuple(points), axis, is_param)


def _check_ends(found: Entry, channels: list[dict[str, Any]]) -> None:
    """Raise if min or max of a channel, where present, are not those of its scale and offset."""
    for scale, point, given in zip(found.scales, found.zero_points, channels, strict=True):
        first = found.lowest - point
        ends = {"min": first * scale, "max": (first + (1 << found.bits) - 1) * scale}
        for key, expected in ends.items():
            value = given.get(key, expected)
            # strict symmetry leaves out one code, and min and max may be rounded
            if not _is_number(value) or abs(value - expected) > 1.5 * scale:
                raise _Malformed(
                    f"Expected {key} to be {expected:.6g} (of scale and offset), got {value!r}"
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
