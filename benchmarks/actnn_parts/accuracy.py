"""What training with compressed activations costs in accuracy: equal schedules, several seeds.

    python benchmarks/actnn.py accuracy --data ../shared/data
    python benchmarks/actnn.py accuracy --data ../shared/data --tasks text --steps 300
    python benchmarks/actnn.py accuracy --data ../shared/data --seeds 1 --epochs 1 --images 64 \
        --batch 32 --steps 2

cifar: a network like ResNet-18 on 20 000 images of CIFAR-10, tested on 5 000 others
(cifar10_train.npz and cifar10_test.npz: JPEG files end to end, with offsets and label; Pillow or
torchvision decodes them). text: a small GPT on the characters of tinyshakespeare.txt, with its loss
on the last tenth.

Rows: exact, 4 bits, 2 bits adaptive. `difference` is to exact with the same seed, on average.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import actnn

ROWS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "exact": lambda model, seed: model,
    "4 bits": lambda model, seed: actnn.compress(model, bits=4, seed=seed),
    "2 bits adaptive": lambda model, seed: actnn.compress(model, level="L3", seed=seed),
}


class Residual(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C', H / stride, W / stride)."""
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(y + self.shortcut(x))


def small_resnet(width: int = 64) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    inputs = width
    for stage in range(4):
        outputs = width << stage
        for block in range(2):
            layers.append(Residual(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(*layers)


def decode(jpegs: list[bytes]) -> Tensor:
    """Images (n, 3, 32, 32), uint8."""
    try:
        from PIL import Image
    except ImportError:
        try:
            from torchvision.io import ImageReadMode, decode_jpeg
        except ImportError:
            raise SystemExit("Expected Pillow or torchvision for JPEG files, got neither") from None
        raw = [torch.frombuffer(bytearray(jpeg), dtype=torch.uint8) for jpeg in jpegs]
        return torch.stack([decode_jpeg(each, ImageReadMode.RGB) for each in raw])
    pictures = [np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB")) for jpeg in jpegs]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


def load_cifar(path: Path, images: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """At most so many images (n, 3, 32, 32), normalized, and labels (n,)."""
    with np.load(path) as file:
        data, offsets, labels = file["jpeg"], file["offsets"], file["label"][:images]
    jpegs = [data[a:b].tobytes() for a, b in pairwise(offsets[: images + 1])]
    x = decode(jpegs).to(device).float() / 255
    mean = torch.tensor([0.491, 0.482, 0.447], device=device).view(1, 3, 1, 1)
    return (x - mean) / 0.25, torch.from_numpy(labels.astype(np.int64)).to(device)


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Random shifts by up to 4 pixels, and mirror images, of (N, 3, 32, 32)."""
    n = len(x)
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    shift = torch.randint(9, (2, n), generator=generator, device=x.device)
    grid = torch.arange(32, device=x.device)
    rows, columns = (grid + each.unsqueeze(1) for each in shift)
    index = torch.arange(n, device=x.device)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]
    mirrored = torch.rand(n, generator=generator, device=x.device) < 0.5
    moved = torch.where(mirrored[:, None, None, None], moved.flip(2), moved)
    return moved.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def train_cifar(
    row: str, seed: int, data: Any, epochs: int, batch: int, device: torch.device
) -> float:
    """Test accuracy in percent."""
    (x, y), (x_test, y_test) = data
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    model = small_resnet().to(device, memory_format=torch.channels_last)
    ROWS[row](model, seed)
    steps = epochs * (len(x) // batch)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator, device=device)
        for index in order[: len(x) // batch * batch].split(batch):
            images = augmented(x[index], generator)
            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), y[index], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        right = sum(
            (model(images).argmax(1) == labels).sum().item()
            for images, labels in zip(x_test.split(1000), y_test.split(1000), strict=True)
        )
    return 100 * right / len(y_test)


class Characters(nn.Module):
    """A GPT of six blocks on characters."""

    def __init__(self, symbols: int, width: int = 256, length: int = 256) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 8, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(6)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) to (N, T, symbols)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.symbols(tokens) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def train_text(row: str, seed: int, data: Any, steps: int, device: torch.device) -> float:
    """Loss on the last tenth of the text, in nats."""
    train, test, symbols = data
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    model = Characters(symbols).to(device)
    ROWS[row](model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    offsets = torch.arange(257, device=device)

    def loss_of(starts: Tensor, text: Tensor) -> Tensor:
        window = text[starts[:, None] + offsets]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(window[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())

    for _ in range(steps):
        starts = torch.randint(len(train) - 257, (64,), generator=generator, device=device)
        optimizer.zero_grad()
        loss_of(starts, train).backward()
        optimizer.step()
        rates.step()
    model.eval()
    with torch.no_grad():
        starts = torch.arange(0, len(test) - 257, 257, device=device)
        return statistics.mean(loss_of(part, test).item() for part in starts.split(64))


def load_text(path: Path, device: torch.device) -> tuple[Tensor, Tensor, int]:
    raw = torch.from_numpy(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64))
    symbols, tokens = raw.unique(return_inverse=True)
    tokens = tokens.to(device)
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:], len(symbols)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=["cifar", "text"], default=["cifar", "text"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12, help="of cifar")
    parser.add_argument("--steps", type=int, default=1000, help="of text")
    parser.add_argument("--batch", type=int, default=256, help="of cifar")
    parser.add_argument("--images", type=int, default=20_000, help="of cifar, at most")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    results: dict[str, dict[str, list[float]]] = {}
    for task in options.tasks:
        if task == "cifar":
            data: Any = [
                load_cifar(options.data / f"cifar10_{part}.npz", options.images, device)
                for part in ("train", "test")
            ]
        else:
            data = load_text(options.data / "tinyshakespeare.txt", device)
        results[task] = {}
        for row in options.rows:
            found, start = [], time.perf_counter()
            for seed in range(options.seeds):
                if task == "cifar":
                    found.append(
                        train_cifar(row, seed, data, options.epochs, options.batch, device)
                    )
                else:
                    found.append(train_text(row, seed, data, options.steps, device))
            results[task][row] = found
            exact = results[task].get("exact", [math.nan] * len(found))
            difference = statistics.mean(a - b for a, b in zip(found, exact, strict=True))
            print(
                f"{task:<6} {row:<16} {statistics.mean(found):8.3f}  difference {difference:+.3f}  "
                f"seeds {' '.join(f'{each:.3f}' for each in found)}  "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
            if options.json:
                Path(options.json).write_text(json.dumps({"device": name, "results": results}))
