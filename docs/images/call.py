"""Draw docs/images/call.svg, the way of a call: `python docs/images/call.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 870, 550
STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.place { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #59636e }
.label { font-style: italic; fill: #59636e }
rect { fill: #f6f8fa; stroke: #8c959f; rx: 6px }
.native { fill: #ddf4ff; stroke: #0969da }
.definition { fill: #dafbe1; stroke: #1a7f37 }
path { fill: none; stroke: #59636e; stroke-width: 1.4; marker-end: url(#head) }
marker path { fill: #59636e; stroke: none; marker-end: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .place, .label { fill: #9198a1 }
  rect { fill: #151b23; stroke: #656c76 }
  .native { fill: #0c2d6b; stroke: #4493f8 }
  .definition { fill: #04260f; stroke: #3fb950 }
  path { stroke: #9198a1 }
  marker path { fill: #9198a1 }
}
"""

# Name: x, y, width, title, place, class.
BOXES = {
    "forward": (20, 20, 250, "QuantGRU.forward", "modules/gru.py", ""),
    "float": (590, 8, 250, "float mode, calibration", "torch.nn.GRU, calibration/", ""),
    "traced": (590, 66, 250, "compiled, traced, exported", "torch_ops/, modules/call.py", ""),
    "prepared": (
        20,
        140,
        250,
        "prepared call: does it still fit?",
        "execution/prepared_call.py",
        "",
    ),
    "native": (
        590,
        140,
        250,
        "whole call in native code",
        "kernels/bindings/prepared_call",
        "native",
    ),
    "rows": (20, 236, 250, "(T, N, C) or packed rows", "execution/sequence_layout.py", ""),
    "plan": (20, 332, 250, "plan of scales and weights", "execution/plan_cache.py", ""),
    "gradient": (305, 332, 250, "keep codes for backward", "autograd/straight_through.py", ""),
    "layers": (590, 332, 250, "layers and directions", "execution/layers.py", ""),
    "reference": (20, 458, 250, "the definition", "integer/cell.py", "definition"),
    "cpu": (305, 458, 250, "CPU", "kernels/cpu", "native"),
    "cuda": (590, 458, 250, "GPU", "kernels/cuda", "native"),
}

# Path, and a label with the place of its start.
ARROWS = [
    ("M270 38 H590", ("float", 430, 30)),
    ("M270 52 H540 Q550 52 550 62 V76 Q550 86 560 86 H590", ("torch records it", 430, 68)),
    ("M145 64 V140", ("quantized", 155, 106)),
    ("M270 162 H590", ("yes", 430, 154)),
    ("M145 184 V236", ("no, or another form of input", 155, 214)),
    ("M145 280 V332", ("new weights, scales, device", 155, 310)),
    ("M270 354 H305", None),
    (
        "M145 376 V404 Q145 414 155 414 H560 Q570 414 570 404 V376 Q570 366 580 366 H590",
        ("no gradient needed", 190, 406),
    ),
    ("M555 346 H590", None),
    ("M715 376 V458", ("on a GPU", 725, 420)),
    ("M690 376 V428 Q690 438 680 438 H440 Q430 438 430 448 V458", ("on a CPU", 445, 430)),
    ("M305 480 H270", None),
    ("M840 162 H842 Q852 162 852 172 V470 Q852 480 842 480 H840", None),
]


def picture() -> str:
    """Return the picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>A call of QuantGRU, from forward to the kernels</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
    ]
    for path, label in ARROWS:
        parts.append(f'<path d="{path}"/>')
        if label:
            text, x, y = label
            parts.append(f'<text class="label" x="{x}" y="{y}">{escape(text)}</text>')
    for x, y, width, title, place, kind in BOXES.values():
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="44"/>')
        parts.append(f'<text x="{x + 10}" y="{y + 18}">{escape(title)}</text>')
        parts.append(f'<text class="place" x="{x + 10}" y="{y + 35}">{escape(place)}</text>')
    below = (
        "Every executor gives the codes of the definition; "
        "what one does not support, the definition computes."
    )
    parts.append(f'<text class="label" x="20" y="{HEIGHT - 22}">{escape(below)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
