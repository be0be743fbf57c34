"""Saves pictures of matplotlib that can be read on light and on dark pages."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

# Text and axes follow the page, as those of docs/images/drawing.py do.
STYLE = """<style>
svg { color: #1f2328; fill: #1f2328 }
@media (prefers-color-scheme: dark) { svg { color: #f0f6fc; fill: #f0f6fc } }
</style>
"""
PAPER = re.compile(r"fill: #ffffff(?:; opacity: [\d.]+)?")


def themed(svg: str) -> str:
    """Return a picture without background, whose black is the colour of the page's text."""
    start = svg.index("<svg")
    end = svg.index(">", start) + 1
    body = re.sub(r" *<metadata>.*?</metadata>\n", "", svg[end:], flags=re.S)
    body = PAPER.sub("fill: none", body).replace("#000000", "currentColor")
    return f"{svg[start:end]}\n{STYLE}{body.lstrip()}"


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG, the same file from the same figure."""
    import matplotlib

    text = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "quant-gru", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg")
    path.write_text(themed(text.getvalue()), encoding="utf-8")
