"""ONNX files of GRUs and of whole models that contain them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quant_gru.calibration.batches import eval_mode
from quant_gru.config.files import name_of, write_bytes
from quant_gru.errors import QuantGRUError
from quant_gru.interchange.onnx import recorded
from quant_gru.interchange.onnx.builder import (
    OPSET,
    OPSETS,
    infer_shapes,
    ir_version,
    onnx_ir,
    proto_of,
)
from quant_gru.interchange.onnx.calls import expand
from quant_gru.interchange.onnx.lowered import TRACED, check_opset, lower, transpose_before_cast
from quant_gru.interchange.onnx.model import Form, cell_model, sequence_model, step_model
from quant_gru.interchange.onnx.notes import write_notes
from quant_gru.interchange.onnx.packing import padded
from quant_gru.interchange.onnx.profiles import EXACT, check_profile
from quant_gru.interchange.onnx.sizes import fix_sizes, fold_sizes
from quant_gru.interchange.onnx.source import Source
from quant_gru.interchange.onnx.translation import any_size, placeholders, translations
from quant_gru.interchange.onnx.verify import expect_none
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.convert import expect_grus
from quant_gru.whole_models.onnx_sizes import verified_model
from quant_gru.whole_models.onnx_verify import (
    Report,
    split_cell_example,
    split_example,
    verified_cell,
    verified_gru,
    verified_steps,
)
from quant_gru.whole_models.other_sizes import freeze_sizes, tensors_of
from quant_gru.whole_models.reference_run import CELLS, GRUS, split


def export_onnx(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    profile: str = "integer",
    verify: bool = True,
    *,
    dynamic_shapes: Any = None,
    batch: int | None = None,
    time: int | None = None,
    opset: int = OPSET,
) -> Report:
    """Write a model that contains QuantGRUs as an ONNX file.

    A GRU by itself has the inputs 'input', 'hx' if the example has states, and 'lengths' int64
    (N,) if the example is a PackedSequence, and the outputs 'output' and 'h_n'; a cell has the
    inputs 'input' (N, C) and 'hx', and the output 'output' (N, H). A whole model goes through
    `torch.onnx.export`, with every GRU in `profile`. Batch and time are dynamic, unless they are
    given, or the model has them as constants when it is traced (a warning then).

    Args:
        model: A QuantGRU, a FrozenQuantGRU, or a model that contains some.
        path: Where to write; an existing file is replaced.
        example: The input of the model, a tuple of its positional inputs, or a dict of keyword
            arguments.
        profile: 'integer' or 'operator' (equal to the plan), 'qdq', 'float' or 'node'; see
            docs/onnx.md.
        verify: Whether to run the file in ONNX Runtime and compare it with the plan.
        dynamic_shapes: As for `torch.onnx.export`, of a whole model; None for all that can be.
        batch: A number of rows that is fixed in the file, that of the example; None for any.
        time: A number of steps that is fixed in the file, likewise. Of a whole model it is the
            size of the inputs from which the steps of its GRUs follow. One step has no Scan.
        opset: Version of ONNX's operators, 17 to 25. Before 21 codes of 16 bits in the profiles
            'qdq' and 'node' need operators of ONNX Runtime; from 25 on weights of up to 2 bits are
            INT2.

    Returns:
        Output of a GRU ('output', 'h_n'; in a whole model 'encoder.output') -> how many codes
        differ from the plan, and by how much; of a whole model also what reaches a GRU
        ('encoder.input') and the model's outputs, by their names in the file -> how many values
        differ by more than rounding. Empty without `verify`.

    Raises:
        QuantGRUError: The model has no GRU, a GRU has no scales, ONNX's 64-bit integers cannot
            compute it, codes or outputs of profile 'integer' differ, or a whole model has other
            shapes in the file, or other outputs at a second call. Nothing is written then.

    Example:
        >>> report = export_onnx(quantized, "model.onnx", x)
        >>> any(each.differing for each in report.values())
        False
    """
    check_profile(profile)
    if isinstance(example, str | os.PathLike):
        raise QuantGRUError(
            "Expected the path before the example, export_onnx(model, path, example), got "
            f"{os.fspath(example)!r} as the example"
        )
    name_of(path)
    onnx_ir()
    form = _form(opset, batch, time)
    if isinstance(model, CELLS):
        source = _source(model)
        x, hx = split_cell_example(source, example)
        _expect_size("batch", form.batch, x.shape[0])
        content = _bytes(cell_model(source, profile, hx is not None, form))
        report = verified_cell(content, source, example) if verify else {}
    elif isinstance(model, GRUS):
        written, source = _gru_model(model, example, profile, form)
        content = _bytes(written)
        report = verified_gru(content, source, example) if verify else {}
    else:
        proto, traced = _whole_model(model, example, profile, dynamic_shapes, form)
        asked = dynamic_shapes is not None
        report = verified_model(proto, model, example, profile, traced, asked) if verify else {}
        freeze_sizes(proto, traced)
        content = proto.SerializeToString()
    if profile in EXACT:
        expect_none(report)
    write_bytes(path, content)
    return report


def export_step_onnx(
    gru: QuantGRU | FrozenQuantGRU,
    path: str | os.PathLike[str],
    profile: str = "integer",
    verify: bool = True,
    *,
    batch: int | None = None,
    optional_states: bool = False,
    opset: int = OPSET,
) -> Report:
    """Write one step of a GRU as an ONNX file, for streams: the state goes in and out as integers.

    Inputs are 'input' float32 (N, C) and, for each layer, 'state_l0' (N, H): codes of output.h in
    their container, at first its zero point. Outputs are 'output' float32 (N, H) and
    'state_l0_out'. Reading a sequence step by step gives the codes of the whole sequence.

    Args:
        gru: A GRU of one direction.
        path: Where to write; an existing file is replaced.
        profile: 'integer' or 'operator' (equal to the plan), 'qdq', 'float' or 'node'; see
            docs/onnx.md.
        verify: Whether to run a few steps in ONNX Runtime and compare them with the plan.
        batch: A number of rows that is fixed in the file; None for any.
        optional_states: Whether the states have the start of a stream as default, so that a first
            step needs none. ONNX Runtime then lists them as overridable initializers; OpenVINO and
            ONNX Runtime for the web take such an input for a constant.
        opset: As for `export_onnx`.

    Returns:
        'output' and 'state' -> how many codes differ from the plan, and by how much; empty without
        `verify`.

    Raises:
        QuantGRUError: As for `export_onnx`, or the GRU is bidirectional.

    Example:
        >>> report = export_step_onnx(gru, "step.onnx")
        >>> report["state"].differing
        0
    """
    check_profile(profile)
    name_of(path)
    source = _source(gru)
    form = replace(_form(opset, batch, None), optional_states=optional_states)
    content = _bytes(step_model(source, profile, form))
    report = verified_steps(content, source) if verify else {}
    if profile in EXACT:
        expect_none(report)
    write_bytes(path, content)
    return report


def onnx_translations(profile: str = "integer") -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return translations of GRUs for `torch.onnx.export(model, .., dynamo=True)`.

    The argument is `custom_translation_table`; GRUs must have `use_quantization` True.

    Args:
        profile: 'integer', 'operator', 'qdq', 'float' or 'node'; see docs/onnx.md.

    Raises:
        QuantGRUError: The profile is unknown, or a package is missing.

    Example:
        >>> program = torch.onnx.export(
        ...     quantized,
        ...     (x,),
        ...     dynamo=True,
        ...     verbose=False,
        ...     custom_translation_table=onnx_translations("integer"),
        ... )
    """
    return translations(profile)


def _form(opset: int, batch: int | None, time: int | None) -> Form:
    if opset not in OPSETS:
        raise QuantGRUError(f"Expected opset to be from {OPSETS[0]} to {OPSETS[-1]}, got {opset!r}")
    for name, size in (("batch", batch), ("time", time)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise QuantGRUError(f"Expected {name} to be at least 1, or None, got {size!r}")
    return Form(opset, batch, time)


# --- one GRU


def _source(gru: torch.nn.Module) -> Source:
    if not isinstance(gru, GRUS):
        raise QuantGRUError(f"Expected a QuantGRU or a FrozenQuantGRU, got a {type(gru).__name__}")
    return gru._source()


def _gru_model(gru: torch.nn.Module, example: Any, profile: str, form: Form) -> tuple[Any, Source]:
    source = _source(gru)
    x, lengths, hx = split_example(source, example)
    found = x.shape[:2] if source.batch_first else x.shape[1::-1]
    for name, wanted, size in zip(("batch", "time"), (form.batch, form.time), found, strict=True):
        _expect_size(name, wanted, size)
    written = sequence_model(source, profile, hx is not None, lengths is not None, form)
    return written, source


def _expect_size(name: str, wanted: int | None, size: int) -> None:
    if wanted not in (None, size):
        raise QuantGRUError(f"Expected an example with {name} {wanted}, which is fixed, got {size}")


# --- whole models


def _whole_model(
    model: torch.nn.Module, example: Any, profile: str, dynamic_shapes: Any, form: Form
) -> tuple[Any, dict[str, int]]:
    """Return the file, an `onnx.ModelProto`, and the sizes of inputs that the graph fixes."""
    grus = {name: m for name, m in model.named_modules() if isinstance(m, GRUS)}
    expect_grus(grus, model)
    for name, gru in grus.items():
        if isinstance(gru, QuantGRU) and profile != "float" and not gru.is_calibrated():
            raise QuantGRUError(
                f"Expected calibrated GRUs, got one without scales ({name!r}); call "
                "calibrate_model(model, batches) first"
            )
    with _recording(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = _traced(model, example, dynamic_shapes, max(form.opset, TRACED))
    assert program is not None
    assert program.exported_program is not None
    written, numbers = program.model, {recorded.number_of(gru): name for name, gru in grus.items()}
    onnx_ir().passes.common.ClearMetadataAndDocStringPass()(written)
    if form.is_fixed:
        leaves = tensors_of(example)
        names = [str(value.name) for value in written.graph.inputs]
        shapes = {name: leaf.shape for name, leaf in zip(names, leaves, strict=True)}
        fix_sizes(written, {"batch": form.batch, "time": form.time}, shapes)
        fold_sizes(written)
    transpose_before_cast(written)
    lower(written, form.opset)
    written.ir_version = ir_version(form.opset)
    expand(written, profile, numbers)
    if form.is_fixed:
        infer_shapes(written)
    write_notes(written, profile, {name: gru._source() for name, gru in grus.items()})
    check_opset(written, form.opset)
    ranges = program.exported_program.range_constraints.items()
    traced = {str(name): int(each.lower) for name, each in ranges if each.lower == each.upper}
    return proto_of(written), traced


def _traced(model: torch.nn.Module, example: Any, dynamic_shapes: Any, opset: int) -> Any:
    """Return the program of a model, with all sizes dynamic that can be unless they are given."""
    args, kwargs = split(example)

    def program(shapes: Any) -> Any:
        return torch.onnx.export(
            model,
            args,
            kwargs=kwargs,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=shapes,
            custom_translation_table=placeholders(),
            verbose=False,
        )

    try:
        with any_size():
            return program(dynamic_shapes or _dynamic(kwargs or args))
    except torch.onnx.OnnxExporterError:
        if dynamic_shapes is not None or not any(1 in each.shape for each in tensors_of(example)):
            raise
        # sizes of 1 that broadcast cannot be dynamic
        return program(_dynamic(kwargs or args, least=2))


def _dynamic(arg: Any, least: int = 0) -> Any:
    """Return dynamic_shapes by which all sizes of at least `least` are dynamic."""
    if isinstance(arg, Tensor):
        auto = torch.export.Dim.AUTO
        return {axis: auto for axis, size in enumerate(arg.shape) if size >= least}
    if isinstance(arg, (tuple, list)):
        return type(arg)(_dynamic(each, least) for each in arg)
    if isinstance(arg, Mapping):
        return {key: _dynamic(each, least) for key, each in arg.items()}
    return None


@contextmanager
def _recording(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into eval mode and let every call of a GRU be recorded."""
    beginning = model.register_forward_pre_hook(recorded.restart)
    try:
        recorded.exporting = True
        with eval_mode(model), padded(), torch.no_grad():
            yield
    finally:
        recorded.exporting = False
        beginning.remove()


# --- files


def _bytes(model: Any) -> bytes:
    content: bytes = proto_of(model).SerializeToString()
    return content
