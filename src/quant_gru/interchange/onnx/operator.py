"""The profile operator: a GRU as one node, which our operator library runs in ONNX Runtime."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from quant_gru.errors import QuantGRUError
from quant_gru.interchange.onnx.builder import OPERATORS, Builder, Value, onnx_ir
from quant_gru.interchange.onnx.source import Source

_NAMES = {"win32": "gru_quant_onnxruntime.dll", "darwin": "libgru_quant_onnxruntime.dylib"}


def operator_layers(
    b: Builder, source: Source, x: Value, h0: Value, lengths: Value | None
) -> tuple[Value, Value]:
    """Add one node with the frozen file in it; as `profiles.add_gru`."""
    model = base64.b64encode(source.file()).decode()
    y, h_n = b.ops("GRU", 2, x, h0, lengths, domain=OPERATORS, model=model)
    T, N = (None, None) if x.shape is None else x.shape[:2]
    for value, sizes in ((y, (T, N, source.directions * source.hidden_size)), (h_n, h0.shape)):
        value.dtype = onnx_ir().DataType.FLOAT
        value.shape = None if sizes is None else onnx_ir().Shape(sizes)
    return y, h_n


def onnx_operator_library() -> str:
    """Return the path of the library with the operator of ONNX files of profile 'operator'.

    ONNX Runtime 1.16 or newer loads it, from any language. It needs neither Python nor this
    package, so it may be copied.

    Raises:
        QuantGRUError: This installation has none.

    Example:
        >>> import onnxruntime
        >>> report = export_onnx(gru, "model.onnx", x, "operator")
        >>> options = onnxruntime.SessionOptions()
        >>> options.register_custom_ops_library(onnx_operator_library())
        >>> session = onnxruntime.InferenceSession("model.onnx", options)
    """
    import quant_gru.kernels

    name = _NAMES.get(sys.platform, "libgru_quant_onnxruntime.so")
    for folder in quant_gru.kernels.__path__:
        if (path := Path(folder) / name).is_file():
            return str(path)
    raise QuantGRUError(
        f"Expected an installation with {name} beside the kernels, got none; install the package "
        "with QUANT_GRU_PARTS=all, or build the C++ library"
    )
