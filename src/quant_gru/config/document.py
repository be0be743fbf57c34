"""The configuration file as a whole: sections, JSON Schema, and text format."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from quant_gru.config.fields import (
    Activation,
    Flag,
    OperatorSection,
    ScaleKind,
    Section,
    Segments,
)
from quant_gru.config.operators import OLDER_NAMES
from quant_gru.errors import ConfigError

_SEGMENTS_NEED_A_FIT: Any = {
    "if": {
        "properties": {"activation": {"enum": ["pwl", "quadratic"]}},
        "required": ["activation"],
    },
    "else": {"properties": {"segments": {"type": "null"}}},
}


_DEPTH_OF_OPERATORS = 3


class DefaultSection(Section):
    """Settings of the whole GRU."""

    model_config = ConfigDict(json_schema_extra=_SEGMENTS_NEED_A_FIT)

    scale_kind: ScaleKind = Field("pot", description="scales: powers of two, or any float32")
    activation: Activation = Field("exact", description="how sigmoid and tanh become tables")
    segments: Segments = Field(None, description="segments per table; null: 16 pwl, 8 quadratic")
    correct_bias: Flag = Field(
        True, description="true: the input bias corrects the mean error of the input weights"
    )
    input_excludes_zero: Flag = Field(
        False, description="true: the range of input.x of the first layer need not contain 0"
    )
    tie_x_and_h: Flag = Field(False, description="true: one scale for input.x and output.h")
    disable_quantization: Flag = Field(False, description="true: compute in floating point")

    @model_validator(mode="after")
    def _segments_need_a_fit(self) -> "DefaultSection":
        if self.activation == "exact" and self.segments is not None:
            raise ValueError(
                f"Expected segments to be null with activation 'exact', got {self.segments}"
            )
        return self


class GRUSection(Section):
    """Settings of a GRU and its operators."""

    default_config: DefaultSection = Field(default_factory=DefaultSection)
    operator_config: OperatorSection = Field(default_factory=OperatorSection)


class Document(Section):
    """Quantization of a GRU: bit widths, symmetry and signedness of its operators."""

    GRU_config: GRUSection


class _PlainSchema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def file_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the configuration file.

    A JSON Schema accepts 8.0 as an integer and does not see duplicate keys. The reader is stricter
    in these two points; otherwise both accept the same files.
    """
    schema = Document.model_json_schema(schema_generator=_PlainSchema)
    schema["$defs"]["OperatorSection"]["allOf"] = [
        {"not": {"required": [old, new]}} for old, new in OLDER_NAMES.items()
    ]
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        **schema,
        "title": "gru_quant_bitwidth_config.json",
    }


def key_of(name: str, field: FieldInfo) -> str:
    """Return the key of the field `name` in the file."""
    return field.alias or name


def to_text(document: dict[str, Any]) -> str:
    """Return the document as JSON with one operator, or another single value, per line."""
    return _to_text(document, depth=0) + "\n"


def _to_text(value: Any, depth: int) -> str:
    if not isinstance(value, dict) or depth == _DEPTH_OF_OPERATORS:
        return json.dumps(value, ensure_ascii=False)
    indent = "  " * depth
    entries = (
        f"{indent}  {json.dumps(key)}: {_to_text(inner, depth + 1)}" for key, inner in value.items()
    )
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def refuse_parameters(data: Any) -> None:
    """Raise ConfigError for a parameter file, ours or that of quant-gru-pytorch."""
    if isinstance(data, Mapping) and "GRU_config" not in data:
        if {"format", "cells"} <= set(data) or {"model_info", "operators"} <= set(data):
            raise ConfigError(
                "Expected a bit-width configuration (key GRU_config), got a parameter file; use "
                "load_quant_params"
            )
