"""The configuration file as pydantic models: allowed values, sections, JSON Schema, text format.

Each kind of operator has its own model, because weights, activations and products follow
different rules. The JSON Schema and the error messages are generated from these models.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from quant_gru.config.operators import (
    FUSED_NAME,
    FUSIBLE,
    MEANINGS,
    OLDER_NAMES,
    OPERATORS,
    SIGMOIDS,
    WEIGHTS,
)
from quant_gru.errors import ConfigError

_DEPTH_OF_OPERATORS = 3


@dataclass(frozen=True)
class Rule:
    """The text of a rule in error messages: "Expected bitwidth to be <text>"."""

    text: str


def _must_be(value: bool) -> AfterValidator:
    def check(given: bool) -> bool:
        if given is not value:
            raise ValueError
        return given

    return AfterValidator(check)


Flag = Annotated[bool, Strict(), Rule("true or false")]
Text = Annotated[str | None, Strict(), Rule("a string")]
Granularity = Literal["tensor", "gate", "channel"]
Bits = Annotated[int, Strict(), Field(ge=1, le=32), Rule("an integer from 1 to 32")]
BitsOrNull = Annotated[
    Annotated[int, Strict(), Field(ge=1, le=32)] | None,
    Rule("an integer from 1 to 32, or null"),
]
AnyGranularity = Annotated[Granularity | None, Rule("'tensor', 'gate' or 'channel'")]
AlwaysTrue = Annotated[
    bool,
    Strict(),
    _must_be(True),
    WithJsonSchema({"const": True}),
    Rule("true, because weights and biases are always symmetric"),
]
AlwaysFalse = Annotated[
    bool,
    Strict(),
    _must_be(False),
    WithJsonSchema({"const": False}),
    Rule("false, because weights and biases are always signed"),
]
NoGranularity = Annotated[None, Rule("absent, because only weights and biases have a granularity")]
ScaleKind = Annotated[Literal["pot", "free"], Rule("'pot' or 'free'")]
Rounding = Literal["half_even", "half_away", "half_up", "floor", "double"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
DEFAULT_ROUNDING = ROUNDINGS[0]
_ROUNDINGS = "'half_even', 'half_away', 'half_up', 'floor' or 'double'"
AnyRounding = Annotated[Rounding, Rule(_ROUNDINGS)]
InputRounding = Annotated[
    Literal["half_even", "half_away", "half_up", "floor"] | None,
    Rule("'half_even', 'half_away', 'half_up' or 'floor', or null"),
]
Activation = Annotated[Literal["exact", "pwl", "quadratic"], Rule("'exact', 'pwl' or 'quadratic'")]
Segments = Annotated[
    Annotated[int, Strict(), Field(ge=1, le=256)] | None,
    Rule("an integer from 1 to 256, or null"),
]


class Section(BaseModel):
    """A section of the file. Each section may have a description and a comment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    description: Text = None
    comment: Text = None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            if value is not None or name not in ("description", "comment"):
                yield name, value


class WeightOperator(Section):
    """Quantization of a weight matrix or a bias."""

    bitwidth: Bits = Field(8, description="width in bits")
    is_symmetric: AlwaysTrue = Field(True, description="zero point 0")
    is_unsigned: AlwaysFalse = Field(False, description="codes from 0 to 2^n-1")
    granularity: AnyGranularity = Field("channel", description="how many scales: 1, 3 or 3H")


class ActivationOperator(Section):
    """Quantization of an activation."""

    bitwidth: Bits = Field(8, description="width in bits")
    is_symmetric: Flag = Field(True, description="zero point 0")
    is_unsigned: Flag = Field(False, description="codes from 0 to 2^n-1")
    granularity: NoGranularity = None


class SigmoidOperator(ActivationOperator):
    """Quantization of the output of a sigmoid, unsigned by default."""

    is_unsigned: Flag = Field(True, description="codes from 0 to 2^n-1")


class FusibleOperator(Section):
    """Quantization of a product. If the width is null, the product is not rounded."""

    bitwidth: BitsOrNull = Field(8, description="width in bits; null: not rounded")
    is_symmetric: Flag = Field(True, description="zero point 0")
    is_unsigned: Flag = Field(False, description="codes from 0 to 2^n-1")
    granularity: NoGranularity = None


def kind_of(name: str) -> type[Section]:
    """Return the model with the rules of the operator `name`."""
    if name in WEIGHTS:
        return WeightOperator
    if name in FUSIBLE:
        return FusibleOperator
    return SigmoidOperator if name in SIGMOIDS else ActivationOperator


def _one_name_each(section: Any) -> Any:
    for old, new in OLDER_NAMES.items():
        if {identifier(old), identifier(new)} <= section.model_fields_set:
            raise ValueError(
                f"Expected one of {old!r} and {new!r}, which name the same operator, got both"
            )
    return section


def identifier(name: str) -> str:
    """Return the attribute of `OperatorSection` for the operator `name`."""
    return name.replace(".", "_")


def _entry(name: str, kind: type[Section], meaning: str) -> Any:
    return kind, Field(default_factory=kind, alias=name, description=meaning)


_VALIDATORS: Any = {"one_name_each": model_validator(mode="after")(_one_name_each)}

OperatorSection: type[Section] = create_model(
    "OperatorSection",
    __base__=Section,
    __doc__="The operators. Absent operators have their default settings.",
    __validators__=_VALIDATORS,
    **{identifier(name): _entry(name, kind_of(name), MEANINGS[name]) for name in OPERATORS},
    **{
        identifier(old): _entry(old, kind_of(new), f"older name of {new}")
        for old, new in OLDER_NAMES.items()
    },
    **{
        identifier(FUSED_NAME): _entry(
            FUSED_NAME, ActivationOperator, "part of matmul.Rh; accepted and ignored"
        )
    },
)

_SEGMENTS_NEED_A_FIT: Any = {
    "if": {
        "properties": {"activation": {"enum": ["pwl", "quadratic"]}},
        "required": ["activation"],
    },
    "else": {"properties": {"segments": {"type": "null"}}},
}


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
    rounding: AnyRounding = Field(
        "half_even", description="how the hardware rounds sums; double: in two steps, as TFLite"
    )
    rounding_input: InputRounding = Field(
        None, description="how real values are rounded to codes; null: as rounding says"
    )
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
