"""The demo: a real task from float training to an integer GRU, with its costs."""

from quant_gru.demo.errors import DataError
from quant_gru.demo.model import SequenceClassifier

__all__ = ["DataError", "SequenceClassifier"]
