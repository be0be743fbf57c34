"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("kMGT")},
    **{f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(" + "|".join(_UNITS) + ")")


def bytes_of(text: str) -> int | None:
    """Return the bytes of a text such as "1.5 kB" or "6 GiB"; None if it is none.

    Args:
        text: A number and one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    match = _SIZE.fullmatch(text)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])
