"""Tables of results as text."""

from __future__ import annotations

from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def text_table(titles: Sequence[str], rows: Rows) -> str:
    """Return lines of columns; the first column is left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (titles, *rows)
    )


def percent(share: float | None) -> str:
    """Return a share as text; '' for None."""
    return "" if share is None else f"{100 * share:.1f} %"
