"""What the pictures of this folder share: colours for light and dark, boxes, texts, tables."""

from __future__ import annotations

from html import escape

# Name: fill and stroke in light, fill and stroke in dark.
COLOURS = {
    "grey": ("#f6f8fa", "#8c959f", "#151b23", "#656c76"),
    "yellow": ("#fff8c5", "#9a6700", "#272115", "#d29922"),
    "blue": ("#ddf4ff", "#0969da", "#0c2d6b", "#4493f8"),
    "green": ("#dafbe1", "#1a7f37", "#04260f", "#3fb950"),
    "violet": ("#fbefff", "#8250df", "#271052", "#ab7df8"),
}
FONT = 'system-ui, "Segoe UI", Helvetica, Arial, sans-serif'
MONO = "ui-monospace, Menlo, Consolas, monospace"


def _rules(text: str, faint: str, theme: int) -> str:
    rules = [
        f"svg {{ color: {text} }}",
        f"text {{ fill: {text} }}",
        f".place, .label {{ fill: {faint} }}",
        f".way {{ stroke: {faint} }}",
        f".axis {{ stroke: {faint}; stroke-opacity: .35 }}",
        f"marker path {{ fill: {faint} }}",
    ]
    for name, colours in COLOURS.items():
        fill, stroke = colours[2 * theme : 2 * theme + 2]
        rules.append(f".{name} {{ fill: {fill}; stroke: {stroke} }}")
        rules.append(f".line-{name} {{ stroke: {stroke} }} .full-{name} {{ fill: {stroke} }}")
    return "\n".join(rules)


STYLE = f"""
text {{ font: 13px {FONT} }}
.place {{ font: 11px {MONO} }}
.label {{ font-size: 12px }}
.small {{ font-size: 9.5px }}
.way {{ fill: none; stroke-width: 1.4; marker-end: url(#head) }}
.curve {{ fill: none; stroke-width: 2 }}
.dashed {{ stroke-dasharray: 5 4 }}
{_rules("#1f2328", "#59636e", 0)}
@media (prefers-color-scheme: dark) {{
{_rules("#f0f6fc", "#9198a1", 1)}
}}
"""
HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>'
)


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """Return a picture of these parts."""
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    lines = [start, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", HEAD, *parts]
    return "\n".join([*lines, "</svg>"]) + "\n"


def text(x: float, y: float, what: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text; `kind` is '', 'label' or 'place'."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>'
    )


def box(x: float, y: float, width: float, height: float, colour: str, *lines: str) -> str:
    """Return a box with a first line of text and, in a font of code, others."""
    top = y + height / 2 + 5 - 8 * (len(lines) - 1)
    middle = x + width / 2
    return (
        f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="6"/>'
        + "".join(
            text(middle, top + 16 * index, line, "place" if index else "", "middle")
            for index, line in enumerate(lines)
        )
    )


def way(path: str, kind: str = "") -> str:
    """Return an arrow along a path."""
    return f'<path class="way {kind}" d="{path}"/>'


def rows(page: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose head begins with `first`, without the head."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and first in line)
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found
