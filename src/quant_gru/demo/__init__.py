"""The demo: one real task from float training to an integer GRU, and what it costs."""

from quant_gru.demo.errors import DataError
from quant_gru.demo.model import SequenceClassifier

__all__ = ["DataError", "SequenceClassifier"]
