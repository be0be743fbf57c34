"""The parameter file as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT: Final = "quant-gru-params"
VERSION: Final = 2

Integer = Annotated[int, Field(strict=True)]
_Size = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Strict(BaseModel):
    """A part of a document: no unknown keys, no conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Shape(Strict):
    """The GRU that the parameters belong to."""

    input_size: _Size
    hidden_size: _Size
    num_layers: _Size
    bias: bool
    bidirectional: bool
    zoneout: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def directions(self) -> int:
        """Number of directions, 1 or 2."""
        return 2 if self.bidirectional else 1


class OperatorParams(Strict):
    """Parameters of one operator: real value = scale * (code - zero_point).

    The bitwidth of a fused operator is null, and it has no other parameters. If the scales of
    weights were set by hand, they are a list, one per row in PyTorch's order. Otherwise they are
    null: they follow the weights.
    """

    bitwidth: Annotated[int, Field(ge=1, le=32)] | None
    is_symmetric: bool
    is_unsigned: bool
    scale: float | list[float] | None = None
    zero_point: Integer | None = None
    exp2_inv: Integer | None = Field(None, description="scale = 2^-exp2_inv; null for other scales")
    granularity: Literal["tensor", "gate", "channel"] | None = None


class TableParams(Strict):
    """A piecewise polynomial: y = clamp(round(sum c_p t^p / 2^shift) + zero_point, lo, hi)."""

    bounds: list[Integer] = Field(description="first code of each segment, ascending")
    last: Integer = Field(description="input codes are clamped to [bounds[0], last]")
    coefficients: list[list[Integer]] = Field(description="c0, c1, .. of each segment")
    shift: Annotated[int, Field(ge=0, le=62)]
    zero_point: Integer
    lo: Integer
    hi: Integer
    segment_shift: Annotated[int, Field(ge=0, le=32)] | None


class MeanParams(Strict):
    """The mean of each input feature: values * 2^-exp2_inv."""

    exp2_inv: Annotated[int, Field(ge=-127, le=149, strict=True)]
    values: list[Annotated[int, Field(ge=-(2**24), le=2**24, strict=True)]]


class CellParams(Strict):
    """Parameters of one layer and direction."""

    layer: Annotated[int, Field(ge=0)]
    reverse: bool
    operators: dict[str, OperatorParams]
    tables: dict[str, TableParams]
    input_mean: MeanParams | None = Field(
        None, description="for the correction of the input bias; null without"
    )


class Document(Strict):
    """A parameter file of quant-gru."""

    format: Literal["quant-gru-params"]
    version: Literal[1, 2]
    gru: Shape
    config: dict[str, Any] = Field(description="as in gru_quant_bitwidth_config.json")
    cells: list[CellParams]


def params_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the parameter file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Document.model_json_schema(),
        "title": "quant-gru parameter file",
    }
