"""Compares the documents of two files."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from typing import Any

from quant_gru.cli.files import Found
from quant_gru.cli.tables import columns
from quant_gru.config import QuantConfig

_ABSENT = object()

_short = reprlib.Repr()
_short.maxlist = 4


def differences(first: list[Found], second: list[Found], names: tuple[str, str]) -> str:
    """Return a table of what differs, empty if nothing does.

    GRUs are compared by name. If both files have one, the names do not matter. A configuration and
    parameters are compared by their configurations. Comments do not count.

    Args:
        first: The documents of one file.
        second: The documents of the other one.
        names: The names of both files, for the head of the table.
    """
    pairs: dict[str, tuple[Found | None, Found | None]]
    if len(first) == len(second) == 1:
        pairs = {"": (first[0], second[0])}
    else:
        left, right = ({each.name: each for each in side} for side in (first, second))
        pairs = {name: (left.get(name), right.get(name)) for name in {**left, **right}}
    rows = [row for name, pair in pairs.items() for row in _rows(name, *pair)]
    return columns([("where", *names), *rows]) if rows else ""


def _rows(name: str, a: Found | None, b: Found | None) -> Iterator[tuple[str, str, str]]:
    if a is None or b is None:
        yield name or "(the whole file)", a.kind if a else "-", b.kind if b else "-"
        return
    whole = not any(isinstance(each.content, QuantConfig) for each in (a, b))
    left, right = (dict(_values(each, whole)) for each in (a, b))
    for key in {**left, **right}:
        x, y = left.get(key, _ABSENT), right.get(key, _ABSENT)
        if x != y:
            yield f"{name}: {key}" if name else key, _text(x), _text(y)


def _values(found: Found, whole: bool) -> Iterator[tuple[str, Any]]:
    """Yield place and value of everything in a document; of its configuration if not `whole`."""
    content = found.content
    if not whole or isinstance(content, QuantConfig):
        yield from _leaves(_plain(found.config))
        return
    from quant_gru.parameters.document import to_document

    document = to_document(content.shape, content.config, content.cells)
    yield from _leaves(document["gru"])
    yield from _leaves(_plain(content.config))
    for cell in document["cells"]:
        place = f"layer {cell['layer']}{' reverse' if cell['reverse'] else ''}, "
        yield from _leaves(cell["operators"], place)
        yield from _leaves(cell["tables"], f"{place}table ")


def _plain(config: QuantConfig) -> dict[str, Any]:
    document: dict[str, Any] = config.without_comments().to_dict()["GRU_config"]
    return {**document["default_config"], **document["operator_config"]}


def _leaves(data: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{place}{key} ")
        else:
            yield f"{place}{key}", value


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "-"
    if isinstance(value, list):
        return f"{_short.repr(value)} ({len(value)})"
    return value if isinstance(value, str) else json.dumps(value)
