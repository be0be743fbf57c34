"""The translation table that `torch.onnx.export` uses for GRUs.

This file alone depends on what torch does not document: the evaluator that is current while torch
calls a translation collects nodes of onnx_ir, and a setting lets sizes of 1 be dynamic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx.experimental._config

from quant_gru.export.onnx.builder import Builder, Value, onnx_ir
from quant_gru.export.onnx.profiles import add_gru, check_profile
from quant_gru.export.onnx.recorded import operator, source_of

INPUTS, OUTPUTS = "quant_gru.input", "quant_gru.output"
"""Metadata of nodes that read or make a border value of a GRU: 'INPUTS.<index>' -> '<gru>/x'."""


def translations(profile: str) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the table for `custom_translation_table` of `torch.onnx.export`.

    Args:
        profile: See `quant_gru.export_onnx`.

    Raises:
        QuantGRUError: `profile` is unknown, or the packages of ONNX export are not installed.
    """
    check_profile(profile)
    onnx_ir()

    def quant_gru_onnx(x, h0, lengths, gru, directions, call):  # type: ignore[no-untyped-def]
        # a GRU that is called twice has its nodes twice
        recorder = _recorder()
        b = Builder(f"gru{gru}_{call}", recorder.opset.version)
        y, h_n = add_gru(b, source_of(gru), profile, x, h0, lengths)
        borders = {"x": x, "h0": h0, "lengths": lengths}
        _mark(b.nodes, f"{gru}.{call}", borders, {"y": y, "h_n": h_n})
        recorder.nodes.extend(b.nodes)
        return y, h_n

    return {operator: quant_gru_onnx}


def any_size() -> AbstractContextManager[Any]:
    """Return a context in which torch.export lets sizes of 1 be dynamic, where torch can."""
    settings: Any = torch.fx.experimental._config
    known = hasattr(settings, "backed_size_oblivious")
    return settings.patch(backed_size_oblivious=True) if known else nullcontext()


def _mark(
    nodes: Sequence[Any], gru: str, inputs: dict[str, Value | None], outputs: dict[str, Value]
) -> None:
    """Write into nodes which of their values are inputs and outputs of a GRU, for verification."""
    for node in nodes:
        for index, value in enumerate(node.inputs):
            for name, border in inputs.items():
                if value is not None and value is border:
                    node.metadata_props[f"{INPUTS}.{index}"] = f"{gru}/{name}"
        for index, value in enumerate(node.outputs):
            for name, border in outputs.items():
                if value is border:
                    node.metadata_props[f"{OUTPUTS}.{index}"] = f"{gru}/{name}"


def _recorder() -> Any:
    from onnxscript import evaluator

    return evaluator.default()
