"""Draw accuracy_bits.svg from docs/accuracy.md: `python docs/images/accuracy_bits.py`."""

from __future__ import annotations

import re
from pathlib import Path

from drawing import rows, svg, text

PAGE = Path(__file__).parents[1] / "accuracy.md"
# Title of the panel, section, column of the figure, values at the bottom and the top, ticks.
PANELS = [
    ("spoken digits: % right", "Spoken digits", 2, (92.0, 100.5), (92, 94, 96, 98, 100)),
    ("characters: bits per character", "Characters", 1, (2.42, 2.12), (2.4, 2.3, 2.2)),
    ("two tanks: SNR, dB", "Two tanks", 2, (15.0, 37.0), (15, 20, 25, 30, 35)),
]
LEFT, TOP, WIDTH, HEIGHT, APART = 44, 40, 226, 190, 290


def figures(section: str, column: int) -> dict[str, float]:
    """Return the mean of each model in the table of a section."""
    page = PAGE.read_text(encoding="utf-8")
    page = page[page.index(f"## {section}") :]
    return {
        row[0]: float(re.match(r"[\d.]+", row[column])[0])  # type: ignore[index]
        for row in rows(page, "| model ")
    }


def picture() -> str:
    """Return the picture as SVG."""
    parts = []
    for index, (title, section, column, (low, high), ticks) in enumerate(PANELS):
        left = LEFT + APART * index
        found = figures(section, column)
        widths = [name.split()[0] for name in found if name.endswith(" after")]
        right = left + WIDTH

        def height(value: float, low: float = low, high: float = high) -> float:
            return TOP + HEIGHT * (high - value) / (high - low)

        parts.append(text(left - 30, 20, title))
        for tick in ticks:
            y = height(tick)
            parts.append(f'<path class="axis" d="M{left} {y:.1f}H{right}"/>')
            parts.append(text(left - 6, y + 4, str(tick), "label", "end"))
        y = height(found["float, longer"])
        parts.append(f'<path class="curve dashed line-grey" d="M{left} {y:.1f}H{right}"/>')
        places = [left + 24 + (WIDTH - 48) * i / (len(widths) - 1) for i in range(len(widths))]
        for kind, colour in (("after", "yellow"), ("trained", "blue")):
            points = [
                (x, height(found[f"{width} {kind}"]))
                for x, width in zip(places, widths, strict=True)
            ]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(f'<path class="curve line-{colour}" d="M{path}"/>')
            parts += [
                f'<circle class="full-{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
                for x, y in points
            ]
        for x, width in zip(places, widths, strict=True):
            parts.append(text(x, TOP + HEIGHT + 18, width, "label", "middle"))
    y = TOP + HEIGHT + 44
    for x, colour, meaning in (
        (14, "grey", "float, longer"),
        (150, "yellow", "quantized after training"),
        (344, "blue", "trained in integers"),
    ):
        dashed = " dashed" if colour == "grey" else ""
        parts.append(f'<path class="curve line-{colour}{dashed}" d="M{x} {y - 4}h22"/>')
        parts.append(text(x + 29, y, meaning, "label"))
    parts.append(
        text(870, y, "bits of weights / bits of all else; upwards is better", "label", "end")
    )
    return svg(880, y + 14, "Accuracy of three tasks against bits", parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
