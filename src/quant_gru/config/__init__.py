"""Configuration of a quantized GRU and its operators."""

from quant_gru.config.operators import (
    ACTIVATIONS,
    CALIBRATED,
    FIXED_RANGE,
    FUSIBLE,
    OPERATORS,
    WEIGHTS,
    canonical_name,
)
from quant_gru.config.schema import OperatorConfig, QuantConfig, default_config_path
from quant_gru.errors import QuantGRUWarning

__all__ = [
    "ACTIVATIONS",
    "CALIBRATED",
    "FIXED_RANGE",
    "FUSIBLE",
    "OPERATORS",
    "WEIGHTS",
    "OperatorConfig",
    "QuantConfig",
    "QuantGRUWarning",
    "canonical_name",
    "default_config_path",
]
