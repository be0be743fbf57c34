"""A drop-in torch.nn.GRU that computes only in integers, with equal results on every executor."""

from quant_gru._errors import CalibrationError, ConfigError, ParameterError, QuantGRUError
from quant_gru.analysis.operator_gain import operator_gain
from quant_gru.analysis.operator_sqnr import operator_sqnr
from quant_gru.config import (
    OperatorConfig,
    QuantConfig,
    QuantGRUWarning,
    default_config_path,
)
from quant_gru.conversion.calibrate import calibrate_model
from quant_gru.conversion.convert import convert_model
from quant_gru.conversion.frozen_models import freeze_model, load_frozen
from quant_gru.conversion.parameter_files import export_model_params, load_model_params
from quant_gru.modules.cell import FrozenQuantGRUCell, QuantGRUCell
from quant_gru.modules.custom_gru import CustomGRU
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU, float_state_dict

__version__ = "0.1.0"

__all__ = [
    "CalibrationError",
    "ConfigError",
    "CustomGRU",
    "FrozenQuantGRU",
    "FrozenQuantGRUCell",
    "OperatorConfig",
    "ParameterError",
    "QuantConfig",
    "QuantGRU",
    "QuantGRUCell",
    "QuantGRUError",
    "QuantGRUWarning",
    "__version__",
    "calibrate_model",
    "convert_model",
    "default_config_path",
    "export_model_params",
    "float_state_dict",
    "freeze_model",
    "load_frozen",
    "load_model_params",
    "operator_gain",
    "operator_sqnr",
]
