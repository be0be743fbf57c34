"""The cell as a picture: its operators, where each one rounds, and how much that costs."""

from __future__ import annotations

import html
from collections.abc import Mapping

WIDTH, HEIGHT = 92, 34

# Column and row of each operator, and its text.
PLACES: dict[str, tuple[float, float, str]] = {
    "input.x": (0, 0, "x"),
    "weight.W": (0, 1, "W"),
    "weight.bw": (0, 2, "bw"),
    "weight.R": (0, 4, "R"),
    "weight.br": (0, 5, "br"),
    "matmul.Wx": (1.25, 1, "W x + bw"),
    "matmul.Rh": (1.25, 4, "R h + br"),
    "gate.r_pre": (2.5, 3, "r_pre"),
    "gate.r_out": (3.75, 3, "r"),
    "gate.z_pre": (2.5, 0, "z_pre"),
    "gate.z_out": (3.75, 0, "z"),
    "op.rRh": (3.75, 4.2, "r · R h"),
    "gate.g_pre": (3.75, 1.6, "g_pre"),
    "gate.g_out": (5, 1.6, "g"),
    "op.old_contrib": (5, 0, "z · h"),
    "op.new_contrib": (6.25, 1.6, "(1 - z) · g"),
    "output.h": (6.25, 0, "h"),
}
ARROWS = (
    ("input.x", "matmul.Wx"),
    ("weight.W", "matmul.Wx"),
    ("weight.bw", "matmul.Wx"),
    ("weight.R", "matmul.Rh"),
    ("weight.br", "matmul.Rh"),
    ("matmul.Wx", "gate.z_pre"),
    ("matmul.Wx", "gate.r_pre"),
    ("matmul.Wx", "gate.g_pre"),
    ("matmul.Rh", "gate.z_pre"),
    ("matmul.Rh", "gate.r_pre"),
    ("matmul.Rh", "op.rRh"),
    ("gate.r_pre", "gate.r_out"),
    ("gate.z_pre", "gate.z_out"),
    ("gate.r_out", "op.rRh"),
    ("op.rRh", "gate.g_pre"),
    ("gate.g_pre", "gate.g_out"),
    ("gate.g_out", "op.new_contrib"),
    ("gate.z_out", "op.old_contrib"),
    ("gate.z_out", "op.new_contrib"),
    ("op.old_contrib", "output.h"),
    ("op.new_contrib", "output.h"),
)


def cell_picture(
    shares: Mapping[str, float], bits: Mapping[str, int | None], links: Mapping[str, str]
) -> str:
    """Return an <svg> element.

    Args:
        shares: Operator -> its share of the error, 0..1; its colour.
        bits: Operator -> its width; None for a fused one.
        links: Operator -> where a click leads, '' for nowhere.
    """
    most = max(shares.values(), default=0.0) or 1.0
    parts = [arrow(a, b) for a, b in ARROWS]
    for name, (_, _, text) in PLACES.items():
        x, y = corner(name)
        share = shares.get(name)
        width = bits.get(name)
        opacity = 0.0 if share is None else 0.08 + 0.72 * (share / most) ** 0.5
        below = "not rounded" if width is None else f"{width} bits"
        if share is not None:
            below += f" · {100 * share:.1f} %"
        at = f'x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6"'
        box = (
            f'<rect {at} class="box"/><rect {at} fill="#d9480f" '
            f'fill-opacity="{opacity:.2f}" stroke="currentColor" '
            + ('stroke-dasharray="3 3" ' if width is None else "")
            + 'stroke-opacity=".5"/>'
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 14:.0f}" text-anchor="middle" font-size="12" '
            f'fill="currentColor">{html.escape(text)}</text>'
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 27:.0f}" text-anchor="middle" font-size="10" '
            f'fill="currentColor" fill-opacity=".75">{below}</text>'
        )
        title = f"<title>{html.escape(name)}</title>"
        link = links.get(name, "")
        parts.append(
            f'<a href="{html.escape(link)}">{title}{box}</a>' if link else f"<g>{title}{box}</g>"
        )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 330" role="img" class="cell" '
        f'font-family="system-ui,sans-serif">{"".join(parts)}</svg>'
    )


def corner(name: str) -> tuple[float, float]:
    """Return the upper left corner of an operator's box."""
    column, row, _ = PLACES[name]
    return 8 + 100 * column, 10 + 52 * row


def arrow(first: str, then: str) -> str:
    """Return a curve from the right of one box to the left of another, or between their middles."""
    (ax, ay), (bx, by) = corner(first), corner(then)
    if ax == bx and abs(ay - by) > 3 * HEIGHT:  # round the box between them
        x, y, u, v = ax + WIDTH, ay + HEIGHT / 2, bx + WIDTH, by + 0.8 * HEIGHT
        return _curve(x, y, x + 30, u, v)
    if abs(ax - bx) < WIDTH:
        up = by < ay
        x, y = ax + WIDTH / 2, ay if up else ay + HEIGHT
        u, v = bx + WIDTH / 2, by + HEIGHT if up else by
    else:
        x, y, u, v = ax + WIDTH, ay + HEIGHT / 2, bx, by + HEIGHT / 2
    return _curve(x, y, (x + u) / 2, u, v)


def _curve(x: float, y: float, between: float, u: float, v: float) -> str:
    return (
        f'<path d="M{x:.0f} {y:.0f}C{between:.0f} {y:.0f} {between:.0f} {v:.0f} {u:.0f} {v:.0f}" '
        'fill="none" stroke="currentColor" stroke-opacity=".35"/>'
    )
