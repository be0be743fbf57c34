"""Draw targets.svg, the way from float to each target: `python docs/images/targets.py`."""

from __future__ import annotations

from pathlib import Path

from drawing import box, svg, text, way

# Colour, what it is, the call, for whom.
TARGETS = [
    ("green", "file of integers", "freeze().save", "RTL, C++, C, Rust, Python"),
    ("green", "C99 source", "export_c", "microcontrollers, DSPs"),
    ("green", "ONNX, integer", "export_onnx", "ONNX Runtime"),
    ("green", "golden vectors", "trace_codes", "what to compare codes with"),
    ("yellow", "ONNX, qdq or node", "export_onnx", "compilers of NPUs"),
    ("yellow", "encodings", "export_encodings", "QNN, AIMET"),
    ("yellow", "parameter file", "export_quant_params", "scales, zero points, tables as JSON"),
]
SOURCES = [
    ("a PyTorch model", "torch.nn.GRU", "convert_model"),
    ("a GRU of an ONNX file", "any exporter", "QuantGRU.from_onnx"),
    ("a GRU of Keras, Haste", "keras.layers.GRU", "from_keras, from_haste"),
]


def picture() -> str:
    """Return the picture as SVG."""
    parts = [text(10, 24, "float", "label"), text(206, 24, "calibrated, integers", "label")]
    parts.append(text(434, 24, "leaves PyTorch as", "label"))
    step = 52
    middle = 40 + step * len(TARGETS) / 2 - 6
    for index, (what, detail, call) in enumerate(SOURCES):
        y = middle + (index - 1) * 100 - 22
        parts.append(box(10, y, 160, 44, "grey", what, detail))
        bend = middle + (index - 1) * 22
        parts.append(way(f"M170 {y + 22:.0f}C186 {y + 22:.0f} 186 {bend:.0f} 206 {bend:.0f}"))
        parts.append(text(10, y + 60, call, "place"))
    parts.append(
        box(206, middle - 44, 150, 88, "blue", "QuantGRU", "calibrate_model", "17 operators")
    )
    parts.append(text(206, middle + 64, "bits: allocate_bits", "place"))
    parts.append(text(206, middle + 82, "train: as any module", "place"))
    for index, (colour, what, call, whom) in enumerate(TARGETS):
        y = 40 + step * index
        parts.append(box(434, y, 172, 40, colour, what, call))
        parts.append(text(616, y + 24, whom, "label"))
        bend = middle + (index - len(TARGETS) // 2) * 10
        parts.append(way(f"M356 {bend:.0f}C396 {bend:.0f} 386 {y + 20} 434 {y + 20}"))
    y = 40 + step * len(TARGETS) + 4
    for x, colour, meaning in (
        (10, "green", "the codes of the definition, bit for bit"),
        (300, "yellow", "scales and widths: the receiver computes in its own way between them"),
    ):
        parts.append(f'<rect class="{colour}" x="{x}" y="{y}" width="16" height="12" rx="3"/>')
        parts.append(text(x + 23, y + 10, meaning, "label"))
    return svg(870, y + 24, "From a float GRU to each target", parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
