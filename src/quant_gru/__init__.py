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
from quant_gru.conversion.convert import calibrate_model, convert_model
from quant_gru.conversion.onnx import export_onnx, export_step_onnx, onnx_translations
from quant_gru.modules.custom_gru import CustomGRU
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU, float_state_dict

__version__ = "0.1.0"

__all__ = [
    "CalibrationError",
    "ConfigError",
    "CustomGRU",
    "FrozenQuantGRU",
    "OperatorConfig",
    "ParameterError",
    "QuantConfig",
    "QuantGRU",
    "QuantGRUError",
    "QuantGRUWarning",
    "__version__",
    "calibrate_model",
    "convert_model",
    "default_config_path",
    "export_onnx",
    "export_step_onnx",
    "float_state_dict",
    "onnx_translations",
    "operator_gain",
    "operator_sqnr",
]
