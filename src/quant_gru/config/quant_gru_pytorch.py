"""Configuration files of quant-gru-pytorch, with its newer operator names.

Its files have the sections of ours. Operators are called `update_gate_output` or
`gate.update_gate_output`, a granularity is `"quantization_granularity": "PER_GATE"`, and
`use_pot2_scale` decides between powers of two and any scales.
"""

from __future__ import annotations

from typing import Any

from quant_gru.errors import ConfigError

_NEWER = {
    "input.x": "input",
    "output.h": "output",
    "weight.W": "weight_ih",
    "weight.R": "weight_hh",
    "weight.bw": "bias_ih",
    "weight.br": "bias_hh",
    "matmul.Wx": "linear.weight_ih_linear",
    "matmul.Rh": "linear.weight_hh_linear",
    "gate.z_pre": "gate.update_gate_input",
    "gate.z_out": "gate.update_gate_output",
    "gate.r_pre": "gate.reset_gate_input",
    "gate.r_out": "gate.reset_gate_output",
    "gate.g_pre": "gate.new_gate_input",
    "gate.g_out": "gate.new_gate_output",
    "op.rRh": "op.mul_reset_hidden",
    "op.old_contrib": "op.mul_old_contribution",
    "op.new_contrib": "op.mul_new_contribution",
}

NEWER_NAMES: dict[str, str] = {
    **{theirs: ours for ours, theirs in _NEWER.items()},
    **{theirs.rpartition(".")[2]: ours for ours, theirs in _NEWER.items()},
}
"""Newer names of operators, with and without their group."""

GRANULARITIES = {"PER_TENSOR": "tensor", "PER_GATE": "gate", "PER_CHANNEL": "channel"}


def translated(data: Any) -> Any:
    """Return a configuration file with the names and fields of this library.

    Anything that is not of quant-gru-pytorch stays as it is, for the reader to check.

    Raises:
        ConfigError: An operator or setting is named twice, or a value has no meaning.
    """
    if not isinstance(data, dict) or not isinstance(data.get("GRU_config"), dict):
        return data
    sections = dict(data["GRU_config"])
    if isinstance(sections.get("operator_config"), dict):
        sections["operator_config"] = _operators(sections["operator_config"])
    if isinstance(sections.get("default_config"), dict):
        sections["default_config"] = _defaults(sections["default_config"])
    return {**data, "GRU_config": sections}


def _operators(given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    named: dict[str, str] = {}
    for name, entry in given.items():
        ours = NEWER_NAMES.get(name, name)
        if ours in named:
            raise ConfigError(
                f"Expected one of {named[ours]!r} and {name!r}, which name the same operator, got "
                "both"
            )
        named[ours] = name
        found[ours] = _entry(entry, name) if isinstance(entry, dict) else entry
    return found


def _entry(entry: dict[str, Any], name: str) -> dict[str, Any]:
    if "quantization_granularity" not in entry:
        return entry
    if "granularity" in entry:
        raise ConfigError(
            "Expected one of granularity and quantization_granularity, got both "
            f"(operator {name!r})"
        )
    rest = dict(entry)
    theirs = rest.pop("quantization_granularity")
    if not isinstance(theirs, str) or theirs not in GRANULARITIES:
        raise ConfigError(
            f"Expected quantization_granularity to be one of {', '.join(GRANULARITIES)}, got "
            f"{theirs!r} (operator {name!r})"
        )
    return {**rest, "granularity": GRANULARITIES[theirs]}


def _defaults(given: dict[str, Any]) -> dict[str, Any]:
    if "use_pot2_scale" not in given:
        return given
    rest = dict(given)
    pot = rest.pop("use_pot2_scale")
    if not isinstance(pot, bool):
        raise ConfigError(f"Expected use_pot2_scale to be true or false, got {pot!r}")
    if "scale_kind" in rest:
        raise ConfigError("Expected one of scale_kind and use_pot2_scale, got both")
    return {**rest, "scale_kind": "pot" if pot else "free"}
