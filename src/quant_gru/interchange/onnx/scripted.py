"""The GRU in `torch.onnx.export(..., dynamo=False)`: a call of a function of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quant_gru.interchange.onnx.builder import onnx_ir
from quant_gru.interchange.onnx.calls import DOMAIN, function_of
from quant_gru.interchange.onnx.recorded import Exportable, number_of, operator, source_of


class _Function:
    """A function of a model, in the form in which torch.onnx takes those of onnxscript.

    Args:
        number: The number of the GRU.
        profile: See `PROFILES`.
        opset: Version of ONNX's operators in the model.
    """

    def __init__(self, number: int, profile: str, opset: int) -> None:
        self.opset = SimpleNamespace(domain=DOMAIN, version=1)
        self.name = f"GRU_{number}_{profile}"
        self._number, self._profile, self._opset = number, profile, opset

    def __call__(self, *_: Any) -> Any:
        raise NotImplementedError

    def to_function_proto(self) -> Any:
        """Return the FunctionProto: x (T, N, C), h0 -> y, h_n."""
        function = function_of(self._number, self._profile, self.name, self._opset)
        return onnx_ir().to_proto(function)


def is_tracing() -> bool:
    """Return whether torch.jit.trace runs."""
    return torch._C._get_tracing_state() is not None


@contextmanager
def _untraced() -> Iterator[None]:
    """Let a plan be built while torch.jit.trace runs, which makes tensors of its integers."""
    native: Any = torch._C
    state = native._get_tracing_state()
    native._set_tracing_state(None)
    try:
        yield
    finally:
        native._set_tracing_state(state)


class _Scripted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h0: Tensor, number: int, profile: str) -> Any:
        with _untraced():
            return operator(x, h0, None, number, source_of(number).directions, 0)

    @staticmethod
    def symbolic(g: Any, x: Any, h0: Any, number: int, profile: str) -> Any:
        y, h_n = g.onnxscript_op(_Function(number, profile, g.opset), x, h0, outputs=2)
        for value in (y, h_n):
            value.setType(x.type().with_sizes([None, None, None]))
        return y, h_n


def scripted(module: Exportable, profile: str, x: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    """Run a GRU so that a trace records it as one operator.

    Args:
        module: The GRU.
        profile: See `PROFILES`.
        x: float32 (T, N, C).
        h0: float32 (layers * directions, N, H).
    """
    y, h_n = _Scripted.apply(x, h0, number_of(module), profile)
    return y, h_n
