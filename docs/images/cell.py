"""Draw docs/images/cell.svg, the cell and its places of rounding: `python docs/images/cell.py`."""

from __future__ import annotations

from pathlib import Path

from drawing import svg, text, way

from quant_gru.analysis.cell_picture import ARROWS, HEIGHT, PLACES, WIDTH, arrow, corner
from quant_gru.config import FIXED_RANGE, FUSIBLE, WEIGHTS

# Colour: how the codes of such an operator are made.
KINDS = {
    "grey": "rounded once, before the first step",
    "yellow": "real value to code, at each step",
    "blue": "one sum of integers, one rounding",
    "green": "read from a table of integers",
    "violet dashed": "product: one rounding, or fused (none)",
}


def kind(name: str) -> str:
    """Return the colour of an operator."""
    if name in WEIGHTS:
        return "grey"
    if name == "input.x":
        return "yellow"
    return "green" if name in FIXED_RANGE else "violet dashed" if name in FUSIBLE else "blue"


def picture() -> str:
    """Return the picture as SVG."""
    (h_x, h_y), (old_x, old_y), (Rh_x, Rh_y) = map(
        corner, ("output.h", "op.old_contrib", "matmul.Rh")
    )
    half, middle, below = WIDTH / 2, Rh_x + WIDTH / 2, Rh_y + 2.5 * HEIGHT
    over = f"M{h_x + half:.0f} {h_y:.0f}V-8H{old_x + half:.0f}V{old_y:.0f}"
    around = (
        f"M{h_x + WIDTH:.0f} {h_y + HEIGHT / 2:.0f}h7V{below:.0f}H{middle:.0f}V{Rh_y + HEIGHT:.0f}"
    )
    parts = ['<g transform="translate(0 18)">', *(arrow(*ends) for ends in ARROWS)]
    parts += [way(over, "dashed"), way(around, "dashed")]
    parts.append(text(middle + 8, below - 6, "h of this step is the state of the next", "label"))
    for name, (_, _, shown) in PLACES.items():
        x, y = corner(name)
        parts.append(
            f'<rect class="{kind(name)}" x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" '
            f'height="{HEIGHT}" rx="6"/>'
        )
        parts.append(text(x + half, y + 15, shown, "", "middle"))
        parts.append(text(x + half, y + 28, name, "place small", "middle"))
    parts.append("</g>")
    for index, (colour, meaning) in enumerate(KINDS.items()):
        x, y = 8 + 246 * (index % 3), 336 + 20 * (index // 3)
        parts.append(f'<rect class="{colour}" x="{x}" y="{y}" width="16" height="12" rx="3"/>')
        parts.append(text(x + 23, y + 10, meaning, "label"))
    return svg(742, 372, "The cell: seventeen operators, each with one rounding", parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
