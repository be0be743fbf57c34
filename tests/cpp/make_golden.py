r"""Write golden files for the C++ library: random frozen GRUs, their inputs and outputs.

    python tests/cpp/make_golden.py golden.bin [--plans 500] [--first 0] [--largest BYTES]

`cpp/tests/golden_test.cpp` reads the file. It contains words of 8 bytes, and arrays, each after its
size in bytes and padded to words: the number of cases; then for each case the bytes of the file of
the GRU, T, N, and the arrays x, h0, lengths, y, h_n. Arrays that are absent have no bytes. Layouts
are those of the module. Values are float32, lengths int64. With --model, a small GRU of two layers
is saved, too. `packed.bin` and `gru.safetensors` of `cpp/tests` were made by

    cd cpp/tests && python ../../tests/cpp/make_golden.py packed.bin --plans 150 --largest 2800 \
        --model gru.safetensors

`golden.bin` has frozen files of version 1, which this program no longer writes.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

sys.path.append(str(Path(__file__).parents[1] / "interchange"))

from random_grus import KINDS, first_version, random_codes, random_gru

from quant_gru import FrozenQuantGRU, QuantConfig, QuantGRU

SPECIAL = (torch.inf, -torch.inf, 1e30, torch.nan)


@dataclass(frozen=True)
class Case:
    """A GRU with an input and what Python computes from it.

    Attributes:
        gru: The GRU.
        x: (T, N, C), or (N, T, C) with batch_first.
        h0: (layers * directions, N, H), or None.
        lengths: int64 (N,), or None.
        y: As x, with D * H features. Steps beyond the lengths are 0.
        h_n: As h0.
    """

    gru: FrozenQuantGRU
    x: Tensor
    h0: Tensor | None
    lengths: Tensor | None
    y: Tensor
    h_n: Tensor


def random_case(
    seed: int, kind: str, rounding: str = "half_even", rounding_input: str | None = None
) -> Case:
    """The same case for the same seed and kind; only its rules of rounding differ."""
    gru, rng = random_gru(seed, kind, far=True, rounding=rounding, rounding_input=rounding_input)
    T, N = rng.randint(1, 6), rng.choice((1, 2, 3, 5))
    x, h0, lengths = random_input(gru, rng, T, N)
    return Case(gru, x, h0, lengths, *run(gru, x, h0, lengths))


def random_input(
    gru: FrozenQuantGRU, rng: random.Random, T: int, N: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """An input, initial states and lengths, with infinities and NaN among them."""
    D, first = gru.shape.directions, gru._plan().cells[0][0]

    def real(quantizer: Any, *shape: int) -> Tensor:
        codes = random_codes(quantizer, rng, *shape)
        noise = torch.rand(shape, generator=torch.Generator().manual_seed(rng.randint(0, 1 << 30)))
        values = quantizer.dequantize(codes) + (noise - 0.5) * quantizer.scale
        if rng.random() < 0.3:
            values.view(-1)[rng.randrange(values.numel())] = rng.choice(SPECIAL)
        return values

    x = real(first.border, T, N, first.input_size)
    h0 = real(first.h, gru.shape.num_layers * D, N, first.hidden_size)
    h0 = h0 if rng.random() < 0.6 else None
    lengths = torch.tensor([rng.randint(1, T) for _ in range(N)]) if rng.random() < 0.4 else None
    if gru.batch_first:
        x = x.transpose(0, 1).contiguous()
    return x, h0, lengths


def run(
    gru: FrozenQuantGRU, x: Tensor, h0: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs and last states of padded sequences."""
    if lengths is None:
        return gru(x, h0)
    order = gru.batch_first
    packed = pack_padded_sequence(x, lengths, order, enforce_sorted=False)
    y, h_n = gru(packed, h0)
    return pad_packed_sequence(y, order, total_length=x.shape[1 if order else 0])[0], h_n


def saved(gru: FrozenQuantGRU) -> bytes:
    """The bytes of the file of a GRU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gru.safetensors"
        gru.save(path)
        return path.read_bytes()


def words(case: Case) -> bytes:
    """A case as the file has it."""
    T, N = case.x.shape[:2] if not case.gru.batch_first else (case.x.shape[1], case.x.shape[0])
    arrays = [case.x, case.h0, case.lengths, case.y, case.h_n]
    contents = [saved(case.gru)]
    contents += [b"" if each is None else each.contiguous().numpy().tobytes() for each in arrays]
    padded = [struct.pack("<q", len(each)) + each + bytes(-len(each) % 8) for each in contents]
    return padded[0] + struct.pack("<qq", T, N) + b"".join(padded[1:])


def write(path: Path, cases: list[Case]) -> None:
    """Write a golden file."""
    path.write_bytes(struct.pack("<q", len(cases)) + b"".join(map(words, cases)))


def frozen_gru(C: int, H: int, layers: int = 1) -> FrozenQuantGRU:
    """A calibrated GRU of one direction, the same for the same sizes."""
    torch.manual_seed(0)
    config = QuantConfig.int8().replace_globals(activation="pwl")
    gru = QuantGRU(C, H, num_layers=layers, config=config)
    gru.calibrate(torch.randn(20, 8, C))
    gru.finalize_calibration()
    return gru.freeze()


def main() -> None:
    """Write the file that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--plans", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--largest", type=int, help="leave out larger files of GRUs")
    parser.add_argument("--model", type=Path, help="where to save the small GRU")
    args = parser.parse_args()
    kinds = list(KINDS)
    cases = []
    for i in range(args.plans):
        case = random_case(args.first + i // len(kinds), kinds[i % len(kinds)])
        if args.largest is None or len(saved(case.gru)) <= args.largest:
            cases.append(case)
    write(args.path, cases)
    if args.model is not None:
        frozen_gru(4, 6, layers=2).save(args.model)


__all__ = [
    "KINDS", "Case", "first_version", "frozen_gru", "random_case", "random_input", "run", "saved",
    "words", "write",
]  # fmt: skip


if __name__ == "__main__":
    main()
