"""The seventeen operators of the quantized GRU: names, groups and older spellings.

All other packages refer to an operator by its full name, such as ``gate.z_out``.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from quant_gru.errors import ConfigError

MEANINGS: dict[str, str] = {
    "input.x": "input sequence x",
    "output.h": "hidden state h, at every step",
    "weight.W": "input weights W",
    "weight.R": "recurrent weights R",
    "weight.bw": "input bias bw",
    "weight.br": "recurrent bias br",
    "matmul.Wx": "W x + bw",
    "matmul.Rh": "R h + br",
    "gate.z_pre": "update gate before the sigmoid",
    "gate.z_out": "update gate after the sigmoid, in [0, 1]",
    "gate.r_pre": "reset gate before the sigmoid",
    "gate.r_out": "reset gate after the sigmoid, in [0, 1]",
    "gate.g_pre": "candidate before the tanh",
    "gate.g_out": "candidate after the tanh, in [-1, 1]",
    "op.rRh": "r * (R_g h + br_g)",
    "op.old_contrib": "z * h, what stays of the old state",
    "op.new_contrib": "(1 - z) * g, what the candidate adds",
}
"""The meaning of each operator, in the order of the configuration file."""

OPERATORS: tuple[str, ...] = tuple(MEANINGS)
"""All seventeen names, in the order of the configuration file."""

WEIGHTS: tuple[str, ...] = ("weight.W", "weight.R", "weight.bw", "weight.br")
"""Weights and biases: symmetric, signed, with a granularity."""

ACTIVATIONS: tuple[str, ...] = tuple(name for name in OPERATORS if name not in WEIGHTS)
"""All operators that are computed from the input."""

FUSIBLE: tuple[str, ...] = ("op.rRh", "op.old_contrib", "op.new_contrib")
"""Products that may enter the following sum unrounded (``bitwidth`` None)."""

FIXED_RANGE: tuple[str, ...] = ("gate.z_out", "gate.r_out", "gate.g_out")
"""Outputs of sigmoid and tanh: the function determines the scale, without statistics."""

SIGMOIDS: tuple[str, ...] = ("gate.z_out", "gate.r_out")
"""Outputs in [0, 1]: unsigned by default."""

CALIBRATED: tuple[str, ...] = tuple(name for name in ACTIVATIONS if name not in FIXED_RANGE)
"""Activations with a scale from statistics."""

OLDER_NAMES: dict[str, str] = {"input.h": "output.h", "weight.bx": "weight.bw"}
"""Older names of current operators."""

FUSED_NAME = "op.Rh_add_br"
"""An older operator, now part of ``matmul.Rh``: accepted in files, with its settings ignored."""


def _short(name: str) -> str:
    return name.partition(".")[2]


_RESOLVED: dict[str, str] = {
    **{_short(old): new for old, new in OLDER_NAMES.items()},
    **{_short(name): name for name in OPERATORS},
    **OLDER_NAMES,
    **{name: name for name in OPERATORS},
}


# How operators name the gates.
_LETTERS = {"update": "z", "reset": "r", "candidate": "g", "new": "g"}


def canonical_name(name: str) -> str:
    """Return the full name of an operator.

    Args:
        name: A full name (``gate.z_out``), an older one (``input.h``, ``weight.bx``) or a short
            one, the part after the dot (``z_out``, ``x``, ``W``, ``bx``).

    Raises:
        ConfigError: No operator has this name; the message suggests the nearest.

    Example:
        >>> canonical_name("z_out"), canonical_name("input.h")
        ('gate.z_out', 'output.h')
    """
    if isinstance(name, str):
        if name in _RESOLVED:
            return _RESOLVED[name]
        if name in (FUSED_NAME, _short(FUSED_NAME)):
            raise ConfigError(
                f"Expected an operator that has settings, got {name!r}: it is part of 'matmul.Rh'"
            )
    hint = suggest(name, OPERATORS)
    letter = _LETTERS.get(name.lower().removesuffix("_gate")) if isinstance(name, str) else None
    if letter:
        hint = ", ".join(each for each in OPERATORS if each.startswith(f"gate.{letter}_"))
        hint = f"operators of this gate: {hint}"
    raise ConfigError(f"Expected a known operator, got {name!r}; {hint}")


def resolve(name: Any) -> Any:
    """Return the full name of an operator; return `name` unchanged if it is not an operator."""
    return _RESOLVED.get(name, name) if isinstance(name, str) else name


def suggest(name: object, known: Iterable[str]) -> str:
    """Return ``did you mean '...'?`` for the nearest known name, or a list of all names.

    A short or older operator name also matches its full name, and case is ignored.
    """
    names = list(known)
    if isinstance(name, str):
        if resolve(name) in names:
            return f"did you mean {resolve(name)!r}?"
        by_folded = {candidate.lower(): candidate for candidate in reversed(names)}
        for candidate in names:
            by_folded.setdefault(_short(candidate).lower(), candidate)
        by_folded.pop("", None)
        near = difflib.get_close_matches(name.lower(), by_folded, n=1)
        if near:
            return f"did you mean {by_folded[near[0]]!r}?"
    return "known: " + ", ".join(sorted(names))
