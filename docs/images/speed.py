"""Draw speed.svg from the tables of docs/performance.md: `python docs/images/speed.py`."""

from __future__ import annotations

import math
from pathlib import Path

from drawing import rows, svg, text

PAGE = Path(__file__).parents[1] / "performance.md"
LEFT, TOP, WIDTH, APART, BAR = 130, 62, 270, 440, 11
MOST = 100


def groups(section: str, columns: list[int]) -> list[tuple[str, list[str]]]:
    """Return the sizes of the first table of a section, with some of its columns."""
    page = PAGE.read_text(encoding="utf-8")
    page = page[page.index(f"## {section}") :]
    return [(row[0], [row[c] for c in columns]) for row in rows(page, "N, T, C, H")]


PANELS = [
    (
        "CPU, one thread: inference",
        [
            ("yellow", "PyTorch's nn.GRU"),
            ("violet", "PyTorch, dynamic int8"),
            ("green", "ONNX Runtime, float"),
        ],
        groups("Inference on a CPU", [5, 6, 7]),
    ),
    (
        "H200, CUDA graphs: inference",
        [("blue", "cuDNN, at its fastest precision")],
        groups("Inference on a GPU", [6]),
    ),
    (
        "H200, CUDA graphs: training",
        [("blue", "cuDNN")],
        groups("Training", [3]),
    ),
]


def panel(
    left: int,
    top: float,
    title: str,
    peers: list[tuple[str, str]],
    found: list[tuple[str, list[str]]],
) -> tuple[list[str], float]:
    """Return the parts of a panel, and where it ends."""
    parts = [text(left - LEFT + 10, top - 38, title)]
    x = float(left - LEFT + 10)
    for colour, name in peers:
        if name:
            parts.append(f'<rect class="{colour}" x="{x}" y="{top - 26}" width="12" height="10"/>')
            parts.append(text(x + 17, top - 17, name, "label"))
            x += 30 + 6.2 * len(name)
    y = top
    for size, ratios in found:
        middle = y + BAR * len(ratios) / 2 + 4
        parts.append(text(left - 8, middle, size, "label", "end"))
        for (colour, _), shown in zip(peers, ratios, strict=True):
            length = WIDTH * math.log(float(shown)) / math.log(MOST)
            parts.append(
                f'<rect class="{colour}" x="{left}" y="{y:.1f}" '
                f'width="{length:.1f}" height="{BAR - 2}"/>'
            )
            parts.append(text(left + length + 5, y + BAR - 2.5, shown, "label small"))
            y += BAR
        y += 7
    for tick in (1, 2, 5, 10, 20, 50, 100):
        at = left + WIDTH * math.log(tick) / math.log(MOST)
        parts.insert(0, f'<path class="axis" d="M{at:.1f} {top - 4}V{y:.1f}"/>')
        parts.append(text(at, y + 11, str(tick), "label", "middle"))
    return parts, y + 20


def picture() -> str:
    """Return the picture as SVG."""
    cpu, ends = panel(LEFT, TOP, *PANELS[0])
    gpu, under = panel(LEFT + APART, TOP, *PANELS[1])
    training, last = panel(LEFT + APART, under + 58, *PANELS[2])
    bottom = max(ends, last) + 22
    said = "How many times as fast QuantGRU is, with 8 bits; logarithmic. Sizes are N, T, C, H."
    said = text(10, bottom, said, "label")
    return svg(870, round(bottom + 12), "Speed against peers", [*cpu, *gpu, *training, said])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
