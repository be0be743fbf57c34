"""Modules: `QuantGRU`, `FrozenQuantGRU`, `CustomGRU`, and the state of their quantization."""
