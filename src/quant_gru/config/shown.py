"""A configuration as a person sees it: the calls that make it, and a table."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
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


def html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML."""

    def line(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(each)}</{tag}>" for each in row) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', titles)}</thead><tbody>{body}</tbody></table>"


def settings_table(settings: Settings) -> str:
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
    shared = html.escape(_arguments(settings.shared))
    return f"<p><code>{shared}</code></p>{html_table(titles, rows)}"
