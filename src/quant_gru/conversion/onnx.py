"""ONNX files of GRUs and of whole models that contain them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from quant_gru._errors import QuantGRUError
from quant_gru.config.files import write_bytes
from quant_gru.export.onnx import recorded
from quant_gru.export.onnx.builder import OPSET, onnx_ir
from quant_gru.export.onnx.model import sequence_model, step_model
from quant_gru.export.onnx.packing import padded
from quant_gru.export.onnx.profiles import check_profile
from quant_gru.export.onnx.source import Source
from quant_gru.export.onnx.translation import INPUTS, OUTPUTS, any_size, translations
from quant_gru.export.onnx.verify import Difference, compare, expect_none, session_of
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU

PRODUCER = ("quant-gru", "0.1.0")
GRUS = (QuantGRU, FrozenQuantGRU)
Report = dict[str, Difference]


def export_onnx(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    profile: str = "integer",
    verify: bool = True,
    *,
    dynamic_shapes: Any = None,
) -> Report:
    """Write a model that contains QuantGRUs as an ONNX file.

    A GRU by itself has the inputs 'input', 'hx' if the example has states, and 'lengths' int64
    (N,) if the example is a PackedSequence, and the outputs 'output' and 'h_n'. A whole model goes
    through `torch.onnx.export`, with every GRU in `profile`. Batch and time are dynamic.

    Args:
        model: A QuantGRU, a FrozenQuantGRU, or a model that contains some.
        path: Where to write; an existing file is replaced.
        example: The input of the model, or a tuple of its positional inputs.
        profile: 'integer' (equal to the plan), 'qdq', 'float' or 'node'; see docs/onnx.md.
        verify: Whether to run the file in ONNX Runtime and compare it with the plan.
        dynamic_shapes: As for `torch.onnx.export`, of a whole model; None for all that can be.

    Returns:
        Output of a GRU ('output', 'h_n'; in a whole model 'encoder.output') -> how many codes
        differ from the plan, and by how much; empty without `verify`.

    Raises:
        QuantGRUError: The model has no GRU, a GRU has no scales, ONNX's 64-bit integers cannot
            compute it, or codes of profile 'integer' differ. Nothing is written then.
    """
    check_profile(profile)
    onnx_ir()
    if isinstance(model, GRUS):
        written, source = _gru_model(model, example, profile)
        content = _bytes(written)
        report = _verified_gru(content, source, example) if verify else {}
    else:
        content = _whole_model(model, example, profile, dynamic_shapes)
        report = _verified_model(content, model, example) if verify else {}
    if profile == "integer":
        expect_none(report)
    write_bytes(path, content)
    return report


def export_step_onnx(
    gru: QuantGRU | FrozenQuantGRU,
    path: str | os.PathLike[str],
    profile: str = "integer",
    verify: bool = True,
) -> Report:
    """Write one step of a GRU as an ONNX file, for streams: the state goes in and out as integers.

    Inputs are 'input' float32 (N, C) and, for each layer, 'state_l0' (N, H): codes of output.h in
    their container, at first its zero point. Outputs are 'output' float32 (N, H) and
    'state_l0_out'. Reading a sequence step by step gives the codes of the whole sequence.

    Args:
        gru: A GRU of one direction.
        path: Where to write; an existing file is replaced.
        profile: 'integer' (equal to the plan), 'qdq', 'float' or 'node'; see docs/onnx.md.
        verify: Whether to run a few steps in ONNX Runtime and compare them with the plan.

    Returns:
        'output' and 'state' -> how many codes differ from the plan, and by how much; empty without
        `verify`.

    Raises:
        QuantGRUError: As for `export_onnx`, or the GRU is bidirectional.
    """
    check_profile(profile)
    source = _source(gru)
    content = _bytes(step_model(source, profile, PRODUCER))
    report = _verified_steps(content, source) if verify else {}
    if profile == "integer":
        expect_none(report)
    write_bytes(path, content)
    return report


def onnx_translations(profile: str = "integer") -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return translations of GRUs for `torch.onnx.export(model, .., dynamo=True)`.

    The argument is `custom_translation_table`; GRUs must have `use_quantization` True.

    Args:
        profile: 'integer', 'qdq', 'float' or 'node'; see docs/onnx.md.

    Raises:
        QuantGRUError: The profile is unknown, or a package is missing.
    """
    return translations(profile)


# --- one GRU


def _source(gru: torch.nn.Module) -> Source:
    if not isinstance(gru, GRUS):
        raise QuantGRUError(f"Expected a QuantGRU or a FrozenQuantGRU, got a {type(gru).__name__}")
    return gru._source()


def _gru_model(gru: torch.nn.Module, example: Any, profile: str) -> tuple[Any, Source]:
    source = _source(gru)
    _, lengths, hx = _feeds(source, example)
    written = sequence_model(source, profile, hx is not None, lengths is not None, PRODUCER)
    return written, source


def _feeds(source: Source, example: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return x (padded, in the GRU's layout), lengths and states of the example of a GRU."""
    parts = tuple(example) if type(example) in (tuple, list) else (example,)
    x, hx = parts[0], parts[1] if len(parts) > 1 else None
    lengths = None
    if isinstance(x, PackedSequence):
        x, lengths = pad_packed_sequence(x, source.batch_first)
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != source.input_size:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise QuantGRUError(
            f"Expected an example of 3 dimensions with {source.input_size} features last, or a "
            f"PackedSequence, got {got}"
        )
    return x, lengths, hx


def _verified_gru(content: bytes, source: Source, example: Any) -> Report:
    """Compare a model with the plan, on the example and on a batch and a length of its own."""
    if source.plan is None:
        return {}
    session = session_of(content)
    x, lengths, hx = _feeds(source, example)
    states = source.num_layers * source.directions
    found: Report = {}
    # twice the rows, and twice the steps but one
    longer = torch.cat((x, x.flip(0)), dim=1)
    for values in (x, torch.cat((longer, longer), dim=0)[1:]):
        N = values.shape[0 if source.batch_first else 1]
        feeds = {"input": _array(values)}
        h0 = np.zeros((states, N, source.hidden_size), np.float32)
        if hx is not None:
            h0 = np.resize(_array(hx), h0.shape)
            feeds["hx"] = h0
        rows = None if lengths is None else np.resize(lengths.numpy(), N)
        if rows is not None:
            feeds["lengths"] = rows
        y, h_n = session.run(["output", "h_n"], feeds)
        data = feeds["input"]
        if source.batch_first:
            data, y = data.swapaxes(0, 1), y.swapaxes(0, 1)
        pair = compare(source.plan, data, h0, rows, y, h_n)
        for name, each in zip(("output", "h_n"), pair, strict=True):
            found[name] = found[name] + each if name in found else each
    return found


def _verified_steps(content: bytes, source: Source) -> Report:
    """Compare 16 steps of two random rows with the plan."""
    plan = source.plan
    assert plan is not None
    session, cells = session_of(content), [layer[0] for layer in plan.cells]
    x = torch.randn(16, 2, source.input_size, generator=torch.Generator().manual_seed(0))
    x = 2.0 ** (cells[0].x.bits - 2) * cells[0].x.scale * x
    h = (2, source.hidden_size)
    states = {
        f"state_l{layer}": np.full(h, cell.h.zero_point, str(cell.h.container).split(".")[1])
        for layer, cell in enumerate(cells)
    }
    outputs = []
    for step in x.numpy():
        y, *after = session.run(None, {"input": step, **states})
        states = dict(zip(states, after, strict=True))
        outputs.append(y)
    last = np.stack(
        [
            cell.h.dequantize(torch.from_numpy(codes)).numpy()
            for cell, codes in zip(cells, states.values(), strict=True)
        ]
    )
    h0 = np.zeros((len(cells), *h), np.float32)
    pair = compare(plan, x.numpy(), h0, None, np.stack(outputs), last)
    return dict(zip(("output", "state"), pair, strict=True))


def _array(values: Tensor) -> Any:
    return values.detach().cpu().to(torch.float32).numpy()


# --- whole models


def _whole_model(model: torch.nn.Module, example: Any, profile: str, dynamic_shapes: Any) -> bytes:
    grus = {name: m for name, m in model.named_modules() if isinstance(m, GRUS)}
    if not grus:
        raise QuantGRUError(
            f"Expected a model with at least one QuantGRU, got none in {type(model).__name__}; "
            "call convert_model(model) first"
        )
    for name, gru in grus.items():
        if isinstance(gru, QuantGRU) and profile != "float" and not gru.is_calibrated():
            raise QuantGRUError(
                f"Expected calibrated GRUs, got one without scales ({name!r}); call "
                "calibrate_model(model, batches) first"
            )
    args = tuple(example) if type(example) in (tuple, list) else (example,)
    if dynamic_shapes is None:
        dynamic_shapes = tuple(_dynamic(arg) for arg in args)
    with _recording(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            args,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=dynamic_shapes,
            custom_translation_table=translations(profile),
            verbose=False,
        )
    assert program is not None
    return _bytes(program.model)


def _dynamic(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return dict.fromkeys(range(arg.dim()), torch.export.Dim.AUTO)
    if isinstance(arg, (tuple, list)):
        return type(arg)(_dynamic(each) for each in arg)
    return {key: _dynamic(each) for key, each in arg.items()} if isinstance(arg, Mapping) else None


@contextmanager
def _recording(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into eval mode and let every call of a GRU be recorded."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        recorded.exporting = True
        with padded(), torch.no_grad(), any_size():
            yield
    finally:
        recorded.exporting = False
        for module, training in modes:
            module.training = training


def _verified_model(content: bytes, model: torch.nn.Module, example: Any) -> Report:
    """Compare every GRU of a model with its plan, on the values that it has in ONNX Runtime."""
    import onnx

    proto = onnx.load_model_from_string(content)
    borders: dict[str, dict[str, str]] = {}
    for node in proto.graph.node:
        for prop in node.metadata_props:
            for kind, values in ((INPUTS, node.input), (OUTPUTS, node.output)):
                if prop.key.startswith(f"{kind}."):
                    gru, _, name = prop.value.partition("/")
                    borders.setdefault(gru, {})[name] = values[int(prop.key.rpartition(".")[2])]
    given = {each.name for each in proto.graph.output}
    wanted = sorted({name for values in borders.values() for name in values.values()})
    initial = {each.name for each in (*proto.graph.initializer, *proto.graph.input)}
    for name in wanted:
        if name not in given | initial:
            proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = session_of(proto.SerializeToString())
    args = _flat(example)
    feeds = {
        each.name: arg.detach().cpu().numpy()
        for each, arg in zip(session.get_inputs(), args, strict=True)
    }
    asked = [each.name for each in session.get_outputs()]
    found = {**feeds, **dict(zip(asked, session.run(asked, feeds), strict=True))}
    report: Report = {}
    names = {
        recorded.number_of(m): name for name, m in model.named_modules() if isinstance(m, GRUS)
    }
    for gru, values in sorted(borders.items()):
        number, _, use = gru.partition(".")
        source = recorded.source_of(int(number))
        if source.plan is None:
            continue
        x, y, h_n = (found[values[name]] for name in ("x", "y", "h_n"))
        h0 = found.get(values.get("h0", ""), np.zeros(h_n.shape, np.float32))
        rows = found.get(values.get("lengths", ""))
        pair = compare(source.plan, x, h0, rows, y, h_n)
        name = names[int(number)] + (f"#{use}" if use != "0" else "")
        report[f"{name}.output"], report[f"{name}.h_n"] = pair
    return report


def _flat(example: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(example)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


# --- files


def _bytes(model: Any) -> bytes:
    content: bytes = onnx_ir().to_proto(model).SerializeToString()
    return content
