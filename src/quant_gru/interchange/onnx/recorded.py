"""The operator that stands for a GRU while `torch.onnx.export` traces a model.

`quant_gru::onnx` names a module by a number. A translation table replaces it by the nodes of a
profile after tracing, when the weights have values again.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.errors import QuantGRUError, QuantGRUWarning, caller_stacklevel
from quant_gru.execution.layers import run_real
from quant_gru.execution.sequence_layout import Sequence
from quant_gru.interchange.onnx.source import Source
from quant_gru.parameters.schema import Shape


class Exportable(Protocol):
    """A module that ONNX export can describe."""

    def _source(self) -> Source: ...


_numbers: weakref.WeakKeyDictionary[Exportable, int] = weakref.WeakKeyDictionary()
_modules: weakref.WeakValueDictionary[int, Exportable] = weakref.WeakValueDictionary()

exporting = False
"""Whether quant_gru.export_onnx is running: then every call is recorded, of float GRUs, too."""

_calls: dict[int, int] = {}

_library = torch.library.Library("quant_gru", "FRAGMENT")
_library.define(
    "onnx(Tensor x, Tensor h0, Tensor? lengths, int gru, int directions, int call) "
    "-> (Tensor, Tensor)"
)
operator = torch.ops.quant_gru.onnx.default


def number_of(module: Exportable) -> int:
    """Return the number of a module."""
    if module not in _numbers:
        number = max(_modules, default=-1) + 1
        _numbers[module], _modules[number] = number, module
    return _numbers[module]


def source_of(number: int) -> Source:
    """Return what an exporter needs of the module of a number.

    Raises:
        QuantGRUError: The module is gone.
    """
    module = _modules.get(number)
    if module is None:
        raise QuantGRUError(
            f"Expected the GRU of number {number} in this process, got none: give "
            "torch.onnx.export the model, not a saved program"
        )
    return module._source()


def restart(*_: Any) -> None:
    """Count the calls of every GRU from 0 again: a forward of the model begins."""
    _calls.clear()


def record(
    module: Exportable,
    input: Sequence | PackedSequence,
    hx: Tensor | None,
    shape: Shape,
    dtype: torch.dtype,
) -> tuple[Tensor | PackedSequence, Tensor]:
    """Record a call of a GRU.

    Args:
        module: The GRU.
        input: The input, or the result of `packing.padded`.
        hx: Initial states (layers * directions, N, H) of a PackedSequence; None for zeros.
        shape: The shape of the GRU.
        dtype: dtype of the results.
    """
    _warn_of_missing_translations()
    number, D = number_of(module), shape.directions
    # verification finds a call in the file by this number, whatever an optimizer removes
    _calls[number] = call = _calls.get(number, -1) + 1
    if not isinstance(input, PackedSequence):
        y, h_n = operator(input.x, input.h0, None, number, D, call)
        # transposed before it is cast: ONNX Runtime 1.32 crashes at float16 cast, then transposed
        y, h_n = input.finish(y, h_n)
        return y.to(dtype), h_n.to(dtype)
    x, sizes, order, back = input
    if x.dim() != 3:
        raise QuantGRUError(
            "Expected rows that the model packs itself, in quant_gru.export_onnx, got a "
            "PackedSequence from elsewhere; give the model padded rows and their lengths"
        )
    if hx is None:
        hx = x.new_zeros((shape.num_layers * D, x.shape[1], shape.hidden_size))
    elif order is not None:
        hx = hx.index_select(1, order)
    real = torch.float32
    y, h_n = (v.to(dtype) for v in operator(x.to(real), hx.to(real), sizes[0], number, D, call))
    h_n = h_n if back is None else h_n.index_select(1, back)
    return PackedSequence(y, sizes, order, back), h_n


def _warn_of_missing_translations() -> None:
    """Warn inside of a `torch.onnx.export` that has no translation of the operator.

    The exporter's own error comes after tracing, and does not say where translations are.
    """
    if exporting or torch.compiler.is_dynamo_compiling():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.onnx" and frame.f_code.co_name == "export":
            if frame.f_locals.get("custom_translation_table", frame) is None:
                warnings.warn(
                    "torch.onnx.export cannot write a QuantGRU without "
                    "custom_translation_table=quant_gru.onnx_translations(profile); or call "
                    "quant_gru.export_onnx(model, path, example), which also checks the file",
                    QuantGRUWarning,
                    stacklevel=caller_stacklevel(),
                )
            return
        frame = frame.f_back


def _run(
    x: Tensor, h0: Tensor, lengths: Tensor | None, gru: int, directions: int, call: int
) -> tuple[Tensor, Tensor]:
    plan = source_of(gru).plan
    if plan is None:
        raise QuantGRUError("Expected a calibrated GRU to run, got one without scales")
    y, h_n = run_real(plan, x, h0, lengths)
    return y.contiguous(), h_n.contiguous()


def _fake(
    x: Tensor, h0: Tensor, lengths: Tensor | None, gru: int, directions: int, call: int
) -> tuple[Tensor, Tensor]:
    y = x.new_empty((x.shape[0], x.shape[1], directions * h0.shape[2]), dtype=torch.float32)
    return y, x.new_empty(h0.shape, dtype=torch.float32)


_library.impl("onnx", _run, "CompositeExplicitAutograd")
torch.library.register_fake("quant_gru::onnx", _fake, lib=_library)
