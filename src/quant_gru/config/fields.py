"""The allowed values of a configuration, field by field, as pydantic models of the file.

Each kind of operator has its own model, because weights, activations and products follow
different rules. The JSON Schema and the error messages are generated from these models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

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

from quant_gru.config.operators import (
    FUSED_NAME,
    FUSIBLE,
    MEANINGS,
    OLDER_NAMES,
    OPERATORS,
    SIGMOIDS,
    WEIGHTS,
)


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
