"""AIMET encodings of the GRUs of a model: written, and read back."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor

from quant_gru.calibration.tied import one_for_input_and_state
from quant_gru.config import WEIGHTS, QuantConfig
from quant_gru.config.files import name_of, read_json, write_files
from quant_gru.config.operators import suggest
from quant_gru.errors import (
    CalibrationError,
    ConfigError,
    ParameterError,
    QuantGRUError,
    QuantGRUWarning,
    caller_stacklevel,
)
from quant_gru.execution.layers import Weights
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.rounding import DEFAULT
from quant_gru.interchange.aimet import scales, versions
from quant_gru.interchange.aimet.entries import Entry
from quant_gru.interchange.aimet.moved import read_tensors, with_moved
from quant_gru.interchange.aimet.places import Place, onnx_places, torch_places
from quant_gru.interchange.foreign import onnx_node
from quant_gru.interchange.foreign.onnx_constants import Constants
from quant_gru.parameters import document as params

Nodes = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class Calibrated:
    """A GRU with scales, and its real weights.

    Attributes:
        parameters: Its shape, configuration and scales.
        weights: [layer][direction] -> W, R, bw, br.
    """

    parameters: params.Parameters
    weights: Sequence[Sequence[Weights]]


def write(
    grus: Mapping[str, Calibrated | None],
    path: str | os.PathLike[str],
    version: str,
    onnx: Any,
    nodes: Nodes | None,
) -> None:
    """Write the encodings of GRUs, and a parameter file of each one beside them.

    Args:
        grus: Name of the module -> GRU; None for one without scales, which is an error.
        path: The file of encodings.
        version: '0.6.1', '1.0.0' or '2.0.0', see `versions.check_version`.
        onnx: An ONNX model with the names of the tensors, or None for those of the parameters.
        nodes: Name of the module -> names of its GRU nodes, lowest layer first; None to find them.
    """
    entries: dict[str, Any] = {}
    left_out: list[str] = []
    model, where = (None, "") if onnx is None else onnx_node.load(onnx)
    folder, known = onnx_node.folder_of(onnx), _calibrated(grus)
    for name, places in _places(known, model, where, folder, nodes).items():
        gru = known[name]
        found, reasons = scales.entries_of(places, gru.parameters.cells, _by_name(gru.weights))
        left_out += reasons
        for entry in found:
            if entries.setdefault(entry.name, entry) != entry:
                left_out.append(f"{entry.name}: two GRUs use it with different scales")
    shared = {line.partition(":")[0] for line in left_out}
    kept = [entry for name, entry in entries.items() if name not in shared]
    if model is not None:
        read = read_tensors(model.graph)
        _warn_of_unread([entry.name for entry in kept if entry.name not in read])
        kept = [e for e in with_moved(kept, model.graph.node, shared) if e.name in read]
    parameters = {name: gru.parameters for name, gru in known.items()}
    documents = {
        name: params.to_document(each.shape, each.config, each.cells)
        for name, each in parameters.items()
    }
    _write(path, version, kept, documents, left_out)
    _warn_of_separate_scales({name: each.cells for name, each in parameters.items()})


def write_frozen(
    path: str | os.PathLike[str], version: str, plan: GRUPlan, document: dict[str, Any]
) -> None:
    """Write the encodings of a frozen GRU, and its parameter file beside them.

    Scales of weights are those that the multipliers of the plan contain. Biases have none, because
    a plan has them in units of the accumulator.

    Args:
        path: The file of encodings.
        version: '0.6.1', '1.0.0' or '2.0.0'.
        plan: The plan, on the CPU.
        document: The parameter document of the plan.
    """
    versions.check_version(version)
    found = params.from_document(document, "the frozen GRU")
    shape = found.shape
    cells = [
        [scales.with_plan_scales(q, cell) for q, cell in zip(*both, strict=True)]
        for both in zip(found.cells, plan.cells, strict=True)
    ]
    weights = [
        [{"weight.W": cell.weights.W, "weight.R": cell.weights.R} for cell in layer]
        for layer in plan.cells
    ]
    places = torch_places(shape.num_layers, shape.directions, bias=False)
    entries, left_out = scales.entries_of(places, cells, weights)
    _write(path, version, entries, {"": document}, left_out)
    _warn_of_separate_scales({"": cells})
    if shape.bias:
        warnings.warn(
            "Encodings of a frozen GRU have none for its biases, which are in units of its "
            "accumulators; QuantGRU.export_encodings writes all",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )


def _write(
    path: str | os.PathLike[str],
    version: str,
    entries: Sequence[Entry],
    documents: Mapping[str, dict[str, Any]],
    left_out: Sequence[str],
) -> None:
    """Write a file of encodings, and a parameter file for each module beside it."""
    for name, each in documents.items():
        _check_rounding(each["config"], name)
    texts: dict[str | os.PathLike[str], str] = {
        parameter_file(path, name): params.to_text(each) for name, each in documents.items()
    }
    encodings = json.dumps(versions.to_document(entries, version), indent=1) + "\n"
    write_files({**texts, path: encodings})
    if left_out:
        warnings.warn(
            f"Encodings of AIMET have no place for {'; '.join(left_out)}; the parameter file "
            f"beside {os.fspath(path)!r} has them",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )


def _check_rounding(config: dict[str, Any], name: str) -> None:
    """Raise for a configuration whose rounding encodings do not say."""
    read = QuantConfig.from_dict(config)
    rules = (read.rounding, read.border_rounding)
    if rules != (DEFAULT, DEFAULT):
        where = f" (module {name!r})" if name else ""
        raise QuantGRUError(
            f"Expected rounding and rounding_input to be {DEFAULT!r} for encodings of AIMET, whose "
            f"simulation rounds so, got {rules[0]!r} and {rules[1]!r}{where}"
        )


def _warn_of_separate_scales(grus: Mapping[str, scales.Cells]) -> None:
    """Warn of GRUs whose encodings AIMET overwrites: it ties X, initial_h, Y and Y_h of a node."""
    separate = [name for name, cells in grus.items() if not one_for_input_and_state(cells)]
    if separate:
        named = f" (modules {', '.join(map(repr, separate))})" if any(separate) else ""
        warnings.warn(
            "AIMET quantizes the input and the state of a GRU with one scale, but input.x and "
            "output.h have different ones: in its simulation one of them replaces the other"
            f"{named}; calibrate with tie_x_and_h=True in the configuration",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )


def _warn_of_unread(names: Sequence[str]) -> None:
    """Warn of outputs of GRU nodes that nothing reads.

    Some passes of AIMET remove such an output, and a file that names it is an error then. Otherwise
    it has the quantizer of the state, and AIMET switches off what a file does not name.
    """
    if names:
        warnings.warn(
            f"nothing reads {', '.join(names)}, which therefore have no encoding: AIMET would "
            "switch off the quantizer of the GRU's state with them; load the file with "
            "disable_missing_quantizers=False",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )


def parameter_file(path: str | os.PathLike[str], name: str) -> Path:
    """Return the path of the parameter file beside a file of encodings."""
    whole = Path(name_of(path))
    middle = f".{name}" if name else ""
    return whole.with_name(f"{whole.stem}{middle}.quant_params.json")


def read(
    grus: Mapping[str, Calibrated | None],
    path: str | os.PathLike[str],
    onnx: Any,
    nodes: Nodes | None,
) -> dict[str, params.Parameters]:
    """Return parameters with the scales of inputs, states, outputs and weights of a file.

    Args:
        grus: Name of the module -> GRU; None for one without scales, which is an error.
        path: The file of encodings.
        onnx: As for `write`.
        nodes: As for `write`.
    """
    where = f"file {name_of(path)!r}"
    try:
        found = versions.from_document(read_json(path), where)
    except ConfigError as error:
        raise ParameterError(str(error)) from None
    known = _calibrated(grus)
    model, model_where = (None, "") if onnx is None else onnx_node.load(onnx)
    folder = onnx_node.folder_of(onnx)
    if model is not None:  # AIMET has one quantizer for values before and after a Transpose
        entries = [entry for entry in found.values() if isinstance(entry, Entry)]
        moved = with_moved(entries, model.graph.node, found.keys())
        found |= {entry.name: entry for entry in moved}
    places = _places(known, model, model_where, folder, nodes)
    read = {name: _replaced(known[name], each, found, where) for name, each in places.items()}
    others = set() if model is None else read_tensors(model.graph)
    _warn_of_near_names([p.name for each in places.values() for p in each], found, others, where)
    _warn_of_untied({name: each for name, each in read.items() if each.config.tie_x_and_h}, where)
    return read


def _warn_of_near_names(
    names: Sequence[str], found: Mapping[str, Any], others: Set[str], where: str
) -> None:
    """Warn of tensors without an encoding where the file has one of nearly the same name.

    Args:
        names: Tensors of the GRUs.
        found: The encodings by names.
        others: Other tensors of the model.
        where: Name of the source.
    """
    unused = [name for name in found if name not in names and name not in others]
    near = {
        name: close[0]
        for name in names
        if name not in found and (close := get_close_matches(name, unused, 1, 0.85))
    }
    if near:
        shown = ", ".join(f"{name!r} (it has {other!r})" for name, other in near.items())
        warnings.warn(
            f"Expected an encoding of {shown}, got none: the scales of these tensors are kept "
            f"({where})",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )


def _warn_of_untied(grus: Mapping[str, params.Parameters], where: str) -> None:
    """Warn of GRUs that are to have one scale for input and state, and have got different ones."""
    for name, each in grus.items():
        if not one_for_input_and_state(each.cells):
            named = f"module {name!r}, {where}" if name else where
            warnings.warn(f"{params.UNTIED} ({named})", QuantGRUWarning, caller_stacklevel())


def _calibrated(grus: Mapping[str, Calibrated | None]) -> dict[str, Calibrated]:
    found: dict[str, Calibrated] = {}
    for name, gru in grus.items():
        if gru is None:
            raise CalibrationError(
                f"Expected a calibrated GRU, got one without scales ({name or 'the model'!r}): "
                "encodings have no scales of its inner operators; call load_quant_params with the "
                "parameter file beside them, or calibrate"
            )
        found[name] = gru
    return found


def _replaced(
    gru: Calibrated, places: Sequence[Place], found: Mapping[str, Any], where: str
) -> params.Parameters:
    before, weights = gru.parameters, _by_name(gru.weights)
    cells = [list(layer) for layer in before.cells]
    named = [place for place in places if place.name in found]
    if not named:
        first = places[0].name
        raise ParameterError(
            f"Expected an encoding of one of the GRU's tensors, such as {first!r}, got none; "
            f"{suggest(first, found)} ({where})"
        )
    for place in named:
        entry = found[place.name]
        try:
            if isinstance(entry, str):
                raise QuantGRUError(
                    f"Expected an integer encoding of a whole tensor or of channels, got {entry}"
                )
            for d in place.directions:
                cells[place.layer][d] = scales.with_entry(
                    cells[place.layer][d], place, entry, weights[place.layer][d]
                )
        except QuantGRUError as error:
            raise ParameterError(f"{error} (tensor {place.name!r}, {where})") from None
    configs = {cell.config.without_comments() for layer in cells for cell in layer}
    # one configuration for all cells is that of the module
    config = cells[0][0].config if len(configs) == 1 else before.config
    return params.Parameters(before.shape, config, cells)


def _by_name(weights: Sequence[Sequence[Weights]]) -> list[list[dict[str, Tensor]]]:
    """Return [layer][direction] -> operator -> tensor, zeros for absent biases."""

    def entries(cell: Weights) -> Iterator[tuple[str, Tensor]]:
        for name, w in zip(WEIGHTS, cell, strict=True):
            yield name, cell[0].new_zeros(len(cell[0])) if w is None else w.detach()

    return [[dict(entries(cell)) for cell in layer] for layer in weights]


def _places(
    grus: Mapping[str, Calibrated],
    model: Any,
    where: str,
    folder: str | None,
    nodes: Nodes | None,
) -> dict[str, list[Place]]:
    """Return the tensors of every GRU, by the names of an ONNX model or, without one, of torch."""
    if model is None:
        if nodes is not None:
            raise QuantGRUError(f"Expected nodes only beside an ONNX model, got {nodes!r}")
        shapes = {name: gru.parameters.shape for name, gru in grus.items()}
        return {
            name: torch_places(s.num_layers, s.directions, s.bias, f"{name}." if name else "")
            for name, s in shapes.items()
        }
    constants = Constants(model, folder)
    free = list(onnx_node.gru_nodes(model, where))
    found = {}
    for name, gru in grus.items():
        layers, directions = len(gru.weights), len(gru.weights[0])
        if nodes is None:
            chosen = [
                _node_of(layer, index, name, free, constants, where)
                for index, layer in enumerate(gru.weights)
            ]
        else:
            if name not in nodes:
                raise QuantGRUError(f"Expected the nodes of module {name!r}, got none")
            chosen = onnx_node.chosen_nodes(model, nodes[name], where)
        if len(chosen) != layers:
            raise QuantGRUError(
                f"Expected {layers} GRU node(s), one per layer, got {len(chosen)} ({where})"
            )
        found[name] = onnx_places(chosen, directions, constants)
    return found


def _node_of(
    layer: Sequence[Weights],
    index: int,
    name: str,
    free: list[Any],
    constants: Constants,
    where: str,
) -> Any:
    """Take the node with the weights of a layer, which may be rounded in the file, from `free`."""
    best, least = None, 0.5
    for node in free:
        try:
            cells = onnx_node.read_node(node, constants, False, where).cells[0]
        except QuantGRUError:
            continue
        error = _difference(layer, cells)
        if error < least:
            best, least = node, error
    if best is None:
        raise QuantGRUError(
            f"Expected a GRU node with the weights of layer {index} of {name or 'the GRU'!r}, got "
            f"none; name its nodes ({where})"
        )
    free.remove(best)
    return best


def _difference(layer: Sequence[Weights], cells: Sequence[Any]) -> float:
    """Return the largest relative difference of weights; infinity if the shapes differ."""
    if len(layer) != len(cells):
        return float("inf")
    worst = 0.0
    for (W, R, _, _), cell in zip(layer, cells, strict=True):
        for w, other in ((W, cell.W), (R, cell.R)):
            w = w.detach().cpu().float()
            if w.shape != other.shape:
                return float("inf")
            worst = max(worst, float((w - other).norm() / w.norm().clamp(min=1e-30)))
    return worst
