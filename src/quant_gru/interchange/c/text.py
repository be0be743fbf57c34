"""Integers as C text: types, arrays and templates."""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
TYPES = (
    ("int8_t", -(1 << 7), (1 << 7) - 1, 1),
    ("uint8_t", 0, (1 << 8) - 1, 1),
    ("int16_t", -(1 << 15), (1 << 15) - 1, 2),
    ("uint16_t", 0, (1 << 16) - 1, 2),
    ("int32_t", -(1 << 31), (1 << 31) - 1, 4),
    ("uint32_t", 0, (1 << 32) - 1, 4),
    ("int64_t", -(1 << 63), (1 << 63) - 1, 8),
)
SIZES = {name: size for name, _, _, size in TYPES}


class _Template(string.Template):
    """Text with placeholders @name or @{name}."""

    delimiter = "@"


def fill(template: str, **values: object) -> str:
    """Return a template of this folder with its placeholders replaced."""
    return _Template((HERE / template).read_text(encoding="utf-8")).substitute(values)


def type_of(lo: int, hi: int) -> str:
    """Return the smallest C type that holds all integers in [lo, hi]."""
    return next(name for name, least, most, _ in TYPES if least <= lo and hi <= most)


def number(value: int) -> str:
    """Return an integer as a C expression of sufficient width."""
    if -(1 << 31) < value < 1 << 31:
        return str(value)
    if value >= 1 << 63:
        return f"UINT64_C({value})"
    return f"INT64_C({value})" if value > -(1 << 63) else "INT64_MIN"


def array(ctype: str, name: str, values: Iterable[int]) -> str:
    """Return the definition of a constant array, in lines of at most 100 columns."""
    words = ctype == "uint32_t"
    items = [f"0x{value:08x}u" if words else number(value) for value in values]
    lines, line = [], "   "
    for item in items:
        if len(line) + len(item) + 2 > 100:
            lines.append(line)
            line = "   "
        line += f" {item},"
    lines.append(line)
    body = "\n".join(lines)
    return f"static const {ctype} {name}[{len(items)}] = {{\n{body}\n}};\n"


def struct(ctype: str, name: str, **fields: int | str) -> str:
    """Return the definition of a constant structure; fields are in the order of its type."""
    items = ", ".join(v if isinstance(v, str) else number(v) for v in fields.values())
    return f"static const {ctype} {name} = {{{items}}};\n"
