"""The configuration of each GRU of a model: one for all, or chosen by module name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from quant_gru.config import QuantConfig
from quant_gru.config.choice import OneConfig, as_config
from quant_gru.errors import ConfigError

ModelConfig: TypeAlias = (
    OneConfig | Mapping[str, OneConfig | None] | Callable[[str], OneConfig | None] | None
)


class Selection:
    """Selects a configuration for each module by its names.

    Args:
        config: As for `convert_model`.

    Raises:
        ConfigError: A configuration is of an unknown type or name, or cannot be read.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.by_name = False
        self._choose: Callable[[str], OneConfig | None] | None = None
        self._by_key: dict[str, QuantConfig | None] = {}
        self._all = QuantConfig()
        if config is None:
            return
        if isinstance(config, Mapping) and "GRU_config" not in config:
            self.by_name = True
            self._by_key = {_checked_key(key): _one(each) for key, each in config.items()}
        elif isinstance(config, Mapping):
            self._all = QuantConfig.from_dict(dict(config))
        elif callable(config):
            self.by_name, self._choose = True, config
        else:
            found = _one(config)
            assert found is not None
            self._all = found

    def check(self, modules: Iterable[Iterable[str]]) -> None:
        """Raise unless every key matches a module.

        Args:
            modules: The names of each module that a key may match.
        """
        names = [name for module in modules for name in module]
        for key in self._by_key:
            if not any(_matches(name, key) for name in names):
                raise ConfigError(
                    f"Expected every key of config to match a GRU, got {key!r}; the model has "
                    f"{', '.join(map(repr, names)) or 'none'}"
                )

    def leaves(self, module: Iterable[str]) -> bool:
        """Return whether a module that is no GRU is named by a key, to be left as it is."""
        names = list(module)
        named = any(_matches(name, key) for name in names for key in self._by_key)
        return named and self.of(names) is None

    def of(self, module: Iterable[str]) -> QuantConfig | None:
        """Return the configuration of a GRU; None to leave it as it is.

        An exact name comes before a pattern; of several patterns the first one decides.

        Args:
            module: All names of the GRU. A module that is used twice has two.

        Raises:
            ConfigError: No key matches, or the function returns an unknown configuration.
        """
        names = list(module)
        if self._choose is not None:
            return _one(self._choose(names[0]))
        if not self.by_name:
            return self._all
        for name in names:
            if name in self._by_key:
                return self._by_key[name]
        for key, config in self._by_key.items():
            if any(_matches(name, key) for name in names):
                return config
        raise ConfigError(
            f"Expected config to have a key for every GRU, got none for {names[0]!r}; "
            'end it with "*": None to leave the others as they are, or with "*": QuantConfig()'
        )


def _matches(name: str, key: str) -> bool:
    return name == key or fnmatchcase(name, key)


def _checked_key(key: object) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"Expected keys of config to be module names or patterns, got {key!r}")
    return key


def _one(config: Any) -> QuantConfig | None:
    """Return the configuration that a value stands for; None to leave a GRU as it is."""
    return None if config is None else as_config(config)
