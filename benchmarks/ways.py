"""All ways of calling a QuantGRU against the plain one: ratios measured in one run.

    python benchmarks/ways.py [--device cpu] [--config int8] [--repeats 5] [--only 'packed;one NaN']
    python benchmarks/ways.py --graphs

Whole calls from Python, one after the other, us. `nn.GRU` is called likewise (on a GPU it is cuDNN,
the best of TF32, float16 and bfloat16 where the way leaves the dtype open). `of plain` is our time
over that of the plain call; for training the plain call is a step, forward and backward. Behind a
Linear in autocast it stands against the same Linear in autocast with a plain call beside it. `at
most` is what the project allows a way to take. Lengths are drawn from T / 2 to T and not sorted.
`new lengths` has other ones, of as many rows, at each call, as batches of training have.
`--graphs` measures calls that were captured in CUDA graphs instead.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import cpu
import gpu
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from quant_gru import QuantConfig, QuantGRU

Sizes = tuple[int, int, int, int]
GPU_SIZES: list[Sizes] = [(32, 50, 64, 128), (32, 200, 128, 256)]
CPU_SIZES: list[Sizes] = [(1, 1, 40, 64), (32, 100, 64, 128)]
Run = Callable[[], object]
LOW, HALF, DOUBLE = torch.bfloat16, torch.float16, torch.float64
NEW_LENGTHS = 48  # more than layouts are kept of


@dataclass(frozen=True)
class Way:
    """A way of calling.

    Attributes:
        options: Of the GRU.
        dtype: Of the input.
        module: dtype of the module, where it is cast.
        how: What is done with module and input, see `call_of`.
        more: Microseconds that it may take beside `times`; those of a CPU are none.
        times: How many times the plain call it may take.
        times_cpu: The same on a CPU; None for no goal.
    """

    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    module: torch.dtype | None = None
    how: str = ""
    more: float = 8.0
    times: float = 1.1
    times_cpu: float | None = None


INFERENCE = {
    "plain": Way(),
    "float16 input": Way(dtype=HALF, times_cpu=1.2),
    "bfloat16 input": Way(dtype=LOW, times_cpu=1.2),
    "float64 input": Way(dtype=DOUBLE, times_cpu=1.2),
    "float16 module": Way(dtype=HALF, module=HALF),
    "bfloat16 module": Way(dtype=LOW, module=LOW),
    "Linear before, autocast": Way(how="autocast"),
    "one NaN": Way(how="NaN", times_cpu=1.5),
    "unbatched": Way(how="unbatched"),
    "hx": Way(how="state"),
    "batch_first": Way({"batch_first": True}),
    "made in inference_mode": Way(how="inference", times_cpu=1.2),
    "frozen": Way(how="frozen"),
    "eval, gradients on": Way(how="gradients", more=40.0, times=1.0),
    "packed": Way(how="packed", more=40.0, times=1.0),
    "packed, new lengths": Way(how="new lengths", more=40.0, times=1.0),
    "packed, bidirectional": Way({"bidirectional": True}, how="packed", more=40.0, times=2.0),
    "bidirectional": Way({"bidirectional": True}, more=0.0, times=2.0),
    "two layers": Way({"num_layers": 2}, more=0.0, times=2.2),
    "torch.compile": Way(how="compiled", more=0.0, times=1.0),
}
TRAINING = {
    "train": Way(),
    "train, bfloat16 input": Way(dtype=LOW, more=0.0),
    "train, bfloat16 module": Way(dtype=LOW, module=LOW, more=0.0),
    "train, autocast": Way(how="autocast", more=0.0),
    "train, packed": Way(how="packed", more=40.0, times=1.0),
    "train, packed, new lengths": Way(how="new lengths", more=40.0, times=1.0),
    "train, two layers": Way({"num_layers": 2}, more=0.0, times=2.2),
    "train, bidirectional": Way({"bidirectional": True}, more=0.0, times=2.0),
    "train, torch.compile": Way(how="compiled", more=0.0, times=1.0),
}


class Beside(nn.Module):
    """A GRU and a Linear that take the same input, and know nothing of each other."""

    def __init__(self, linear: nn.Module, gru: nn.Module) -> None:
        super().__init__()
        self.linear, self.gru = linear, gru

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output and last states of the GRU, and what the Linear gives."""
        return (*self.gru(x), self.linear(x))


def packed_anew(x: Tensor, index: int) -> PackedSequence:
    """Rows of x packed with other lengths for each index, and always as many steps in all."""
    T, N, _ = x.shape
    draw, steps = random.Random(index), -(-3 * T // 4) * N
    lengths = [T, *(draw.randint(max(T // 2, 1), T) for _ in range(N - 1))]
    while N > 1 and sum(lengths) != steps:
        row, change = draw.randrange(1, N), 1 if sum(lengths) < steps else -1
        lengths[row] = min(max(lengths[row] + change, 1), T)
    return pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)


def call_of(way: Way, gru: nn.Module, x: Tensor, context: type[Any]) -> Run:
    """A call of a GRU the way it says, whose input stands for (T, N, C)."""
    T, N, C = x.shape
    batches: Iterator[tuple[Any, ...]] | None = None
    given: tuple[Any, ...] = (x.transpose(0, 1).contiguous() if gru.batch_first else x,)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if way.how == "packed":
        lengths = torch.randint(max(T // 2, 1), T + 1, (N,))
        given = (pack_padded_sequence(x, lengths, enforce_sorted=False),)
    elif way.how == "new lengths":
        batches = cycle([(packed_anew(x, index),) for index in range(NEW_LENGTHS)])
    elif way.how == "NaN":
        given = (x.index_put((torch.tensor(T // 2), torch.tensor(0)), torch.tensor(torch.nan)),)
    elif way.how == "unbatched":
        given = (x[:, 0].contiguous(),)
    elif way.how == "state":
        given = (x, x.new_zeros(gru.num_layers * (1 + gru.bidirectional), N, gru.hidden_size))
    elif way.how in ("autocast", "beside"):
        linear = nn.Linear(C, C, device=x.device)
        if way.how == "beside" and gru.training:
            # behind the Linear, the gradient of the GRU's input is computed, too
            given = (x.clone().requires_grad_(),)
        gru = nn.Sequential(linear, gru) if way.how == "autocast" else Beside(linear, gru)
        around = partial(torch.autocast, x.device.type, LOW)
    elif way.how == "compiled":
        gru = torch.compile(gru)

    def run() -> object:
        with context(), around():
            return gru(*(given if batches is None else next(batches)))

    return run


def step_of(call: Run, parameters: list[Tensor], x: Tensor) -> Run:
    """Forward and backward, from a given gradient of the output."""
    first: Any = call()
    y = first[0].data if hasattr(first[0], "batch_sizes") else first[0]
    grad, wanted = torch.randn_like(y), [*([x] if x.requires_grad else []), *parameters]

    def run() -> object:
        result: Any = call()
        y = result[0].data if hasattr(result[0], "batch_sizes") else result[0]
        return torch.autograd.grad(y, wanted, grad)

    return run


def engine(way: Way, gru: nn.Module, x: Tensor, trains: bool) -> Run:
    """A call, or a step of training."""
    if way.module is not None:
        gru = gru.to(way.module)
    x = x.to(way.dtype)
    if not trains:
        return call_of(way, gru, x, torch.enable_grad if way.how == "gradients" else torch.no_grad)
    return step_of(call_of(way, gru.train(), x, nullcontext), list(gru.parameters()), x)


def ours(way: Way, sizes: Sizes, config: QuantConfig, device: str) -> tuple[nn.Module, Tensor]:
    """A calibrated QuantGRU and an input."""
    N, T, C, H = sizes
    torch.manual_seed(0)
    x = torch.randn(T, 1 if way.how == "unbatched" else N, C, device=device)
    with torch.inference_mode(way.how == "inference"):
        gru = QuantGRU(C, H, config=config, device=device, **way.options).eval()
        gru.calibrate(x.transpose(0, 1) if gru.batch_first else x)
        gru.finalize_calibration()
        gru.use_quantization = True
    return (gru.freeze() if way.how == "frozen" else gru), x


def theirs(way: Way, sizes: Sizes, device: str, trains: bool) -> dict[str, Run]:
    """The same call of nn.GRU, in the dtypes that are open."""
    _, _, C, H = sizes
    _, x = ours(way, sizes, QuantConfig.int8(), device)
    kinds = [way.module or torch.float32]
    if device == "cuda" and way.dtype is torch.float32 and way.how not in ("autocast", "NaN"):
        kinds += [HALF, LOW]
    found = {}
    for kind in kinds:
        gru = nn.GRU(C, H, device=device, dtype=kind, **way.options).eval()
        plain = Way(way.options, kind, None, way.how if way.how != "frozen" else "")
        found[f"nn.GRU {kind}"] = engine(plain, gru, x, trains)
    return found


def measure(engines: dict[str, Run], device: str, repeats: int, graphs: bool) -> dict[str, float]:
    """Median microseconds of each."""
    if graphs:
        captured = {name: gpu.captured(each) for name, each in engines.items()}
        return gpu.medians(captured, repeats)
    if device == "cuda":
        return gpu.medians(engines, repeats)
    return {name: 1e6 * t for name, t in cpu.medians(engines, repeats).items()}


def table(ways: dict[str, Way], sizes: Sizes, args: argparse.Namespace, chosen: list[str]) -> None:
    """Measure and print the ways of one size."""
    config, trains = cpu.CONFIGS[args.config], ways is TRAINING
    first = next(iter(ways))
    print(
        f"\n{','.join(map(str, sizes)):>26} {'nn.GRU':>9} {'ours':>9} {'ratio':>8} {'of plain':>9}"
        f" {'at most':>9}"
    )
    base = ours(ways[first], sizes, config, args.device)
    for name, way in ways.items():
        if chosen and name not in chosen and name != first:
            continue
        # the plain call takes turns with each of the others
        engines = {"plain": engine(ways[first], *base, trains)}
        if name != first:
            engines["ours"] = engine(way, *ours(way, sizes, config, args.device), trains)
        if way.how == "unbatched":
            row = (1, *sizes[1:])
            engines["plain"] = engine(ways[first], *ours(way, row, config, args.device), trains)
        if way.how == "autocast":
            engines["plain"] = engine(Way(how="beside"), *base, trains)
        if way.how != "compiled" or not trains:
            engines |= theirs(way, sizes, args.device, trains)
        t = measure(engines, args.device, args.repeats, args.graphs)
        mine = t.get("ours", t["plain"])
        other = min((v for k, v in t.items() if k.startswith("nn.GRU")), default=float("nan"))
        more = way.more if args.device == "cuda" else 0.0
        times = way.times if args.device == "cuda" else way.times_cpu
        limited = times is not None and name != first and sizes[0] > 1
        limit = f"{times * t['plain'] + more:9.1f}" if limited else ""
        print(
            f"{name:>26} {other:9.1f} {mine:9.1f} {other / mine:7.2f}x {mine / t['plain']:8.2f}x"
            f" {limit:>9}",
            flush=True,
        )


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--config", choices=cpu.CONFIGS, default="int8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="ways, separated by semicolons")
    parser.add_argument("--sizes", type=int, default=9, help="how many sizes")
    parser.add_argument("--graphs", action="store_true")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    chosen = [each.strip() for each in args.only.split(";") if each.strip()]
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(
        f"{name}; torch {torch.__version__}; {args.config}; {torch.get_num_threads()} threads; "
        f"medians of {args.repeats}, us"
    )
    for sizes in (GPU_SIZES if args.device == "cuda" else CPU_SIZES)[: args.sizes]:
        table(INFERENCE, sizes, args, chosen)
        table(TRAINING, sizes, args, chosen)


if __name__ == "__main__":
    main()
