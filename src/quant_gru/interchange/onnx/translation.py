"""The translation tables that `torch.onnx.export` uses for GRUs.

This file alone depends on what torch does not document: the evaluator that is current while torch
calls a translation collects nodes of onnx_ir, it has a dict for the constants of a graph, and a
setting lets sizes of 1 be dynamic.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx.experimental._config

from quant_gru.interchange.onnx.builder import Builder, Names, onnx_ir
from quant_gru.interchange.onnx.calls import DOMAIN, INPUTS, OUTPUTS, call_of
from quant_gru.interchange.onnx.profiles import add_gru, check_profile
from quant_gru.interchange.onnx.recorded import operator, source_of

__all__ = ["INPUTS", "OUTPUTS", "any_size", "placeholders", "translations"]

Table = dict[Callable[..., Any], Callable[..., Any]]


def translations(profile: str) -> Table:
    """Return the table for `custom_translation_table` of `torch.onnx.export`.

    Args:
        profile: See `quant_gru.export_onnx`.

    Raises:
        QuantGRUError: `profile` is unknown, or the packages of ONNX export are not installed.
    """
    check_profile(profile)
    onnx_ir()

    uses: dict[int, int] = {}

    def quant_gru_onnx(x, h0, lengths, gru, directions, call):  # type: ignore[no-untyped-def]
        # a GRU that is called twice has its nodes twice; torch would write a function in full
        uses[gru] = use = uses.get(gru, -1) + 1
        recorder = _recorder()
        constants = getattr(recorder, "constant_farm", {}).setdefault(DOMAIN, {})
        b = Builder(Names(f"gru{gru}_{use}_"), recorder.opset.version, constants=constants)
        y, h_n = add_gru(b, source_of(gru), profile, x, h0, lengths)
        recorder.nodes.extend(b.nodes)
        return y, h_n

    return {operator: quant_gru_onnx}


def placeholders() -> Table:
    """Return the table by which a GRU is one node, which `calls.expand` replaces."""
    onnx_ir()

    def quant_gru_call(x, h0, lengths, gru, directions, call):  # type: ignore[no-untyped-def]
        node = call_of(x, h0, lengths, gru, call)
        _recorder().nodes.append(node)
        return tuple(node.outputs)

    return {operator: quant_gru_call}


def any_size() -> AbstractContextManager[Any]:
    """Return a context in which torch.export lets sizes of 1 be dynamic, where torch can."""
    settings: Any = torch.fx.experimental._config
    known = hasattr(settings, "backed_size_oblivious")
    return settings.patch(backed_size_oblivious=True) if known else nullcontext()


def _recorder() -> Any:
    from onnxscript import evaluator

    return evaluator.default()
