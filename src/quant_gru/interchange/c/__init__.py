"""C99 source of a quantized GRU, for microcontrollers and anything else with a C compiler."""

from quant_gru.interchange.c.export import CSource, export_c

__all__ = ["CSource", "export_c"]
