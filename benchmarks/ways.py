"""Ways of calling on a GPU against cuDNN: lengths, directions, layers, states, many units.

    python benchmarks/ways.py [--config int8] [--repeats 3]

Whole calls, quantize and dequantize included, us; `cuDNN` is nn.GRU called likewise, the best of
TF32, float16 and bfloat16. `of plain` is our time over that of the plain call. Lengths are drawn
from T / 2 to T and not sorted; graphs of packed sequences are not made.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from cpu import CONFIGS
from gpu import Engine, fastest, in_graphs, medians, quantized
from torch.nn.utils.rnn import pack_padded_sequence

from quant_gru import QuantConfig, QuantGRU

Sizes = tuple[int, int, int, int]
SIZES: list[Sizes] = [(32, 200, 128, 256), (64, 200, 256, 512)]
LARGE: Sizes = (32, 100, 512, 1500)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "state": {},
    "lengths": {},
    "batch first": {"batch_first": True},
    "two directions": {"bidirectional": True},
    "lengths, two directions": {"bidirectional": True},
    "two layers": {"num_layers": 2},
}


def called(way: str, gru: torch.nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> Engine:
    """A call of a GRU; x is (T, N, C)."""
    if way.startswith("lengths"):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return lambda: gru(packed)
    if way == "batch first":
        x = x.transpose(0, 1).contiguous()
    if way != "state":
        return lambda: gru(x)
    h0 = x.new_zeros(1, x.shape[1], gru.hidden_size)
    return lambda: gru(x, h0)


def engines(way: str, sizes: Sizes, config: QuantConfig) -> dict[str, Engine]:
    """Ours, and cuDNN's of three types."""
    N, T, C, H = sizes
    torch.manual_seed(0)
    x = torch.randn(T, N, C, device="cuda")
    lengths = torch.randint(T // 2, T + 1, (N,))
    ours = quantized(QuantGRU(C, H, config=config, **WAYS[way]), x)
    found = {"ours": called(way, ours, x, lengths)}
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        plain = torch.nn.GRU(C, H, device="cuda", dtype=kind, **WAYS[way]).eval()
        found[f"cudnn {kind}"] = called(way, plain, x.to(kind), lengths)
    return found


def measure(way: str, sizes: Sizes, config: QuantConfig, repeats: int) -> dict[str, float]:
    """Microseconds by engine, eager and in graphs."""
    of = engines(way, sizes, config)
    return medians(of, repeats) | ({} if way.startswith("lengths") else in_graphs(of, repeats))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--config", choices=CONFIGS, default="int8")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}; {args.config}; "
        f"medians of {args.repeats}, us"
    )
    print(
        f"{'N,T,C,H':>16} {'way':>23} {'cuDNN':>9} {'ours':>9} {'ratio':>8}"
        f" {'graph':>9} {'ours':>9} {'ratio':>8} {'of plain':>8}"
    )
    with torch.no_grad():
        for sizes, ways in [*((each, list(WAYS)) for each in SIZES), (LARGE, ["plain"])]:
            plain = 0.0
            for way in ways:
                t = measure(way, sizes, CONFIGS[args.config], args.repeats)
                plain = plain or t["ours"]
                graph = f"{'-':>9} {'-':>9} {'-':>8}"
                eager = fastest(t, "cudnn")
                if "graph ours" in t:
                    theirs, ours = fastest(t, "graph cudnn"), t["graph ours"]
                    graph = f"{theirs:9.1f} {ours:9.1f} {theirs / ours:7.2f}x"
                print(
                    f"{','.join(map(str, sizes)):>16} {way:>23} {eager:9.1f} {t['ours']:9.1f}"
                    f" {eager / t['ours']:7.2f}x {graph} {t['ours'] / plain:7.2f}x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
