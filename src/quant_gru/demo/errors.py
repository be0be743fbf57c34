"""What can be wrong with the demo's input and output."""

from quant_gru._errors import QuantGRUError


class DataError(QuantGRUError):
    """A data file, a recording or an output folder that the demo cannot use; says which."""
