"""`QuantConfig`: the quantization of a GRU as an immutable, validated object and a JSON file."""

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainSerializer, PlainValidator, ValidationError

from quant_gru.config.explain import as_config_error
from quant_gru.config.fields import (
    Activation,
    ActivationOperator,
    AnyRounding,
    Document,
    Flag,
    InputRounding,
    ScaleKind,
    Section,
    Segments,
    file_json_schema,
    refuse_parameters,
    to_text,
)
from quant_gru.config.files import read_json, write_text
from quant_gru.config.operators import FUSIBLE, WEIGHTS, canonical_name, suggest
from quant_gru.config.quant_gru_pytorch import translated
from quant_gru.config.settings import (
    OperatorConfig,
    OperatorMap,
    Public,
    SectionComments,
    plain_operators,
)
from quant_gru.config.shown import Settings, settings_table, shortest_calls
from quant_gru.config.translate import GLOBALS, as_document, as_fields, entry_of, notes_on, texts
from quant_gru.errors import ConfigError

__all__ = [
    "OperatorConfig",
    "OperatorMap",
    "QuantConfig",
    "SectionComments",
    "default_config_path",
    "file_json_schema",
]

PRESET_NAMES = ("int8_wide", "int8", "w8a16", "int16")

_DEFAULT_SEGMENTS = {"exact": None, "pwl": 16, "quadratic": 8}

_NO_FILE = (
    "; quant-gru config --write FILE makes one, default_config_path() is the one of the library"
)


class QuantConfig(Public, Section):
    """Quantization of a GRU. Immutable: `replace` and similar methods return a new object.

    Attributes:
        operators: Settings of all seventeen operators. On construction, absent operators and
            fields get their defaults: 8 bits, symmetric, signed, one scale per channel for
            weights, unsigned sigmoid outputs. Short names are accepted.
        scale_kind: ``pot`` for scales 2^-n, ``free`` for any float32.
        activation: Kind of sigmoid and tanh tables: ``exact``, ``pwl`` or ``quadratic``.
        segments: Pieces of a ``pwl`` or ``quadratic`` table; None for 16 and 8.
        correct_bias: Whether calibration keeps the mean of the input, so that the input bias
            corrects the mean error of the input weights.
        input_excludes_zero: Whether the range of `input.x` of the first layer need not contain 0:
            its zero point may then lie outside of the codes.
        tie_x_and_h: Whether calibration gives input.x and output.h one scale and zero point.
        rounding: How the hardware rounds sums: ``half_even``, ``half_away``, ``half_up``,
            ``floor``, or ``double`` for the two steps of TFLite.
        rounding_input: How real values are rounded to codes; None: as `rounding`, and
            ``half_away`` for ``double``.
        disable_quantization: Whether to compute in floating point.
        description: Free text, preserved when writing.
        comment: Free text, preserved when writing.
        section_comments: Descriptions and comments of the sections of a file.

    Raises:
        ConfigError: A value breaks a rule; the message names operator and field.

    Example:
        >>> config = QuantConfig(operators={"z_out": {"bitwidth": 16}}, scale_kind="free")
        >>> config["z_out"].bitwidth, config["z_out"].is_unsigned, config["x"].bitwidth
        (16, True, 8)
    """

    operators: Annotated[
        Mapping[str, OperatorConfig],
        PlainValidator(lambda operators: operators),
        PlainSerializer(plain_operators),
    ] = Field(default_factory=dict)
    scale_kind: ScaleKind = "pot"
    activation: Activation = "exact"
    segments: Segments = None
    correct_bias: Flag = True
    input_excludes_zero: Flag = False
    tie_x_and_h: Flag = False
    rounding: AnyRounding = "half_even"
    rounding_input: InputRounding = None
    disable_quantization: Flag = False
    section_comments: SectionComments = SectionComments()

    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            fields = type(self).model_fields
            unknown = [key for key in data if key not in fields]
            if unknown:
                raise ConfigError(
                    "\n".join(
                        f"Expected a known field, got {key!r}; {suggest(key, fields)}"
                        for key in unknown
                    )
                )
            try:
                document = Document.model_validate(as_document(data))
            except ValidationError as error:
                raise as_config_error(error, Document) from None
            super().__init__(**as_fields(document))

    def __getitem__(self, name: str) -> OperatorConfig:
        """Return the settings of an operator, by full or short name."""
        return self.operators[canonical_name(name)]

    def __repr__(self) -> str:
        """Return Python that makes this configuration from the nearest preset, without comments."""
        cls = type(self)
        widths = [each.bitwidth for each in self.operators.values() if each.bitwidth]
        usual = max(widths, key=widths.count)
        bases = {"QuantConfig()": cls()}
        bases |= {f"QuantConfig.{name}()": getattr(cls, name)() for name in PRESET_NAMES}
        bases[f"QuantConfig.uniform({usual}, is_symmetric=False)"] = cls.uniform(usual, False)
        bases[f"QuantConfig.uniform({usual})"] = cls.uniform(usual)
        made = {text: each._settings() for text, each in bases.items()}
        return shortest_calls(self._settings(), made)

    def _repr_html_(self) -> str:
        """Return a table of all operators, for notebooks."""
        return settings_table(self._settings())

    def _settings(self) -> Settings:
        texts = {"description", "comment"}
        return Settings(
            {name: getattr(self, name) for name in GLOBALS},
            {name: each.model_dump(exclude=texts) for name, each in self.operators.items()},
        )

    @property
    def segment_count(self) -> int | None:
        """Pieces per table, including the default; None for exact tables."""
        return self.segments or _DEFAULT_SEGMENTS[self.activation]

    @property
    def border_rounding(self) -> str:
        """The rule for real values, including the default."""
        if self.rounding_input is not None:
            return self.rounding_input
        return "half_away" if self.rounding == "double" else self.rounding

    # --- changed copies

    def replace(self, name: str, **fields: Any) -> "QuantConfig":
        """Return a copy with changed fields of one operator.

        Example:
            >>> QuantConfig().replace("z_out", bitwidth=16)["z_out"].bitwidth
            16
        """
        name = canonical_name(name)
        changed = {**self.operators[name].model_dump(), **fields}
        return self._with(operators={**self.operators, name: changed})

    def replace_globals(self, **fields: Any) -> "QuantConfig":
        """Return a copy with changed global fields, such as ``scale_kind="free"``."""
        for key in fields:
            if key not in GLOBALS:
                raise ConfigError(
                    f"Expected a known global field, got {key!r}; {suggest(key, GLOBALS)}"
                )
        return self._with(**fields)

    def with_all_bitwidths(self, bitwidth: int, is_symmetric: bool = True) -> "QuantConfig":
        """Return a copy with one width for all operators, and one symmetry for activations.

        Weights and biases stay symmetric, `is_unsigned` does not change, and products that were
        unrounded get the width as well.
        """
        try:
            ActivationOperator(bitwidth=bitwidth, is_symmetric=is_symmetric)
        except ValidationError as error:
            raise as_config_error(error, ActivationOperator) from None
        return self._with(
            operators={
                name: {
                    **operator.model_dump(),
                    "bitwidth": bitwidth,
                    "is_symmetric": is_symmetric or name in WEIGHTS,
                }
                for name, operator in self.operators.items()
            }
        )

    def without_comments(self) -> "QuantConfig":
        """Return a copy without descriptions and comments, for comparing settings."""
        bare = {
            name: operator.model_dump(exclude={"description", "comment"})
            for name, operator in self.operators.items()
        }
        return self._with(
            operators=bare, description=None, comment=None, section_comments=SectionComments()
        )

    def _with(self, **fields: Any) -> "QuantConfig":
        current = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**current, **fields})

    # --- presets

    @classmethod
    def uniform(cls, bitwidth: int, is_symmetric: bool = True) -> "QuantConfig":
        """Return a configuration with the same width everywhere, for comparing widths."""
        return cls().with_all_bitwidths(bitwidth, is_symmetric)

    @classmethod
    def int8(cls) -> "QuantConfig":
        """Return 8 bits everywhere, for hardware that stores 8 bits between operators."""
        return cls.uniform(8, is_symmetric=False)

    @classmethod
    def int8_wide(cls) -> "QuantConfig":
        """Return the recommended start: 8 bits for stored values, up to 14 in registers."""
        widths = dict.fromkeys(("matmul.Wx", "matmul.Rh"), 14)
        widths |= dict.fromkeys(("gate.z_pre", "gate.g_pre"), 12)
        widths |= dict.fromkeys(("gate.z_out", "gate.g_out"), 10)
        config = cls.int8()
        for name, bitwidth in {**widths, **dict.fromkeys(FUSIBLE)}.items():
            config = config.replace(name, bitwidth=bitwidth)
        return config

    @classmethod
    def int16(cls) -> "QuantConfig":
        """Return 16 bits everywhere, for outputs close to the float model at twice the memory."""
        return cls.uniform(16, is_symmetric=False)

    @classmethod
    def w8a16(cls) -> "QuantConfig":
        """Return int16 with 8-bit matrices, if int8 loses accuracy but memory is limited."""
        return cls.int16().replace("weight.W", bitwidth=8).replace("weight.R", bitwidth=8)

    # --- the file

    @classmethod
    def from_dict(cls, data: Any, verbose: bool = False) -> "QuantConfig":
        """Return the configuration in a dict with the structure of the file.

        Args:
            data: ``{"GRU_config": {"default_config": ..., "operator_config": ...}}``.
            verbose: Whether to print which operators use their defaults.

        Raises:
            ConfigError: A value breaks a rule; the message names operator and field.
        """
        return cls._from_document(data, None, verbose)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str], verbose: bool = False) -> "QuantConfig":
        """Read a configuration file.

        Args:
            path: A JSON file in UTF-8.
            verbose: Whether to print which operators use their defaults.

        Raises:
            ConfigError: The file cannot be read or breaks a rule; the message names file,
                operator and field.
        """
        return cls._from_document(read_json(path, _NO_FILE), path, verbose)

    @classmethod
    def _from_document(
        cls, data: Any, file: str | os.PathLike[str] | None, verbose: bool
    ) -> "QuantConfig":
        try:
            refuse_parameters(data)
            document = Document.model_validate(translated(data))
        except ValidationError as error:
            raise as_config_error(error, Document, file, show_section=True) from None
        except ConfigError as error:
            raise ConfigError(
                f"{error} (file {os.fspath(file)!r})" if file else str(error)
            ) from None
        config = cls(**as_fields(document))
        if verbose:
            for note in notes_on(document):
                print(f"{file or 'configuration'}: {note}")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the complete configuration, with comments, in the structure of the file."""
        notes = self.section_comments
        return {
            **texts(self),
            "GRU_config": {
                **texts(notes.GRU_config),
                "default_config": {
                    **texts(notes.default_config),
                    **{name: getattr(self, name) for name in GLOBALS},
                },
                "operator_config": {
                    **texts(notes.operator_config),
                    **{name: entry_of(operator) for name, operator in self.operators.items()},
                },
            },
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write a complete configuration file with one operator per line.

        Raises:
            ConfigError: The file cannot be written; an existing file is unchanged.
        """
        write_text(path, to_text(self.to_dict()))


def default_config_path() -> Path:
    """Return the path of the configuration file in the library.

    Example:
        >>> config = QuantConfig.from_json(default_config_path())
    """
    return Path(str(files("quant_gru.config") / "gru_quant_bitwidth_config.json"))
