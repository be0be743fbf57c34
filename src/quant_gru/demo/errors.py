"""Errors in the demo's input and output."""

from quant_gru.errors import QuantGRUError


class DataError(QuantGRUError):
    """The demo cannot use a data file, a recording or an output folder; the message names it."""
