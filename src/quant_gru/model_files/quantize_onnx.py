"""ONNX models whose GRU nodes are calibrated, replaced by integers and checked, all in one call."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quant_gru.analysis.operator_gain import OperatorGain, operator_gain
from quant_gru.calibration.batches import with_progress
from quant_gru.config.files import write_bytes
from quant_gru.errors import QuantGRUError, QuantGRUWarning, caller_stacklevel
from quant_gru.interchange.c.export import CSource
from quant_gru.interchange.foreign import onnx_node
from quant_gru.interchange.onnx.builder import OPSETS, ir_version, onnx_ir
from quant_gru.interchange.onnx.in_place import replace_grus
from quant_gru.interchange.onnx.notes import write_notes
from quant_gru.interchange.onnx.profiles import EXACT, check_profile
from quant_gru.interchange.onnx.verify import (
    Difference,
    difference,
    expect_none,
    run_session,
    session_of,
)
from quant_gru.model_files.calibration import calibrate_all
from quant_gru.model_files.feeds import Feed, feeds_of, split
from quant_gru.model_files.gru_nodes import gru_forms, raised
from quant_gru.model_files.report import NodeReport, OnnxReport, decibels_of
from quant_gru.model_files.segments import (
    NodeForm,
    OnnxModel,
    inputs_of,
    module_name,
    run_node,
)
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.encodings import export_encodings
from quant_gru.whole_models.graph_calls import with_outputs
from quant_gru.whole_models.selection import ModelConfig, Selection

_SAME = 100.0  # dB: rounding in float32 layers
_DOUBLE = 11  # onnx.TensorProto.DOUBLE


@dataclass
class QuantizedOnnx:
    """An ONNX model with its GRUs in integers; `print(q.report)` says what was gained.

    Attributes:
        proto: The file, an `onnx.ModelProto`.
        grus: Name of a GRU node -> its QuantGRU; nodes with the same weights share one.
        model: The file as a module: feed -> outputs, with the GRUs as submodules. It works with
            `calibrate_model` and `operator_gain`.
        report: Codes, decibels, bytes and times.
    """

    proto: Any
    grus: dict[str, QuantGRU]
    model: OnnxModel
    report: OnnxReport
    _float: Any
    _held: list[Feed]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; an existing one is replaced.

        Args:
            path: Where to write.

        Raises:
            QuantGRUError: It cannot be written.
        """
        write_bytes(path, self.proto.SerializeToString())

    def freeze(self) -> dict[str, FrozenQuantGRU]:
        """Return the integer plan of each GRU node, by name."""
        return {name: gru.freeze() for name, gru in self.grus.items()}

    def export_c(self, directory: str | os.PathLike[str], *, steps: int = 8) -> dict[str, CSource]:
        """Write each GRU as C99 source into a folder of its own.

        Args:
            directory: The folder above them; a GRU's folder and C names are made of its node's.
            steps: Steps of the self-test, as for `FrozenQuantGRU.export_c`.

        Returns:
            Name of the node -> what was written.
        """
        found = {}
        for name, gru in self.freeze().items():
            word = identifier(name)
            found[name] = gru.export_c(os.path.join(directory, word), word, steps=steps)
        return found

    def export_encodings(self, path: str | os.PathLike[str], version: str = "1.0.0") -> None:
        """Write AIMET encodings with the names of the float file's tensors.

        Args:
            path: The file of encodings; each GRU has a parameter file beside it.
            version: '0.6.1', '1.0.0' or '2.0.0'.
        """
        nodes = {module_name(name): name for name in self.grus}
        export_encodings(self.model, path, version, onnx=self._float, nodes=nodes)

    def operator_gain(self, feeds: Any = None, bits: int = 16, **options: Any) -> OperatorGain:
        """Change the width of each operator of each GRU and measure the outputs of the whole file.

        Args:
            feeds: As for `quantize_onnx`; None for the feeds that were held out.
            bits: The tested width.
            **options: As for `quant_gru.operator_gain`.

        Returns:
            All changes and their effects, as `quant_gru.operator_gain` returns them.
        """
        chosen = self._held if feeds is None else list(feeds_of(feeds, self._float))
        return operator_gain(self.model, chosen, bits, forward_fn=_run_feed, **options)


def quantize_onnx(
    source: Any,
    feeds: Any,
    config: ModelConfig = None,
    profile: str = "integer",
    output: str | os.PathLike[str] | None = None,
    *,
    test_feeds: Any = None,
    on_error: str = "raise",
    refine: bool = False,
    progress: bool = True,
) -> QuantizedOnnx:
    """Put every GRU of an ONNX model into integers, and check the result.

    GRU nodes of the main graph are found (opset 9 or later, both layouts, all directions, with
    `sequence_lens` and `initial_h` from anywhere in the graph), calibrated with what reaches them
    from `feeds`, and replaced. Other nodes, names, metadata and dynamic sizes stay; the opset is
    raised to 17 if it is lower. Functions of the model are inlined.

    Args:
        source: The path of an .onnx file, or an `onnx.ModelProto`.
        feeds: Real inputs: a dict, name of an input -> array; an iterable of such dicts; or the
            path of an .npz file with an array for each input, or with several feeds stacked along a
            further first axis. One feed is in memory at a time. Every fifth one, at most 16, is
            held out for the report, unless `test_feeds` are given.
        config: A QuantConfig, the name of a preset, or a path, for all nodes; a dict of these by
            node name or glob pattern, with None for a node that stays float; None for the default.
        profile: 'integer' or 'operator' (equal to the plan), 'qdq', 'float' or 'node'; see
            docs/onnx.md.
        output: Where to write the file; None to write nothing.
        test_feeds: Feeds for the report alone, as `feeds`.
        on_error: 'raise', or 'keep': a node that cannot be quantized stays float, with a warning.
        refine: As for `QuantGRU.finalize_calibration`.
        progress: Whether to show progress bars (only on a terminal).

    Returns:
        The file in integers, its GRUs, and a report.

    Raises:
        QuantGRUError: The file has no GRU node in its main graph, a node cannot be quantized (it
            is named), or ONNX Runtime refuses the model. Nothing is written then.
        CalibrationError: There are no feeds, or they reach a GRU with NaN or infinity.
        ConfigError: A configuration is invalid, or a key matches no node.

    Example:
        >>> q = quantize_onnx("denoiser.onnx", feeds, "int8_wide", output="denoiser_int8.onnx")
        >>> list(q.grus)
        ['/encoder/GRU']
    """
    check_profile(profile)
    if on_error not in ("raise", "keep"):
        raise QuantGRUError(f"Expected on_error to be 'raise' or 'keep', got {on_error!r}")
    onnx_ir()
    given, where, size = _loaded(source)
    proto, notes = raised(given, where)
    is_raised = bool(notes)
    forms, kept = gru_forms(proto, where, on_error)
    forms, grus = _grus(proto, forms, kept, config, where, on_error)
    model = OnnxModel(proto, forms, grus)
    held = list(feeds_of(test_feeds, given)) if test_feeds is not None else []
    chosen = feeds_of(feeds, given)
    calibrating = chosen if test_feeds is not None else split(chosen, held)
    first = calibrate_all(grus, model, calibrating, refine, progress, "node", "feed")
    if not held:
        held.append(first)
        notes.append("decibels are those of a feed that calibration saw: give more, or test_feeds")
    (written, reached), reference = _written(proto, forms, grus, profile), given
    if any(form.batch_first or form.element_type == _DOUBLE for form in forms):
        # ONNX Runtime has no such GRU
        reference, _ = _written(proto, forms, grus, "float")
        notes.append("compared with the float model in float32 and layout 0")
    elif is_raised:
        _expect_same(given, proto, held[0], where)
    report = _checked(reference, size, written, reached, model, grus, held, profile, progress)
    report.kept.update(kept)
    report.notes.extend(notes)
    if output is not None:
        write_bytes(output, written.SerializeToString())
    return QuantizedOnnx(written, grus, model, report, given, held)


def _run_feed(model: torch.nn.Module, feed: Feed) -> Any:
    return model(feed)


def _loaded(source: Any) -> tuple[Any, str, int]:
    """Return a model with all its values, its name in errors, and its bytes."""
    import onnx

    proto, where = onnx_node.load(source)
    folder = onnx_node.folder_of(source)
    if folder is not None:
        try:
            onnx.load_external_data_for_model(proto, folder)
        except Exception as error:  # onnx and the file system raise what they like
            raise QuantGRUError(
                f"Expected the files beside the model, got {type(error).__name__}: "
                f"{str(error)[:200]} ({where})"
            ) from None
    return proto, where, proto.ByteSize()


def _grus(
    proto: Any,
    forms: Sequence[NodeForm],
    kept: dict[str, str],
    config: ModelConfig,
    where: str,
    on_error: str,
) -> tuple[list[NodeForm], dict[str, QuantGRU]]:
    """Return the nodes to quantize, and a module for each; nodes with the same weights share it."""
    selection = Selection(config)
    selection.check([form.name] for form in forms)
    found: dict[str, QuantGRU] = {}
    by_weights: dict[Any, QuantGRU] = {}
    chosen = []
    for form in forms:
        own = selection.of([form.name])
        if own is None:
            kept[form.name] = "config has None for it"
            continue
        key = (form.weights, str(own.to_dict()))
        if key not in by_weights:
            try:
                with warnings.catch_warnings():
                    # states are part of the graph here
                    warnings.filterwarnings("ignore", "initial_h is", QuantGRUWarning)
                    by_weights[key] = QuantGRU.from_onnx(
                        proto, form.y or form.h_n, reverse=True, config=own
                    ).eval()
            except QuantGRUError as error:
                if on_error == "raise":
                    raise
                kept[form.name] = str(error)
                _warn(f"node {form.name!r} stays float: {error}")
                continue
        found[form.name] = by_weights[key]
        chosen.append(form)
    if not chosen:
        raise QuantGRUError(
            "Expected a GRU node to quantize, got none: "
            + "; ".join(f"{name!r}: {why}" for name, why in kept.items())
            + f" ({where})"
        )
    return chosen, found


def _written(
    proto: Any, forms: Sequence[NodeForm], grus: Mapping[str, QuantGRU], profile: str
) -> tuple[Any, dict[str, tuple[str, str]]]:
    """Return the file with its GRU nodes replaced, and by node what reaches its GRU in float32."""
    ir = onnx_ir()
    model = ir.from_proto(proto)
    opset = max(model.graph.opset_imports[""], OPSETS[0])
    keys = {form.makes[0]: form for form in forms}
    reached = replace_grus(
        model,
        {key: grus[form.name]._source() for key, form in keys.items()},
        profile,
        opset,
        {key: (form.element_type, form.shape) for key, form in keys.items()},
    )
    model.ir_version = max(model.ir_version, ir_version(opset))
    write_notes(model, profile, {form.name: grus[form.name]._source() for form in forms})
    return ir.to_proto(model), {form.name: reached[key] for key, form in keys.items()}


def _expect_same(given: Any, raised: Any, feed: Feed, where: str) -> None:
    """Raise if a model whose opset was raised computes something else in float."""
    names = [each.name for each in given.graph.output]
    before, after = (
        run_session(session_of(each.SerializeToString()), names, feed) for each in (given, raised)
    )
    for name in names:
        if decibels_of([before[name]], [after[name]]) < _SAME:
            raise QuantGRUError(
                f"Expected the same output {name!r} after the opset was raised, got another; "
                f"raise it with the tool that wrote the file ({where})"
            )


def _checked(
    reference: Any,
    size: int,
    written: Any,
    reached: Mapping[str, tuple[str, str]],
    model: OnnxModel,
    grus: Mapping[str, QuantGRU],
    feeds: Sequence[Feed],
    profile: str,
    progress: bool,
) -> OnnxReport:
    """Compare the file with its GRUs' plans and with the float file, on feeds held out."""
    forms = model.forms
    made = {name for form in forms for name in (form.lengths, *form.makes)}
    made |= {name for names in reached.values() for name in names}
    watched = session_of(with_outputs(written, made).SerializeToString())
    own, plain = (session_of(each.SerializeToString()) for each in (written, reference))
    names = [each.name for each in reference.graph.output]
    every, stored = [each.name for each in watched.get_outputs()], _stored(written, made)
    codes: dict[str, Difference] = {}
    wanted, found = [], []
    for feed in with_progress(feeds, "comparing", progress):
        values = {**stored, **feed, **run_session(watched, every, feed)}
        for form in forms:
            x, h0 = reached[form.name]
            seen = form._replace(x=x, h0=h0)
            for what, each in compare_node(seen, grus[form.name], values).items():
                key = f"{form.name}.{what}"
                codes[key] = codes[key] + each if key in codes else each
        wanted.append(run_session(plain, names, feed))
        found.append(run_session(own, names, feed))
    if profile in EXACT:
        expect_none(codes)
    local = _local(model, grus, feeds)
    nodes = {
        form.name: NodeReport(
            {
                what: codes[key]
                for what in ("output", "h_n")
                if (key := f"{form.name}.{what}") in codes
            },
            local[form.name],
            _text_of(grus[form.name]),
        )
        for form in forms
    }
    outputs = {
        name: decibels_of([each[name] for each in wanted], [each[name] for each in found])
        for name in names
    }
    seconds = tuple(_seconds(session, names, feeds[0]) for session in (plain, own))
    sizes = (size, written.ByteSize())
    return OnnxReport(nodes, outputs, sizes, seconds, len(feeds), {}, [])


def compare_node(form: NodeForm, gru: QuantGRU, values: Mapping[str, Any]) -> dict[str, Difference]:
    """Compare the outputs of a node of a file with its GRU, on what reaches it in the file."""
    scales = torch.tensor(
        [cell.h.scale for cell in gru._source().plan.cells[0]],  # type: ignore[union-attr]
        dtype=torch.float64,
    )
    # directions come before rows and units, or right before units
    last = scales[:, None] if form.batch_first else scales[:, None, None]
    expected, found = run_node(form, gru, values), {}
    for what, name in (("output", form.y), ("h_n", form.h_n)):
        if name and name in values:
            real = np.array(values[name], np.float64)
            found[what] = difference(
                real, torch.from_numpy(expected[name].astype(np.float64)), last
            )
    return found


def _local(
    model: OnnxModel, grus: Mapping[str, QuantGRU], feeds: Sequence[Feed]
) -> dict[str, float]:
    """Return the SQNR of each node's output, on the inputs and states that it has in float."""
    unique = list({id(gru): gru for gru in grus.values()}.values())
    pairs: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in grus}
    for feed in feeds:
        for gru in unique:
            gru.use_quantization = False
        try:
            values = model.values(feed)
        finally:
            for gru in unique:
                gru.use_quantization = True
        for form in model.forms:
            input, hx = inputs_of(form, values)
            gru = grus[form.name]
            with torch.no_grad():
                quantized, _ = gru(input, hx)
                gru.use_quantization = False
                real, _ = gru(input, hx)
                gru.use_quantization = True
            for kept, y in zip(pairs[form.name], (real, quantized), strict=True):
                kept.append(y.numpy() if isinstance(y, Tensor) else y.data.numpy())
    return {name: decibels_of(*pair) for name, pair in pairs.items()}


def _stored(proto: Any, names: set[str]) -> dict[str, Any]:
    import onnx

    return {
        each.name: onnx.numpy_helper.to_array(each)
        for each in proto.graph.initializer
        if each.name in names
    }


def _seconds(session: Any, names: list[str], feed: Feed) -> float:
    """Return the shortest time of some runs."""
    shortest, end = float("inf"), time.perf_counter() + 0.5
    for count in range(20):
        start = time.perf_counter()
        session.run(names, feed)
        shortest = min(shortest, time.perf_counter() - start)
        if count >= 2 and time.perf_counter() > end:
            break
    return shortest


def _text_of(gru: QuantGRU) -> str:
    direction = ", bidirectional" if gru.bidirectional else ""
    return f"GRU({gru.input_size}, {gru.hidden_size}{direction})"


def identifier(name: str) -> str:
    """Return a name for folders and C from the name of a node or layer."""
    word = "".join(c if c.isascii() and c.isalnum() else "_" for c in name.lower()).strip("_")
    return word if word[:1].isalpha() else f"gru_{word}".rstrip("_")


def _warn(text: str) -> None:
    warnings.warn(text, QuantGRUWarning, stacklevel=caller_stacklevel())
