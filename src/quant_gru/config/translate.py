"""Conversions between `QuantConfig` and the file, which arrange the same settings differently."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from quant_gru.config.fields import Document, Section, identifier
from quant_gru.config.operators import (
    FUSED_NAME,
    OLDER_NAMES,
    OPERATORS,
    WEIGHTS,
    resolve,
)
from quant_gru.config.settings import OperatorConfig, OperatorMap, SectionComments
from quant_gru.errors import ConfigError, note_once

GLOBALS = (
    "scale_kind",
    "activation",
    "segments",
    "correct_bias",
    "input_excludes_zero",
    "tie_x_and_h",
    "rounding",
    "rounding_input",
    "disable_quantization",
)
"""The fields of `QuantConfig` in the section ``default_config`` of the file."""

_FUSED_NOTE = f"{FUSED_NAME} is part of matmul.Rh; its settings are ignored"


def texts(section: BaseModel) -> dict[str, str]:
    """Return the description and the comment of a section, if present."""
    return section.model_dump(include={"description", "comment"}, exclude_none=True)


def entry_of(operator: OperatorConfig) -> dict[str, Any]:
    """Return one operator in the format of the file: only weights have a granularity."""
    entry = operator.model_dump(exclude={"granularity", "description", "comment"})
    if operator.granularity is not None:
        entry["granularity"] = operator.granularity
    return {**entry, **texts(operator)}


def as_document(data: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `QuantConfig` in the structure of the file."""
    notes = data.get("section_comments", {})
    if not isinstance(notes, SectionComments):
        notes = SectionComments.model_validate(notes)
    return {
        **{key: data[key] for key in ("description", "comment") if key in data},
        "GRU_config": {
            **texts(notes.GRU_config),
            "default_config": {
                **texts(notes.default_config),
                **{key: data[key] for key in GLOBALS if key in data},
            },
            "operator_config": {
                **texts(notes.operator_config),
                **_full_names(data.get("operators", {})),
            },
        },
    }


def _full_names(operators: Any) -> dict[str, Any]:
    if not isinstance(operators, Mapping):
        raise ConfigError(f"Expected operators to be a mapping by name, got {operators!r}")
    given: dict[str, str] = {}
    entries = {}
    for name, entry in operators.items():
        full = resolve(name)
        if full in given:
            raise ConfigError(
                f"Expected one of {given[full]!r} and {name!r}, which name the same operator, "
                "got both"
            )
        given[full] = name
        if isinstance(entry, OperatorConfig):
            entry = entry.model_dump(exclude_unset=True)
        entries[full] = dict(entry) if isinstance(entry, Mapping) else entry
    return entries


def as_fields(document: Document) -> dict[str, Any]:
    """Return a validated document as the keyword arguments of `QuantConfig`."""
    gru: Any = document.GRU_config
    section = gru.operator_config
    _warn_of_fused_name(section)
    return {
        **texts(document),
        **{name: getattr(gru.default_config, name) for name in GLOBALS},
        "operators": OperatorMap({name: _operator(section, name) for name in OPERATORS}),
        "section_comments": SectionComments(
            GRU_config=Section(**texts(gru)),
            default_config=Section(**texts(gru.default_config)),
            operator_config=Section(**texts(section)),
        ),
    }


def _operator(section: Any, name: str) -> OperatorConfig:
    names = [name, *(old for old, new in OLDER_NAMES.items() if new == name)]
    given = [key for key in names if identifier(key) in section.model_fields_set]
    fields = getattr(section, identifier(given[0] if given else name)).model_dump()
    if name in WEIGHTS and fields["granularity"] is None:
        fields["granularity"] = "channel"
    return OperatorConfig(**fields)


def _warn_of_fused_name(section: Any) -> None:
    if identifier(FUSED_NAME) in section.model_fields_set:
        note_once(_FUSED_NOTE, stacklevel=5)


def notes_on(document: Document) -> list[str]:
    """Return notes about the file for its reader."""
    section: Any = document.GRU_config.operator_config
    keys = {identifier(old): new for old, new in OLDER_NAMES.items()}
    keys |= {identifier(name): name for name in OPERATORS}
    given = {keys.get(key) for key in section.model_fields_set}
    absent = [name for name in OPERATORS if name not in given]
    notes = []
    if absent:
        notes.append(
            f"defaults (8 bits, symmetric, signed; sigmoid outputs unsigned) for the absent "
            f"{', '.join(absent)}"
        )
    if identifier(FUSED_NAME) in section.model_fields_set:
        notes.append(_FUSED_NOTE)
    return notes
