"""The floating-point tensors in the output of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.errors import QuantGRUError


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of nested tuples, lists and dicts, each with a name.

    Args:
        value: The output of a model; a PackedSequence stands for its data.
        name: Name of the whole; '' gives names such as 'output', 'output[0]' and 'scores'.
    """
    if isinstance(value, PackedSequence):
        value = value.data
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name or "output", value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from named_tensors(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from named_tensors(each, f"{name or 'output'}[{index}]")


def expect_tensors(found: Collection[Any], instead: str = "pass forward_fn") -> None:
    """Raise if a model has given no tensor of floating point.

    Args:
        found: What `named_tensors` yielded.
        instead: What the caller can do, for the message.

    Raises:
        QuantGRUError: `found` is empty.
    """
    if not found:
        raise QuantGRUError(
            f"Expected the model to give a tensor of floating point, got none; {instead}"
        )
