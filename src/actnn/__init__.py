"""Training of any PyTorch model in less memory: what autograd keeps is compressed.

Public names are imported at their first use, so that `import actnn` does not import torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from actnn._errors import ActNNError, ActNNWarning

if TYPE_CHECKING:
    from actnn.allocation.greedy import calc_precision
    from actnn.layers.chunks import in_chunks
    from actnn.layers.compress import compress, compressed, uncompress
    from actnn.notes import ops
    from actnn.notes.config import config
    from actnn.notes.data import DataLoader
    from actnn.notes.levels import set_optimization_level
    from actnn.notes.memory import compute_tensor_bytes, get_memory_usage
    from actnn.notes.qmodule import QModule
    from actnn.notes.schemes import QBNScheme, QScheme
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
    "DataLoader": "notes.data",
    "Estimate": "planning.estimate",
    "Plan": "planning.plan",
    "QBNScheme": "notes.schemes",
    "QModule": "notes.qmodule",
    "QScheme": "notes.schemes",
    "Record": "saving.records",
    "Report": "planning.report",
    "Saving": "saving.context",
    "TensorInfo": "saving.records",
    "calc_precision": "allocation.greedy",
    "compress": "layers.compress",
    "compressed": "layers.compress",
    "compute_tensor_bytes": "notes.memory",
    "config": "notes.config",
    "estimate": "planning.estimate",
    "fit": "planning.fit",
    "get_memory_usage": "notes.memory",
    "in_chunks": "layers.chunks",
    "report": "planning.report",
    "set_optimization_level": "notes.levels",
    "uncompress": "layers.compress",
}


def __getattr__(name: str) -> Any:
    """Import a public name or a subpackage (PEP 562)."""
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name == "ops":
        return import_module(f"{__name__}.notes.ops")
    if name[:1].isalpha() and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
