"""Examples of other sizes: another batch, another length, for inputs whose sizes have names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Sizes:
    """The named sizes of the inputs of a file.

    Attributes:
        axes: Name of a size -> (index of the input, axis) wherever it is.
        values: Name of a size -> its value in the example.
    """

    axes: Mapping[str, Sequence[tuple[int, int]]]
    values: Mapping[str, int]

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """Return names grouped by value: sizes that must be equal are equal in the example."""
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self.values[name], []).append(name)
        return list(found.values())


def tensors_of(example: Any) -> list[Tensor]:
    """Return the tensors of an example, in the order of a file's inputs."""
    return [each for each in pytree.tree_leaves(example) if isinstance(each, Tensor)]


def sizes_of(inputs: Sequence[Any], example: Any) -> Sizes:
    """Return the named sizes of the inputs of a graph, `onnx.ValueInfoProto`, in an example."""
    axes: dict[str, list[tuple[int, int]]] = {}
    values: dict[str, int] = {}
    for index, (each, tensor) in enumerate(zip(inputs, tensors_of(example), strict=True)):
        for axis, dim in enumerate(each.type.tensor_type.shape.dim):
            # sizes that are computed of others change with them
            if dim.dim_param.isidentifier():
                axes.setdefault(dim.dim_param, []).append((index, axis))
                values[dim.dim_param] = tensor.shape[axis]
    return Sizes(axes, values)


def others(example: Any, sizes: Sizes, names: Sequence[str]) -> Iterator[Any]:
    """Yield examples in which these sizes are others: twice as large, one more, one less, half."""
    for change in (lambda n: 2 * n, lambda n: n + 1, lambda n: n - 1, lambda n: (n + 1) // 2):
        wanted = {name: change(sizes.values[name]) for name in names}
        if all(new > 0 and new != sizes.values[name] for name, new in wanted.items()):
            yield _resized(example, sizes, wanted)


def _resized(example: Any, sizes: Sizes, wanted: Mapping[str, int]) -> Any:
    found = list(tensors_of(example))
    for name, new in wanted.items():
        for index, axis in sizes.axes[name]:
            found[index] = _stretched(found[index], axis, new)
    left = iter(found)
    return pytree.tree_map_only(Tensor, lambda _: next(left), example)


def _stretched(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Return a tensor with another size of one axis and values of its own."""
    if size <= tensor.shape[axis]:
        return tensor.narrow(axis, 0, size)
    if tensor.is_floating_point():
        more = torch.cat((tensor, tensor.flip(axis)), dim=axis)
    else:
        # lengths that fall along the batch still do
        more = tensor.repeat_interleave(2, dim=axis)
    return more.narrow(axis, 0, size)


def freeze_sizes(model: Any, sizes: Mapping[str, int]) -> None:
    """Replace named sizes by numbers in inputs, outputs and values of an `onnx.ModelProto`."""
    graph = model.graph
    for each in (*graph.input, *graph.output, *graph.value_info):
        if each.type.HasField("tensor_type"):
            for dim in each.type.tensor_type.shape.dim:
                if dim.dim_param in sizes:
                    dim.dim_value = sizes[dim.dim_param]
