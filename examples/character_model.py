"""A language model of characters: a GRU says which character comes next.

    python examples/character_model.py --data tinyshakespeare.txt

Any text in UTF-8 will do; its last tenth is the test set. Training takes windows of it, the test
reads it in 64 rows from end to end, the state going on from piece to piece. The figure is the mean
number of bits that a character of the test set takes.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from common import Processes, Result, Task, parser, run
from torch import Tensor, nn

TEST_SHARE = 0.1
ROWS = 64
PIECE = 256


class Model(nn.Module):
    """Embedding, GRU, linear layer.

    Args:
        n_characters: Size of the alphabet, K.
        hidden_size: Units of the GRU, H.
    """

    def __init__(self, n_characters: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_characters, hidden_size // 2)
        self.gru = nn.GRU(hidden_size // 2, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, n_characters)

    def forward(self, characters: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores of the next character.

        Args:
            characters: int64 (N, T).
            state: (1, N, H), or None for zeros.

        Returns:
            (N, T, K), and the state after the last character (1, N, H).
        """
        output, state = self.gru(self.embedding(characters), state)
        return self.head(output), state


class CharacterModel(Task):
    """The next character of a text.

    Args:
        data: The text.
        device: Where it lives.
        hidden_size: Units of the GRU.
        window: Characters of a training sample.
    """

    name = "characters"
    batch_size = 64
    learning_rate = 4e-3
    further_rate = 1e-3

    def __init__(self, data: Path, device: torch.device, hidden_size: int, window: int) -> None:
        try:
            text = data.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"Expected '{data}' to be a text in UTF-8, got {error}") from None
        alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
        codes = torch.tensor([alphabet[character] for character in text], device=device)
        border = round(len(codes) * (1 - TEST_SHARE))
        length = (len(codes) - border - 1) // ROWS
        if length < 1 or border <= window + self.batch_size:
            raise SystemExit(
                f"Expected '{data}' to be a text of {10 * ROWS + 10 * window} characters at least, "
                f"got {len(codes)}"
            )
        self.train = codes[:border].unfold(0, window + 1, 1)
        test = codes[border : border + ROWS * length + 1]
        self.test = test[:-1].view(ROWS, length), test[1:].view(ROWS, length)
        self.n_characters, self.hidden_size = len(alphabet), hidden_size
        self.train_size, self.test_size = len(self.train), ROWS

    def model(self) -> nn.Module:
        """A language model."""
        return Model(self.n_characters, self.hidden_size)

    def loss(self, model: nn.Module, index: Tensor) -> Tensor:
        """Cross-entropy of windows, in nats."""
        window = self.train[index]
        scores, _ = model(window[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())

    def score(self, model: nn.Module, index: Tensor) -> list[float]:
        """Sum of bits, number of characters."""
        characters, following = (part[index] for part in self.test)
        bits, state = 0.0, None
        pieces = zip(characters.split(PIECE, 1), following.split(PIECE, 1), strict=True)
        for piece, right in pieces:
            scores, state = model(piece, state)
            loss = nn.functional.cross_entropy(
                scores.flatten(0, 1), right.flatten(), reduction="sum"
            )
            bits += loss.item() / math.log(2)
        return [bits, float(characters.numel())]

    def report(self, means: list[float]) -> dict[str, float]:
        """Bits per character."""
        return {"bits per character": means[0]}


def main(arguments: list[str] | None = None) -> list[Result]:
    """Command line."""
    options = parser(__doc__ or "", steps=2000)
    options.add_argument("--data", type=Path, required=True, help="a text file")
    options.add_argument("--hidden-size", type=int, default=256)
    options.add_argument("--window", type=int, default=100, help="characters of a sample")
    chosen = options.parse_args(arguments)
    processes = Processes.join(chosen.device)
    try:
        task = CharacterModel(chosen.data, processes.device, chosen.hidden_size, chosen.window)
        return run(task, chosen, processes)
    finally:
        processes.leave()


if __name__ == "__main__":
    main()
