"""What autograd keeps for backward: which tensors are compressed, and how they are kept."""

from actnn.saving.context import Saving
from actnn.saving.records import Choice, Record, TensorInfo

__all__ = ["Choice", "Record", "Saving", "TensorInfo"]
