"""A configuration as a person sees it: the calls that make it, and a table."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, NamedTuple

Fields = Mapping[str, Any]


class Settings(NamedTuple):
    """What a configuration sets, without comments.

    Attributes:
        shared: Fields that hold for all operators.
        operators: Operator -> its fields.
    """

    shared: Fields
    operators: Mapping[str, Fields]


def shortest_calls(settings: Settings, bases: Mapping[str, Settings]) -> str:
    """Return Python that makes a configuration from one of `bases`.

    Args:
        settings: What the configuration sets.
        bases: Python of a configuration -> what that one sets.
    """
    found = ((base, _changes(settings, made)) for base, made in bases.items())
    base, changes = min(found, key=lambda each: len(each[1]))
    return base + "".join(changes)


def _changes(settings: Settings, base: Settings) -> list[str]:
    shared = _changed(settings.shared, base.shared)
    calls = [f".replace_globals({_arguments(shared)})"] if shared else []
    for name, fields in settings.operators.items():
        changed = _changed(fields, base.operators[name])
        if changed:
            calls.append(f".replace({name!r}, {_arguments(changed)})")
    return calls


def _changed(fields: Fields, base: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value != base[name]}


def _arguments(fields: Fields) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def html_table(settings: Settings) -> str:
    """Return all operators as a table in HTML, below the settings that hold for all."""
    titles = ("operator", "bits", "codes", "zero point", "scales")
    rows = []
    for name, fields in settings.operators.items():
        if fields["bitwidth"] is None:
            rows.append((name, "not rounded", "", "", ""))
            continue
        rows.append(
            (
                name,
                str(fields["bitwidth"]),
                "unsigned" if fields["is_unsigned"] else "signed",
                "0" if fields["is_symmetric"] else "free",
                f"one per {fields['granularity']}" if fields["granularity"] else "one",
            )
        )
    head = "".join(f"<th>{each}</th>" for each in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<p><code>{html.escape(_arguments(settings.shared))}</code></p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
