"""The exceptions of quant-gru: one base class, so that one `except` catches everything."""


class QuantGRUError(ValueError):
    """Base of every error that quant-gru raises about what it was given."""


class ConfigError(QuantGRUError):
    """A configuration, or a change to one, that breaks a rule; names file, operator and field."""


class CalibrationError(QuantGRUError):
    """Statistics that are missing, empty, non-finite or in the way of what was asked."""


class ParameterError(QuantGRUError):
    """A parameter file or checkpoint whose quantization cannot be used as it stands."""
