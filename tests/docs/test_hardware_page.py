"""Each configuration of docs/hardware.md is what the row of its target says."""

import re
from pathlib import Path

import pytest

from quant_gru import QuantConfig

PAGE = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")

TARGETS = {
    "esp32_p4": "ESP-DL on ESP32-P4, target `esp32p4`",
    "esp32_s3": "ESP-DL on ESP32-S3, target `esp32s3`",
    "esp32_c": "ESP-DL, target `c` (other chips)",
    "tflite_micro": "TFLite Micro, 8 bits, default build",
    "tflite_micro_single": "TFLite Micro, 8 bits, with `TFLITE_SINGLE_ROUNDING`",
    "cmsis_nn": "CMSIS-NN, 8 bits, default build",
    "truncating_rtl": "RTL that shifts",
    "older_quant_gru_pytorch": "quant-gru-pytorch, older names of operators",
}
WEIGHTS = ("weight.W", "weight.R", "weight.bw", "weight.br")


def rows() -> dict[str, list[str]]:
    """Target -> rounding, scales, widths; "the same" is what the row before says."""
    table = re.findall(r"^\| (.*) \|$", PAGE.partition("## Configurations")[0], re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in table[1:]:
        target, *cells = line.split(" | ")
        before = next(reversed(found.values()), cells)
        found[target] = [b if c == "the same" else c for b, c in zip(before, cells, strict=False)]
    return found


def configurations() -> dict[str, QuantConfig]:
    block = re.search(r"## Configurations.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert block
    names: dict[str, object] = {}
    exec(block[1], names)
    return {name: value for name, value in names.items() if isinstance(value, QuantConfig)}


def test_every_configuration_has_a_row() -> None:
    assert configurations().keys() == TARGETS.keys()


@pytest.mark.parametrize("name", TARGETS)
def test_row_and_configuration_agree(name: str) -> None:
    config = configurations()[name]
    rounding, scales, widths, *_ = rows()[TARGETS[name]]
    assert rounding == f"`{config.rounding}`"
    assert f"`{config.scale_kind}`" in scales
    every = [config[operator] for operator in config.operators]
    if widths[0].isdigit() and widths[0] != "1":
        assert {each.bitwidth for each in every} <= {int(widths[0]), 16}
    if "symmetric" in scales:
        assert all(each.is_symmetric for each in every)
    if "signed" in scales:
        assert not any(each.is_unsigned for each in every)
    for granularity in ("channel", "tensor"):
        if f"per {granularity}" in scales:
            assert {config[weight].granularity for weight in WEIGHTS} == {granularity}
