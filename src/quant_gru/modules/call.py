"""The ways of a quantized call, of real weights and of frozen integers, beside the prepared one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.autograd import straight_through
from quant_gru.autograd.straight_through import Differentiated, Given
from quant_gru.errors import CalibrationError, QuantGRUError
from quant_gru.execution.layers import run_real
from quant_gru.execution.noise import Noise
from quant_gru.execution.prepared_call import PreparedCall
from quant_gru.execution.sequence_layout import Sequence
from quant_gru.interchange.onnx import recorded
from quant_gru.interchange.onnx.recorded import Exportable
from quant_gru.interchange.onnx.scripted import is_tracing, scripted
from quant_gru.parameters.schema import Shape
from quant_gru.torch_ops import operators

Result = tuple[Tensor | PackedSequence, Tensor]


def run(
    prepared: PreparedCall,
    sequence: Sequence,
    noise: Noise | None,
    dtype: torch.dtype,
    how: Differentiated | None = None,
    logarithms: SequenceABC[Tensor] = (),
) -> Result:
    """Run a call that native code did not take as a whole.

    Args:
        prepared: The plan.
        sequence: The input.
        noise: Random masks.
        dtype: dtype of the results.
        how: How the call is differentiated; None without gradients.
        logarithms: Logarithms of learned scales, which get gradients.
    """
    x, h0, packing = sequence.values, sequence.states, sequence.packing
    if how is None:
        y, h_n = run_real(prepared.plan, x, h0, None, noise, None, packing, dtype)
    else:
        given = Given(packing, noise, dtype)
        y, h_n = straight_through.run(how, x, h0, given, prepared.weights, logarithms)
    return sequence.finish(y, h_n)


def wants_gradient(
    sequence: Sequence, weights: Iterable[Tensor], logarithms: Iterable[Tensor]
) -> bool:
    """Return whether autograd records a call."""
    if not torch.is_grad_enabled():
        return False
    for each in (sequence.values, sequence.states, *weights, *logarithms):
        if each is not None and each.requires_grad:
            return True
    return False


# --- calls that tools record


def run_as_operator(
    sequence: Sequence,
    weights: SequenceABC[Tensor],
    text: Tensor,
    settings: operators.Settings,
    dtype: torch.dtype,
) -> Result:
    """Run a call as one operator that tracers and transforms can handle; see `operators.forward`.

    Results have the given dtype.
    """
    x, h0, lengths = sequence.x, sequence.h0, sequence.lengths
    y, h_n = operators.forward(x, h0, lengths, weights, text, settings)
    return sequence.restore(y, h_n, dtype)


def traceable(text: Tensor | None, learns_scales: bool) -> Tensor:
    """Return the parameter document of a GRU for its operator; raise if it has none."""
    if learns_scales:
        raise QuantGRUError(
            "Expected learn_scales to be False for torch.compile, torch.export and torch.func, "
            "got True: scales are read on the host; freeze() the GRU for inference"
        )
    if text is None:
        raise CalibrationError(
            "Expected a calibrated GRU to trace, got one without scales; call calibrate(data) "
            "and finalize_calibration() first"
        )
    return text


def is_recorded(export_format: str) -> bool:
    """Return whether a call in export mode is traced for a file in which the GRU is one operator.

    Args:
        export_format: A profile; `torch.onnx.export(..., dynamo=False)` traces the float GRU.
    """
    if recorded.exporting:
        return torch.compiler.is_compiling()
    return is_tracing() and export_format != "float"


def record(
    module: Exportable,
    input: Tensor | PackedSequence,
    hx: Tensor | None,
    normalize: Callable[[], Sequence],
    shape: Shape,
    dtype: torch.dtype,
    export_format: str | None = None,
) -> Result:
    """Record a call as one operator of an ONNX file; see `recorded.record`.

    `normalize()` returns the input as a sequence. `export_format` is the profile that
    `torch.onnx.export(..., dynamo=False)` writes.
    """
    if export_format is not None and is_tracing():
        sequence = normalize()
        if sequence.packing is not None:
            raise QuantGRUError(
                "Expected a tensor for torch.onnx.export(..., dynamo=False), got a "
                "PackedSequence; use quant_gru.export_onnx"
            )
        y, h_n = scripted(module, export_format, sequence.x, sequence.h0)
        return sequence.restore(y, h_n, dtype)
    if isinstance(input, PackedSequence) and recorded.exporting:
        return recorded.record(module, input, hx, shape, dtype)
    return recorded.record(module, normalize(), hx, shape, dtype)
