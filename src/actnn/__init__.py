"""Training of any PyTorch model in less memory: what autograd keeps is compressed.

Public names are imported at their first use, so that `import actnn` does not import torch.
"""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from actnn.errors import ActNNError, ActNNWarning

if TYPE_CHECKING:
    from actnn.actnn_interface import ops
    from actnn.actnn_interface.config import config
    from actnn.actnn_interface.data import DataLoader
    from actnn.actnn_interface.levels import set_optimization_level
    from actnn.actnn_interface.memory import compute_tensor_bytes, get_memory_usage
    from actnn.actnn_interface.qmodule import QModule
    from actnn.actnn_interface.schemes import QBNScheme, QScheme
    from actnn.allocation.greedy import calc_precision
    from actnn.layers.chunks import in_chunks
    from actnn.layers.compress import compress, compressed, uncompress
    from actnn.planning.estimate import Estimate, estimate
    from actnn.planning.fit import fit
    from actnn.planning.plan import Plan
    from actnn.planning.report import Report, report
    from actnn.saving.context import Saving
    from actnn.saving.records import Choice, Record, TensorInfo

__all__ = [
    "ActNNError",
    "ActNNWarning",
    "Choice",
    "DataLoader",
    "Estimate",
    "Plan",
    "QBNScheme",
    "QModule",
    "QScheme",
    "Record",
    "Report",
    "Saving",
    "TensorInfo",
    "calc_precision",
    "compress",
    "compressed",
    "compute_tensor_bytes",
    "config",
    "estimate",
    "fit",
    "get_memory_usage",
    "in_chunks",
    "ops",
    "report",
    "set_optimization_level",
    "uncompress",
]

# The module of each public name that is imported at its first use.
_HOMES = {
    "Choice": "saving.records",
    "DataLoader": "actnn_interface.data",
    "Estimate": "planning.estimate",
    "Plan": "planning.plan",
    "QBNScheme": "actnn_interface.schemes",
    "QModule": "actnn_interface.qmodule",
    "QScheme": "actnn_interface.schemes",
    "Record": "saving.records",
    "Report": "planning.report",
    "Saving": "saving.context",
    "TensorInfo": "saving.records",
    "calc_precision": "allocation.greedy",
    "compress": "layers.compress",
    "compressed": "layers.compress",
    "compute_tensor_bytes": "actnn_interface.memory",
    "config": "actnn_interface.config",
    "estimate": "planning.estimate",
    "fit": "planning.fit",
    "get_memory_usage": "actnn_interface.memory",
    "in_chunks": "layers.chunks",
    "report": "planning.report",
    "set_optimization_level": "actnn_interface.levels",
    "uncompress": "layers.compress",
}


def __getattr__(name: str) -> Any:
    """Import a public name or a subpackage (PEP 562)."""
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name == "ops":
        return import_module(f"{__name__}.actnn_interface.ops")
    if name[:1].isalpha() and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


logging.getLogger(__name__).addHandler(logging.NullHandler())
