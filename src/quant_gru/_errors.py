"""The exceptions of quant-gru, with one base class so that one `except` catches all of them."""


class QuantGRUError(ValueError):
    """Base class of all errors of quant-gru about its inputs."""


class ConfigError(QuantGRUError):
    """A configuration or a change of it breaks a rule; names file, operator and field."""


class CalibrationError(QuantGRUError):
    """Statistics are missing, empty or non-finite, or prevent the requested change."""


class ParameterError(QuantGRUError):
    """A parameter file or checkpoint has unusable quantization data."""
