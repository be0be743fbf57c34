"""Sizes of memory as people write them."""

from __future__ import annotations

from actnn.errors import ActNNError
from quant_gru.kernel_runtime.byte_sizes import bytes_of


def parse_bytes(size: float | str, what: str = "size") -> int:
    """Bytes of a size: a whole number, or a text such as "6 GiB" or "500 MB".

    Args:
        size: Bytes, a whole number such as 6e9; or a number and one of B, kB, MB, GB, TB, KiB, MiB,
            GiB, TiB.
        what: Name of the argument, for errors.

    Raises:
        ActNNError: If it is anything else, or not positive.
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size == size // 1:
        found = int(size)
    else:
        read = bytes_of(size) if isinstance(size, str) else None
        if read is None:
            raise ActNNError(
                f'Expected {what} to be bytes (an int) or a text such as "6 GiB" or "500 MB", '
                f"got {size!r}"
            )
        found = read
    if found <= 0:
        raise ActNNError(f"Expected {what} to be positive, got {size!r}")
    return found


def format_bytes(size: float) -> str:
    """A size in binary units, with three digits or more: "5.61 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000 or unit == "GiB":
            break
        size /= 1024
    digits = 0 if unit == "B" else max(0, 2 - (abs(size) >= 10) - (abs(size) >= 100))
    return f"{size:.{digits}f} {unit}"
