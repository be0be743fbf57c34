"""Batches with the indices of their samples in the training set."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils import data

from actnn.errors import ActNNError


class IndexedDataset(data.Dataset[tuple[int, Any]]):
    """A dataset whose items are (index, item of another dataset)."""

    def __init__(self, dataset: data.Dataset[Any]) -> None:
        if isinstance(dataset, data.IterableDataset) or not isinstance(dataset, Sized):
            raise ActNNError(
                f"Expected a dataset with indices and a length, got {type(dataset).__name__}"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]


class DataLoader(data.DataLoader[tuple[Any, Any]]):
    """PyTorch's DataLoader, which yields (indices, batch).

    `QScheme.batch = indices` before a step gives each sample statistics of its own.

    Args:
        dataset: A dataset with a length.
        arguments: As for torch.utils.data.DataLoader.
        named: Likewise.

    Example:
        >>> loader = DataLoader(torch.utils.data.TensorDataset(images), batch_size=2)
        >>> for indices, batch in loader:
        ...     QScheme.batch = indices
    """

    def __init__(self, dataset: data.Dataset[Any], *arguments: Any, **named: Any) -> None:
        super().__init__(IndexedDataset(dataset), *arguments, **named)
