"""A drop-in torch.nn.GRU that computes only in integers, with equal results on every executor.

Public names are imported at their first use, so that `import quant_gru` does not import torch.
"""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quant_gru.errors import CalibrationError, ConfigError, ParameterError, QuantGRUError
from quant_gru.torch_ops.on_import import register_with_torch

if TYPE_CHECKING:
    from quant_gru.analysis.allocation import allocate_bits
    from quant_gru.analysis.compare import compare
    from quant_gru.analysis.operator_gain import operator_gain
    from quant_gru.analysis.operator_sqnr import operator_sqnr
    from quant_gru.analysis.report import report
    from quant_gru.analysis.sensitivity import sensitivity
    from quant_gru.config import OperatorConfig, QuantConfig, QuantGRUWarning, default_config_path
    from quant_gru.interchange.onnx.operator import onnx_operator_library
    from quant_gru.model_files.quantize_keras import quantize_keras
    from quant_gru.model_files.quantize_onnx import quantize_onnx
    from quant_gru.modules.cell import FrozenQuantGRUCell, QuantGRUCell
    from quant_gru.modules.custom_gru import CustomGRU
    from quant_gru.modules.frozen import FrozenQuantGRU
    from quant_gru.modules.gru import QuantGRU, float_state_dict
    from quant_gru.modules.stream import Stream
    from quant_gru.whole_models.calibrate import calibrate_model
    from quant_gru.whole_models.convert import convert_model, find_grus
    from quant_gru.whole_models.encodings import export_encodings, load_encodings
    from quant_gru.whole_models.frozen_models import freeze_model, load_frozen
    from quant_gru.whole_models.onnx import export_onnx, export_step_onnx, onnx_translations
    from quant_gru.whole_models.parameter_files import export_model_params, load_model_params


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
    "Stream",
    "__version__",
    "allocate_bits",
    "calibrate_model",
    "compare",
    "convert_model",
    "default_config_path",
    "export_encodings",
    "export_model_params",
    "export_onnx",
    "export_step_onnx",
    "find_grus",
    "float_state_dict",
    "freeze_model",
    "load_encodings",
    "load_frozen",
    "load_model_params",
    "onnx_operator_library",
    "onnx_translations",
    "operator_gain",
    "operator_sqnr",
    "quantize_keras",
    "quantize_onnx",
    "report",
    "sensitivity",
]

# The module of each public name that is imported at its first use.
_HOMES = {
    "CustomGRU": "modules.custom_gru",
    "FrozenQuantGRU": "modules.frozen",
    "FrozenQuantGRUCell": "modules.cell",
    "OperatorConfig": "config",
    "QuantConfig": "config",
    "QuantGRU": "modules.gru",
    "QuantGRUCell": "modules.cell",
    "QuantGRUWarning": "config",
    "Stream": "modules.stream",
    "allocate_bits": "analysis.allocation",
    "calibrate_model": "whole_models.calibrate",
    "compare": "analysis.compare",
    "convert_model": "whole_models.convert",
    "default_config_path": "config",
    "export_encodings": "whole_models.encodings",
    "export_model_params": "whole_models.parameter_files",
    "export_onnx": "whole_models.onnx",
    "export_step_onnx": "whole_models.onnx",
    "find_grus": "whole_models.convert",
    "float_state_dict": "modules.gru",
    "freeze_model": "whole_models.frozen_models",
    "load_encodings": "whole_models.encodings",
    "load_frozen": "whole_models.frozen_models",
    "load_model_params": "whole_models.parameter_files",
    "onnx_operator_library": "interchange.onnx.operator",
    "onnx_translations": "whole_models.onnx",
    "operator_gain": "analysis.operator_gain",
    "operator_sqnr": "analysis.operator_sqnr",
    "quantize_keras": "model_files.quantize_keras",
    "quantize_onnx": "model_files.quantize_onnx",
    "report": "analysis.report",
    "sensitivity": "analysis.sensitivity",
}


def __getattr__(name: str) -> Any:
    """Import a public name or a subpackage (PEP 562)."""
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name[:1].isalpha() and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


logging.getLogger(__name__).addHandler(logging.NullHandler())
register_with_torch()
