"""The demo's classifier: a GRU that reads a sequence, and a linear layer with class scores."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence


class SequenceClassifier(nn.Module):
    """`Linear(h_T)`, where h_T is the GRU's state after the last valid step of each sequence.

    Example:
        >>> model = SequenceClassifier(n_features=8, hidden_size=64, n_classes=10)
        >>> model(torch.rand(2, 5, 8), lengths=torch.tensor([5, 3])).shape
        torch.Size([2, 10])
    """

    def __init__(self, n_features: int, hidden_size: int, n_classes: int) -> None:
        super().__init__()
        self.gru = nn.GRU(n_features, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, n_classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return class scores.

        Args:
            x: (N, T, F), padded at the end.
            lengths: int64 (N,), valid steps of each sequence; all T if None.

        Returns:
            (N, C).
        """
        if lengths is None:
            _, last = self.gru(x)
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            _, last = self.gru(packed)
        scores: Tensor = self.head(last[-1])
        return scores
