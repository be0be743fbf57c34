"""Verification of ONNX files of one GRU: ONNX Runtime against the plan."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from quant_gru.config.files import name_of, read_bytes
from quant_gru.errors import QuantGRUError
from quant_gru.integer.quantizer import Quantizer
from quant_gru.interchange.onnx.source import Source
from quant_gru.interchange.onnx.verify import Difference, compare, session_of

Report = dict[str, Difference]


def split_example(source: Source, example: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
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


def split_cell_example(source: Source, example: Any) -> tuple[Tensor, Tensor | None]:
    """Return input (N, C) and state (N, H) of the example of a cell."""
    parts = tuple(example) if type(example) in (tuple, list) else (example,)
    x, hx = parts[0], parts[1] if len(parts) > 1 else None
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != source.input_size:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise QuantGRUError(
            f"Expected an example of a cell to be (N, {source.input_size}), got {got}; a QuantGRU "
            "reads sequences, and export_step_onnx writes a step with its state in codes"
        )
    expected = (len(x), source.hidden_size)
    if hx is not None and (not isinstance(hx, Tensor) or tuple(hx.shape) != expected):
        got = tuple(hx.shape) if isinstance(hx, Tensor) else type(hx).__name__
        raise QuantGRUError(f"Expected the state of the example to be {expected}, got {got}")
    return x, hx


def random_example(
    source: Source, states: bool = False, lengths: bool = False, N: int = 2, T: int = 16
) -> Any:
    """Return random rows, as an example of a GRU with a plan.

    Args:
        source: The GRU.
        states: Whether the example has initial states.
        lengths: Whether its input is a PackedSequence, with rows of T and about half as many steps.
        N: Rows.
        T: Steps.
    """
    assert source.plan is not None
    generator = torch.Generator().manual_seed(0)
    cells = [cell for layer in source.plan.cells for cell in layer]

    def values(q: Quantizer, *sizes: int) -> Tensor:
        return q.scale * 2.0 ** (q.bits - 2) * torch.randn(sizes, generator=generator, device="cpu")

    sizes = (N, T) if source.batch_first else (T, N)
    x: Tensor | PackedSequence = values(cells[0].x, *sizes, source.input_size)
    if lengths:
        assert isinstance(x, Tensor)
        rows = [T if row % 2 == 0 else T // 2 + 1 for row in range(N)]
        x = pack_padded_sequence(x, rows, source.batch_first, enforce_sorted=False)
    if not states:
        return x
    return x, torch.stack([values(cell.h, N, source.hidden_size) for cell in cells])


def verified_file(path: str | os.PathLike[str], source: Source) -> Report:
    """Compare a file of `export_onnx` or `export_step_onnx` with the plan of a GRU.

    Args:
        path: The file, of a GRU by itself.
        source: The GRU, with a plan.

    Raises:
        QuantGRUError: The file cannot be read, ONNX Runtime refuses it, or its inputs and outputs
            are not those of this GRU.
    """
    where = f"file {name_of(path)!r}"
    content = read_bytes(path)
    try:
        session = session_of(content)
        given = (*session.get_inputs(), *session.get_overridable_initializers())
        found = {each.name: each.shape for each in given}
        outputs = [each.name for each in session.get_outputs()]
        if "state_l0" in found:
            _check_border(found, outputs, _step_border(source))
            return verified_steps(content, source)
        if len(found.get("input", ())) == 2:
            kept = found.keys() & {"hx"}
            _check_border(found, outputs, _cell_border(source, bool(kept)))
            rows = found["input"][0] if isinstance(found["input"][0], int) else 16
            return verified_cell(content, source, _random_step(source, bool(kept), rows))
        kept = {"input", *({"hx", "lengths"} & found.keys())}
        _check_border(found, outputs, _border(source, kept))
        fixed = dict(zip(_border(source, kept)[0]["input"], found["input"], strict=True))
        sizes = {
            short: fixed[name]
            for short, name in (("N", "batch"), ("T", "time"))
            if isinstance(fixed[name], int)
        }
        example = random_example(source, "hx" in kept, "lengths" in kept, **sizes)
        return verified_gru(content, source, example)
    except QuantGRUError as error:
        raise QuantGRUError(f"{error} ({where})") from error.__cause__
    except Exception as error:  # the exceptions of ONNX Runtime share no other class
        reason = " ".join(str(error).split())
        raise QuantGRUError(
            f"Expected a model that ONNX Runtime runs, got: {reason:.300} ({where})"
        ) from error


Border = tuple[dict[str, list[Any]], list[str]]


def _border(source: Source, inputs: set[str]) -> Border:
    """Return name -> shape of the inputs, and names of the outputs, of a file of a GRU."""
    sizes = ["batch", "time"] if source.batch_first else ["time", "batch"]
    states = source.num_layers * source.directions
    every: dict[str, list[Any]] = {
        "input": [*sizes, source.input_size],
        "hx": [states, "batch", source.hidden_size],
        "lengths": ["batch"],
    }
    return {name: shape for name, shape in every.items() if name in inputs}, ["output", "h_n"]


def _step_border(source: Source) -> Border:
    names = [f"state_l{layer}" for layer in range(source.num_layers)]
    states: dict[str, list[Any]] = {name: ["batch", source.hidden_size] for name in names}
    outputs = ["output", *(f"{name}_out" for name in names)]
    return {"input": ["batch", source.input_size], **states}, outputs


def _cell_border(source: Source, states: bool) -> Border:
    inputs: dict[str, list[Any]] = {"input": ["batch", source.input_size]}
    return inputs | ({"hx": ["batch", source.hidden_size]} if states else {}), ["output"]


def _random_step(source: Source, states: bool, rows: int) -> Any:
    x, hx = random_example(replace(source, batch_first=False), True, N=rows, T=1)
    return (x[0], hx[0]) if states else x[0]


def _check_border(inputs: dict[str, list[Any]], outputs: list[str], expected: Border) -> None:
    fit = inputs.keys() == expected[0].keys() and all(
        len(shape) == len(inputs[name])
        and all(
            isinstance(dim, str) or dim == size
            for dim, size in zip(shape, inputs[name], strict=True)
        )
        for name, shape in expected[0].items()
    )
    if not fit or outputs != expected[1]:  # sizes of a batch and of time may be fixed
        described = f"inputs {expected[0]} and outputs {expected[1]}"
        raise QuantGRUError(
            f"Expected a model of this GRU by itself, with {described}, got {inputs} and {outputs}"
        )


def verified_gru(content: bytes, source: Source, example: Any) -> Report:
    """Compare a model with the plan, on the example and on a batch and a length of its own."""
    if source.plan is None:
        return {}
    session = session_of(content)
    x, lengths, hx = split_example(source, example)
    states = source.num_layers * source.directions
    found: Report = {}
    more, (dims,) = x, [each.shape for each in session.get_inputs() if each.name == "input"]
    for axis in (0, 1):  # twice the rows and twice the steps, where they are not fixed
        more = more if isinstance(dims[axis], int) else torch.cat((more, more.flip(1 - axis)), axis)
    for values in (x, more):
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
        border = {"x": data, "h0": h0, "lengths": rows, "y": y, "h_n": h_n}
        for name, each in compare(source.plan, border).items():
            found[name] = found[name] + each if name in found else each
    return found


def verified_cell(content: bytes, source: Source, example: Any) -> Report:
    """Compare the model of a cell with the plan, on the example and on twice the rows."""
    if source.plan is None:
        return {}
    session = session_of(content)
    x, hx = split_cell_example(source, example)
    report: Report = {}
    for more in (1, 2) if isinstance(session.get_inputs()[0].shape[0], str) else (1,):
        feeds = {"input": _array(torch.cat([x, x.flip(0)][:more]))}
        h0 = np.zeros((len(x), source.hidden_size), np.float32) if hx is None else _array(hx)
        h0 = np.concatenate([h0] * more)
        (y,) = session.run(None, feeds if hx is None else {**feeds, "hx": h0})
        found = compare(source.plan, {"x": feeds["input"][None], "h0": h0[None], "y": y[None]})
        report["output"] = report.get("output", Difference(0, 0, 0, 0.0)) + found["output"]
    return report


def verified_steps(content: bytes, source: Source) -> Report:
    """Compare 16 steps of two random rows with the plan."""
    plan = source.plan
    assert plan is not None
    session, cells = session_of(content), [layer[0] for layer in plan.cells]
    x = random_example(replace(source, batch_first=False))
    fixed = session.get_inputs()[0].shape[0]
    x = x[:, :1].repeat(1, fixed, 1) if isinstance(fixed, int) else x
    h = (x.shape[1], source.hidden_size)
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
    values = {"x": x.numpy(), "h0": h0, "y": np.stack(outputs), "h_n": last}
    found = compare(plan, values)
    return {"output": found["output"], "state": found["h_n"]}


def _array(values: Tensor) -> Any:
    return values.detach().cpu().to(torch.float32).numpy()
