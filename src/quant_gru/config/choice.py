"""A configuration as users give it: itself, a preset's name, a file, or the contents of one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from quant_gru.config.operators import suggest
from quant_gru.config.schema import PRESET_NAMES, QuantConfig
from quant_gru.errors import ConfigError

PRESETS: dict[str, Callable[[], QuantConfig]] = {
    name: getattr(QuantConfig, name) for name in PRESET_NAMES
}

OneConfig: TypeAlias = QuantConfig | str | os.PathLike[str] | Mapping[str, Any]


def as_config(config: Any, what: str = "config", verbose: bool = False) -> QuantConfig:
    """Return the configuration that a user means.

    Args:
        config: A QuantConfig; the name of a preset; the path of a configuration file; or the
            contents of one, a dict with the key GRU_config.
        what: Name of the argument, for errors.
        verbose: Whether to print which operators use their defaults.

    Raises:
        ConfigError: It is none of these, or a rule is broken.
    """
    if isinstance(config, QuantConfig):
        return config
    if isinstance(config, str) and config in PRESETS:
        return PRESETS[config]()
    if isinstance(config, Mapping):
        return QuantConfig.from_dict(dict(config), verbose)
    if isinstance(config, os.PathLike) or (
        isinstance(config, str) and (_is_path(config) or Path(config).exists())
    ):
        return QuantConfig.from_json(config, verbose)
    if isinstance(config, str):
        raise ConfigError(
            f"Expected {what} to be a preset ({', '.join(PRESETS)}) or a file, got {config!r}; "
            f"{_hint(config)}"
        )
    raise ConfigError(
        f"Expected {what} to be a QuantConfig, a preset's name, a path or a dict with GRU_config, "
        f"got {type(config).__name__}"
    )


def described(config: QuantConfig) -> str:
    """Return the name of the preset that a configuration is, or its range of widths."""
    bare = config.without_comments()
    preset = next((name for name, make in PRESETS.items() if make() == bare), None)
    if preset is not None:
        return f"config={preset}"
    widths = sorted(each.bitwidth for each in config.operators.values() if each.bitwidth)
    least, most = widths[0], widths[-1]
    return f"{least} bits" if least == most else f"{least} to {most} bits"


def _hint(name: str) -> str:
    """Return what may be meant by a name that is no preset."""
    few = re.fullmatch(r"(?:u?int|w)([2-7])", name.lower())
    if few is None:
        return suggest(name, PRESETS)
    bits = few[1]
    return (
        f"for weights of {bits} bits: QuantConfig.int8().replace('W', bitwidth={bits})"
        f".replace('R', bitwidth={bits})"
    )


def _is_path(text: str) -> bool:
    """Return whether a text can only be meant as a path, so that a missing file is the error."""
    return text.endswith(".json") or os.path.basename(text) != text
