"""docs/parameter_file.md, the schema and what is written name the same keys."""

import json
import re
from pathlib import Path

import torch

from quant_gru import QuantConfig, QuantGRU
from quant_gru.parameters import schema

PAGE = Path(__file__).parents[2] / "docs" / "parameter_file.md"
EXAMPLE = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)


def written(tmp_path):
    gru = QuantGRU(3, 4, config=QuantConfig.int8(), zoneout=0.25)
    gru.calibrate(torch.randn(5, 2, 3))
    gru.finalize_calibration()
    gru.export_quant_params(tmp_path / "params.json")
    return json.loads((tmp_path / "params.json").read_text())


def parts(document):
    """The objects of a document, by what they are."""
    cell = document["cells"][0]
    return {
        "document": document,
        "gru": document["gru"],
        "cell": cell,
        "operator": cell["operators"]["input.x"],
        "table": cell["tables"]["gate.z_out"],
    }


def test_page_schema_and_writer_agree(tmp_path):
    found = {name: set(part) for name, part in parts(written(tmp_path)).items()}
    shown = {name: set(part) for name, part in parts(json.loads(EXAMPLE[1])).items()}
    assert shown == found
    definitions = schema.params_json_schema()
    named = {"gru": "Shape", "operator": "OperatorParams", "table": "TableParams"}
    for name, model in named.items():
        assert set(definitions["$defs"][model]["properties"]) == found[name]
    assert set(definitions["properties"]) == found["document"]


def test_rules_name_every_key_of_the_gru_and_its_operators(tmp_path):
    rules = PAGE.read_text().split("## The format in ten rules")[1].split("\n## ")[0]
    document = written(tmp_path)
    assert document["gru"]["zoneout"] == 0.25
    keys = {*document, *parts(document)["operator"], "zoneout"}
    assert {key for key in keys if f"`{key}`" not in rules} == set()
