"""Pydantic's validation errors, expressed in terms of the configuration file."""

import os
import reprlib
from typing import Any

from pydantic import BaseModel, ValidationError

from quant_gru.config.fields import OperatorSection, Rule, key_of
from quant_gru.config.operators import OPERATORS, suggest
from quant_gru.errors import ConfigError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def as_config_error(
    error: ValidationError,
    root: type[BaseModel],
    file: str | os.PathLike[str] | None = None,
    show_section: bool = False,
) -> ConfigError:
    """Return one error that lists every problem on a separate line.

    Args:
        error: The error of pydantic.
        root: The model that was validated.
        file: The file that the values come from, if any.
        show_section: Whether to name the section of the file that contains a value.
    """
    lines = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            return cause
        problem, place = _problem(detail, root, show_section)
        if file is not None:
            place.append(f"file {os.fspath(file)!r}")
        lines.append(problem + (f" ({', '.join(place)})" if place else ""))
    return ConfigError("\n".join(lines))


def _problem(detail: Any, root: type[BaseModel], show_section: bool) -> tuple[str, list[str]]:
    """Return the problem and its place: ``("Expected ...", ["operator 'gate.z_out'"])``."""
    model: type[BaseModel] = root
    section, rule, name = "", "an object", "the configuration"
    is_operator = False
    for key in detail["loc"]:
        fields = {key_of(name, field): field for name, field in model.model_fields.items()}
        place = _place(section, is_operator, show_section)
        if key not in fields:
            known, thing = list(fields), "field"
            if model is OperatorSection:
                known, thing = [*OPERATORS, "description", "comment"], "operator"
            return f"Expected a known {thing}, got {key!r}; {suggest(key, known)}", place
        name = str(key)
        field = fields[name]
        rule = next((item.text for item in field.metadata if isinstance(item, Rule)), "an object")
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            is_operator = model is OperatorSection
            model, section = nested, name
    message = str(detail.get("ctx", {}).get("error", ""))
    if message:
        return message, _place(section, is_operator, show_section)
    place = _place(section, is_operator, show_section and name != section)
    if detail["type"] == "missing":
        return f"Expected {name} to be present, got nothing", place
    name = "its settings" if is_operator and name == section else name
    return f"Expected {name} to be {rule}, got {_short.repr(detail['input'])}", place


def _place(section: str, is_operator: bool, show_section: bool) -> list[str]:
    if is_operator:
        return [f"operator {section!r}"]
    return [f"section {section!r}"] if section and show_section else []
