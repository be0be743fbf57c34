"""The import that code written for CustomGRU uses: `from custom_gru import CustomGRU`."""

from quant_gru import CustomGRU

__all__ = ["CustomGRU"]
