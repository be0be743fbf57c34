"""Tables of results as text and in HTML."""

from __future__ import annotations

import html
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


def html_table(titles: Sequence[str], rows: Rows) -> str:
    """Return the table in HTML."""

    def line(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(each)}</{tag}>" for each in row) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', titles)}</thead><tbody>{body}</tbody></table>"


def percent(share: float | None) -> str:
    """Return a share as text; '' for None."""
    return "" if share is None else f"{100 * share:.1f} %"
