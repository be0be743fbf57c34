"""A run of a whole model in PyTorch, in which the results of its GRUs come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from quant_gru.execution.sequence_layout import Sequence
from quant_gru.modules.cell import FrozenQuantGRUCell, QuantGRUCell
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU

GRUS = (QuantGRU, FrozenQuantGRU)
CELLS = (QuantGRUCell, FrozenQuantGRUCell)

Answer = Callable[[torch.nn.Module, int, Sequence], "tuple[Tensor, Tensor] | None"]
"""answer(gru, call, sequence) -> output (T, N, D*H) and last states; None to let the GRU run."""


def split(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword inputs of an example, as `export_onnx` takes it."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if type(example) in (tuple, list) else (example,)), {}


def outputs_of(model: torch.nn.Module, example: Any) -> list[Tensor]:
    """Return the tensors and numbers in the output of a model, in its order."""
    args, kwargs = split(example)
    with torch.no_grad():
        leaves = pytree.tree_leaves(model(*args, **kwargs))
    return [
        torch.as_tensor(each).detach().cpu()
        for each in leaves
        if isinstance(each, (Tensor, bool, int, float))
    ]


@contextmanager
def as_exported(model: torch.nn.Module, quantized: bool) -> Iterator[None]:
    """Put a model into the state that a file has; restore modes and buffers afterwards.

    Args:
        model: The model.
        quantized: Whether its QuantGRUs compute in integers.
    """
    modes = [(module, module.training) for module in model.modules()]
    grus = [each for each in model.modules() if isinstance(each, QuantGRU)]
    flags = [(gru, gru.use_quantization, gru.calibrating, gru.export_mode) for gru in grus]
    buffers = [(each, each.clone()) for each in model.buffers()]
    try:
        for module, _ in modes:
            module.training = False
        for gru in grus:
            gru.use_quantization, gru.calibrating, gru.export_mode = quantized, False, False
        yield
    finally:
        for module, training in modes:
            module.training = training
        for gru, on, calibrating, export_mode in flags:
            gru.use_quantization, gru.calibrating, gru.export_mode = on, calibrating, export_mode
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextmanager
def answered(model: torch.nn.Module, answer: Answer) -> Iterator[None]:
    """Let calls of the GRUs of a model return what `answer` gives."""
    grus = [each for each in model.modules() if isinstance(each, GRUS)]
    before = [(gru, gru.__dict__.get("forward")) for gru in grus]
    try:
        for gru in grus:
            gru.__dict__["forward"] = _stand_in(gru, gru.forward, answer)
        yield
    finally:
        for gru, own in before:
            del gru.__dict__["forward"]
            if own is not None:
                gru.__dict__["forward"] = own


def _stand_in(gru: Any, own: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
    calls = 0

    def forward(input: Tensor | PackedSequence, hx: Tensor | None = None, *rest: Any) -> Any:
        nonlocal calls
        sequence = gru._normalize(input, hx)
        found = answer(gru, calls, sequence)
        calls += 1
        if found is None:
            return own(input, hx, *rest)
        data = input.data if isinstance(input, PackedSequence) else input
        dtype = gru._weight.dtype if isinstance(gru, QuantGRU) else data.dtype
        y, h_n = sequence.restore(*(each.to(data.device) for each in found), dtype)
        if isinstance(gru, CELLS):
            return y[0] if data.dim() == 2 else y[0, 0]
        return y, h_n

    return forward
