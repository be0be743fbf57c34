"""The parts of `QuantConfig`: one operator, the map of all operators, the comments of a file."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from quant_gru.config.explain import as_config_error
from quant_gru.config.fields import AnyGranularity, BitsOrNull, Flag, Section
from quant_gru.config.operators import OPERATORS
from quant_gru.errors import ConfigError


class Public(BaseModel):
    """A frozen model that raises `ConfigError` instead of pydantic's error."""

    model_config = Section.model_config

    if not TYPE_CHECKING:  # type checkers see pydantic's signatures

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise as_config_error(error, type(self)) from None

        @classmethod
        def model_validate(cls, *args: Any, **options: Any) -> Any:
            """Validate like pydantic, but raise `ConfigError`."""
            try:
                return super().model_validate(*args, **options)
            except ValidationError as error:
                raise as_config_error(error, cls) from None

        @classmethod
        def model_validate_json(cls, *args: Any, **options: Any) -> Any:
            """Validate like pydantic, but raise `ConfigError`."""
            try:
                return super().model_validate_json(*args, **options)
            except ValidationError as error:
                raise as_config_error(error, cls) from None

        def __setattr__(self, name: str, value: Any) -> None:
            raise ConfigError(
                f"Expected {type(self).__name__} to stay as it is, got a new value for {name!r}; "
                "make a changed copy instead"
            )


class OperatorConfig(Public, Section):
    """Quantization of one operator.

    Attributes:
        bitwidth: 1 to 32 bits; None for a product that is not rounded.
        is_symmetric: Whether the zero point is 0.
        is_unsigned: Whether codes are [0, 2^n-1] rather than [-2^(n-1), 2^(n-1)-1].
        granularity: One scale per tensor, gate or channel; None for an activation.
        description: Free text, preserved when writing.
        comment: Free text, preserved when writing.

    Example:
        >>> OperatorConfig(bitwidth=16).is_symmetric
        True
    """

    bitwidth: BitsOrNull = 8
    is_symmetric: Flag = True
    is_unsigned: Flag = False
    granularity: AnyGranularity = None


class OperatorMap(Mapping[str, OperatorConfig]):
    """All seventeen operators by full name, in the order of `OPERATORS`; immutable."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, OperatorConfig]) -> None:
        self._items = {name: items[name] for name in OPERATORS}

    def __getitem__(self, name: str) -> OperatorConfig:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.values()))

    def __repr__(self) -> str:
        return repr(self._items)


def plain_operators(operators: Mapping[str, OperatorConfig]) -> dict[str, Any]:
    """Return the map as dicts, for pydantic's `model_dump`."""
    return {name: operator.model_dump() for name, operator in operators.items()}


class SectionComments(Public):
    """The descriptions and comments of the inner sections of a configuration file."""

    GRU_config: Section = Section()
    default_config: Section = Section()
    operator_config: Section = Section()
