"""The data of the demo: sequences, tasks, and scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quant_gru.demo.errors import DataError

TEST_SHARE = 0.25


@dataclass(frozen=True)
class Sequences:
    """Labelled sequences of different lengths, padded with zeros at the end.

    Attributes:
        features: float32 (N, T, F), where T is the length of the longest sequence.
        lengths: int64 (N,), valid steps of each sequence, 1..T.
        labels: int64 (N,), classes.
    """

    features: Tensor
    lengths: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: Tensor) -> Sequences:
        """Return the sequences at `index`, int64 (M,)."""
        return Sequences(self.features[index], self.lengths[index], self.labels[index])

    def spread(self, count: int) -> Sequences:
        """Return at most `count` evenly spaced sequences, so that ordered data keep all classes."""
        count = min(count, len(self))
        return self.select(torch.arange(count) * len(self) // count)

    def batches(self, size: int) -> Iterator[Sequences]:
        """Yield consecutive batches of `size` sequences; the last one may be smaller."""
        for index in torch.arange(len(self)).split(size):
            yield self.select(index)


@dataclass(frozen=True)
class Task:
    """A classification task: `n_classes` classes, training data and test data.

    Attributes:
        name: Description of the data for readers.
        n_classes: Number of classes.
        train: Sequences for training and calibration.
        test: Sequences for every figure of the report.
        epochs: Default number of training epochs.
    """

    name: str
    n_classes: int
    train: Sequences
    test: Sequences
    epochs: int

    @property
    def n_features(self) -> int:
        """Features per step."""
        return self.train.features.shape[2]


def digits_task(seed: int) -> Task:
    """Return scikit-learn's 1797 handwritten digits as rows: 8 steps of 8 pixels in [0, 1].

    Args:
        seed: Selects which quarter of each class is the test set.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise DataError(
            "Expected scikit-learn to be installed (it brings the handwritten digits), "
            f"got no module {error.name!r}; run: pip install scikit-learn"
        ) from error
    digits = load_digits()
    features = torch.tensor(digits.images / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    lengths = torch.full((len(labels),), features.shape[1])
    everything = Sequences(features, lengths, labels)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=TEST_SHARE, stratify=digits.target, random_state=seed
    )
    return Task(
        name="handwritten digits (scikit-learn)",
        n_classes=10,
        train=everything.select(torch.from_numpy(train)),
        test=everything.select(torch.from_numpy(test)),
        epochs=30,
    )
