"""Quantized training against float training: ratios measured in one run.

    python benchmarks/training.py [--config int8] [--precision bf16] [--shapes 3]
    python benchmarks/training.py --device cpu [--threads 1] [--memory]
    python benchmarks/training.py --device cpu --correct-bias
    python benchmarks/training.py --eager [--old FOLDER]
    torchrun --nproc-per-node 2 benchmarks/training.py --ddp

One step is forward and backward: gradients of the input and of all weights, from a given gradient
of the output. `ours` is QuantGRU in training mode, whose weights are quantized anew each time.

On a GPU `cuDNN` is nn.GRU, the best of TF32, float16 and bfloat16, eager and from CUDA graphs;
`nothing` is an eager step of a function that allocates its results and does nothing else;
`us/step` is ours from a graph over the steps of the sequence; `of mul` compares the fewest
multiply-accumulates, 9 N T H (C + H), with the rate of a large bfloat16 matrix product. On the CPU
it stands against nn.GRU in float32, on as many threads. `loop` is the usual way: a loop over time
with fake quantization (`fake_quant.py`).

`bytes` are what forward keeps for backward, per unit and step, beside its input and output.
`error` compares the gradient of weight_hh with float64 straight-through gradients.

`--correct-bias` instead compares our step with and without the correction of the input bias, which
follows the weights.

`--eager` instead measures eager steps of small sizes: `thread` are those whose backward runs on the
calling thread. With `--old`, a folder that contains the package `quant_gru` of another version, for
example by `pip install --target FOLDER CHECKOUT`, both versions take turns.

`--memory` instead measures, under Linux, what our backward takes on the CPU while it runs, beside
all that was there and the gradients it gives.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import cpu
import torch
import torch.distributed as dist
from fake_quant import FakeQuantGRU
from torch import Tensor, nn

from calibration import machine
from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer import cell as reference
from quant_gru.integer.backward import Tape, straight_through

CPU_SHAPES = [
    (32, 100, 64, 128),
    (32, 100, 128, 256),
    (128, 50, 128, 256),
    (1, 100, 64, 128),
    (1, 100, 128, 256),
]
MEMORY_SHAPES = [
    *CPU_SHAPES,
    (32, 1000, 128, 256),
    (1024, 50, 128, 256),
]
EAGER_SHAPES = [
    (1, 100, 64, 128),
    (16, 100, 64, 128),
    (32, 50, 64, 128),
    (256, 50, 128, 128),
    (512, 20, 100, 100),
]
LOOP_STEPS = 20
SCALED_SHAPES = [(32, 200, 128, 256), (64, 200, 256, 512), (64, 200, 512, 1024)]
NAN = float("nan")

Engine = Callable[[], object]
Shape = tuple[int, int, int, int]


def quantized(shape: Shape, config: QuantConfig, device: str, precision: str | None) -> QuantGRU:
    """A calibrated GRU in training mode."""
    N, T, C, H = shape
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=config).to(device)
    gru.calibrate(torch.randn(min(T, 100), min(N, 32), C, device=device))
    gru.finalize_calibration()
    gru.use_quantization = True
    if precision is not None:
        gru.precision = precision
    return gru.train()


def step(gru: nn.Module, x: Tensor, grad: Tensor) -> Engine:
    """Forward and backward."""
    wanted = [x, *gru.parameters()]
    return lambda: torch.autograd.grad(gru(x)[0], wanted, grad)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, size: int, x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, *weights)
        T, N, _ = x.shape
        return x.new_empty(T, N, size), x.new_empty(1, N, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *map(torch.empty_like, ctx.saved_tensors)


def nothing(gru: QuantGRU, x: Tensor, grad: Tensor) -> Engine:
    """What autograd and PyTorch's allocations alone take."""
    weights = list(gru.parameters())

    def run() -> object:
        output, _ = _Nothing.apply(gru.hidden_size, x, *weights)
        return torch.autograd.grad(output, [x, *weights], grad)

    return run


def inputs(shape: Shape, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """X (T, N, C), which asks for a gradient, and a gradient of the output (T, N, H)."""
    N, T, C, H = shape
    x = torch.randn(T, N, C, device=device).to(dtype).requires_grad_()
    return x, torch.randn(T, N, H, device=device).to(dtype)


def kept(gru: nn.Module, x: Tensor) -> float:
    """Bytes that forward keeps for backward, per unit and step, beside its input and output."""
    known = {t.untyped_storage().data_ptr() for t in (x, *gru.parameters())}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    if x.is_cuda:
        gru(x)
        # as asked for: blocks that are given may be larger by up to a megabyte each
        asked = "requested_bytes.all.current"
        before = torch.cuda.memory_stats()[asked]
        output = gru(x)
        total = torch.cuda.memory_stats()[asked] - before - sum(t.nbytes for t in output)
    else:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = gru(x)
        known |= {t.untyped_storage().data_ptr() for t in output}
        total = sum(size for pointer, size in found.items() if pointer not in known)
    T, N, _ = x.shape
    return total / (T * N * output[0].shape[2])


def error(gru: QuantGRU, shape: Shape) -> float:
    """Distance of the gradient of weight_hh from that of the definition, on a few rows."""
    N, T, C, H = shape
    device = gru.weight_hh_l0.device
    x, grad = inputs((min(N, 4), min(T, 20), C, H), str(device))
    (found,) = torch.autograd.grad(gru(x)[0], [gru.weight_hh_l0], grad)
    plan = copy.deepcopy(gru).cpu()._plan().cells[0][0]
    codes = plan.x.quantize(x.detach().cpu())
    h0 = plan.h.quantize(torch.zeros(codes.shape[1], H))
    tape = Tape(plan, codes, h0, reference.run(plan, codes, h0)[0])
    expected = straight_through(tape, grad.cpu(), torch.zeros(h0.shape)).R
    assert expected is not None
    return ((found.cpu().double() - expected).norm() / expected.norm()).item()


def loop_of(shape: Shape, device: str) -> tuple[FakeQuantGRU, Tensor, Tensor, float]:
    """The usual way on a few steps, and how many times as many the shape has."""
    N, T, C, H = shape
    few = min(T, LOOP_STEPS)
    x, grad = inputs((N, few, C, H), device)
    return FakeQuantGRU(C, H).to(device), x, grad, T / few


def geometric(ratios: list[float]) -> float:
    """Geometric mean of what was measured."""
    known = [ratio for ratio in ratios if ratio == ratio]
    return statistics.geometric_mean(known) if known else NAN


def line(shape: Shape | str, columns: list[str]) -> str:
    """One line of a table."""
    first = shape if isinstance(shape, str) else ",".join(map(str, shape))
    return " ".join([f"{first:>16}", *columns]).replace("nan", "  -")


# --- on a GPU


def gpu_line(shape: Shape, args: argparse.Namespace, rate: float) -> tuple[str, dict[str, float]]:
    """One line of the table, and its ratios."""
    import gpu

    N, T, C, H = shape
    gru = quantized(shape, cpu.CONFIGS[args.config], "cuda", args.precision)
    x, grad = inputs(shape, "cuda")
    wrong, ours_kept = error(gru, shape), kept(gru, x)
    engines: dict[str, Engine] = {"ours": step(gru, x, grad), "nothing": nothing(gru, x, grad)}
    rivals_kept = []
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        plain = nn.GRU(C, H, device="cuda", dtype=kind)
        real, real_grad = inputs(shape, "cuda", kind)
        rivals_kept.append(kept(plain, real))
        engines[f"cudnn {kind}"] = step(plain, real, real_grad)
    t = gpu.medians(engines, args.repeats)
    del engines["nothing"]
    for name in reversed(engines):  # ours last: what cannot be captured breaks what follows
        try:
            # one at a time: cuDNN's workspaces in graphs must not meet those outside
            t |= gpu.medians({f"graph {name}": gpu.captured(engines[name])}, args.repeats)
        except RuntimeError as reason:
            print(f"{name} cannot be captured: {str(reason).splitlines()[0]}")
            t[f"graph {name}"] = NAN
    loop, x_few, grad_few, times = loop_of(shape, "cuda")
    loop_kept = kept(loop, x_few)
    t |= gpu.medians({"loop": step(loop, x_few, grad_few)}, 1)
    eager = min(value for name, value in t.items() if name.startswith("cudnn"))
    graph = min(value for name, value in t.items() if name.startswith("graph cudnn"))
    ratios = {
        "eager": eager / t["ours"],
        "graph": graph / t["graph ours"],
        "loop": t["loop"] * times / t["ours"],
    }
    floor = 9 * N * T * H * (C + H) / rate * 1e6
    columns = [
        *(f"{value:9.1f}" for value in (eager, t["ours"])),
        f"{t['nothing']:9.1f}",
        f"{ratios['eager']:7.2f}x",
        *(f"{value:9.1f}" for value in (graph, t["graph ours"])),
        f"{ratios['graph']:7.2f}x",
        f"{t['graph ours'] / T:8.3f}",
        f"{100 * floor / t['graph ours']:6.1f}%",
        f"{ratios['loop']:7.0f}x",
        *(f"{value:7.1f}" for value in (ours_kept, min(rivals_kept), loop_kept)),
        f"{wrong:9.1e}",
    ]
    return line(shape, columns), ratios


def multiply_rate() -> float:
    """Multiply-accumulates per second of a large bfloat16 product."""
    import gpu

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 8192**3 / gpu.medians({"product": lambda: a @ a}, 5)["product"] * 1e6


def on_gpu(args: argparse.Namespace) -> None:
    """The table of a GPU."""
    import gpu

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    # nn.GRU lays weights out in one chunk for every dtype but bfloat16
    warnings.filterwarnings("ignore", "RNN module weights")
    rate = multiply_rate()
    print(
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}; {args.config}; "
        f"precision {args.precision or 'as it is'}; medians of {args.repeats}, us"
    )
    titles = f"{'cuDNN':>9} {'ours':>9} {'nothing':>9} {'ratio':>8} {'graph':>9} {'ours':>9}"
    titles += (
        f" {'ratio':>8} {'us/step':>8} {'of mul':>7} {'loop/ours':>8} {'bytes':>6} {'cuDNN':>7}"
    )
    print(line("N,T,C,H", [titles, f"{'loop':>7} {'error':>9}"]))
    ratios: list[dict[str, float]] = []
    for shape in gpu.SHAPES[: args.shapes]:
        text, found = gpu_line(shape, args, rate)
        print(text, flush=True)
        ratios.append(found)
    means = {name: geometric([each[name] for each in ratios]) for name in ratios[0]}
    print("geometric means: " + ", ".join(f"{name} {mean:.2f}x" for name, mean in means.items()))


# --- on the CPU


def on_cpu(args: argparse.Namespace) -> None:
    """The table of the CPU."""
    torch.set_num_threads(args.threads)
    print(f"{machine()}; {args.config}; medians of {args.repeats}, ms")
    titles = f"{'nn.GRU':>9} {'ours':>9} {'loop':>9} {'ratio':>8} {'loop/ours':>9} {'bytes':>7}"
    print(line("N,T,C,H", [titles, f"{'nn.GRU':>7} {'loop':>7} {'error':>9}"]))
    ratios = []
    for shape in CPU_SHAPES[: args.shapes]:
        gru = quantized(shape, cpu.CONFIGS[args.config], "cpu", args.precision)
        plain = nn.GRU(shape[2], shape[3])
        x, grad = inputs(shape, "cpu")
        loop, x_few, grad_few, times = loop_of(shape, "cpu")
        engines = {
            "nn.GRU": step(plain, x, grad),
            "ours": step(gru, x, grad),
            "loop": step(loop, x_few, grad_few),
        }
        t = cpu.medians(engines, args.repeats)
        t["loop"] *= times
        ratios.append(t["nn.GRU"] / t["ours"])
        columns = [
            *(f"{1e3 * t[name]:9.2f}" for name in engines),
            f"{ratios[-1]:7.2f}x",
            f"{t['loop'] / t['ours']:8.1f}x",
            *(f"{kept(*pair):7.1f}" for pair in ((gru, x), (plain, x), (loop, x_few))),
            f"{error(gru, shape):9.1e}",
        ]
        print(line(shape, columns), flush=True)
    print(f"geometric mean: {geometric(ratios):.2f}x")


def with_correction(args: argparse.Namespace) -> None:
    """A step with the correction of the input bias, relative to one without."""
    torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name() if args.device == "cuda" else machine()
    print(f"{where}; {args.config}; medians of {args.repeats}, ms")
    print(line("N,T,C,H", [f"{'without':>9} {'with':>9} {'ratio':>7}"]))
    for shape in CPU_SHAPES[: args.shapes]:
        engines = {}
        for correct in (False, True):
            config = cpu.CONFIGS[args.config].replace_globals(correct_bias=correct)
            gru = quantized(shape, config, args.device, args.precision)
            engines[str(correct)] = finished(step(gru, *inputs(shape, args.device)), args.device)
        t = cpu.medians(engines, args.repeats)
        columns = [f"{1e3 * each:9.2f}" for each in t.values()]
        print(line(shape, [*columns, f"{t['True'] / t['False']:7.2f}"]), flush=True)


def finished(engine: Engine, device: str) -> Engine:
    """A step that waits for its work on the device."""

    def run() -> object:
        found = engine()
        if device == "cuda":
            torch.cuda.synchronize()
        return found

    return run


def in_memory(args: argparse.Namespace) -> None:
    """What our backward takes while it runs."""
    torch.set_num_threads(args.threads)
    print(f"{machine()}; {args.config}; memory of backward, at most")
    print(line("N,T,C,H", [f"{'MiB':>7} {'bytes per unit and step':>24}"]))
    # a process each: what others have freed would hide what is taken
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for shape in MEMORY_SHAPES[: args.shapes]:
            taken = pool.apply(transient, (shape, args.config, args.threads))
            each = taken / (shape[0] * shape[1] * shape[3])
            print(line(shape, [f"{taken / 2**20:7.1f} {each:24.2f}"]), flush=True)


def transient(shape: Shape, config: str, threads: int) -> int:
    """Bytes that backward takes at most, beside what was there and its gradients."""
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        # what is freed goes back to the system, so that it is seen when it is taken again
        ctypes.CDLL(None).mallopt(option, 1 << 16)
    torch.set_num_threads(threads)
    gru = quantized(shape, cpu.CONFIGS[config], "cpu", None)

    def status(name: str) -> int:
        with open("/proc/self/status") as file:
            return 1024 * next(int(s.split()[1]) for s in file if s.startswith(name))

    taken = 0
    for _ in range(3):  # what is made only once is not counted
        x, grad = inputs(shape, "cpu")
        output = gru(x)[0]
        gc.collect()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # from here on VmHWM is the most
        before = status("VmRSS")
        found = torch.autograd.grad(output, [x, *gru.parameters()], grad)
        taken = status("VmHWM") - before - sum(g.nbytes for g in found)
        del output, found
    return taken


# --- eager steps of two versions

# an editable installation comes before sys.path otherwise
WORKER = """
import sys
folder = sys.argv.pop()
if folder:
    sys.meta_path = [each for each in sys.meta_path if "editable" not in type(each).__module__]
    sys.path.insert(0, folder)
import training
training.answer(training.arguments())
"""


class Version:
    """A process that measures with the package in a folder, or with the installed one.

    Args:
        folder: The folder; None for the installed package.
    """

    def __init__(self, folder: Path | None) -> None:
        worker = [
            sys.executable,
            "-c",
            WORKER,
            *sys.argv[1:],
            str(folder.resolve()) if folder else "",
        ]
        self._process = subprocess.Popen(
            worker,
            cwd=Path(__file__).parent,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def times(self, shape: Shape) -> dict[str, float]:
        """Microseconds of a step, by kind."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(shape), file=stdin, flush=True)
        found: dict[str, float] = json.loads(stdout.readline())
        return found


def answer(args: argparse.Namespace) -> None:
    """Measure the shapes that come line by line from the other end."""
    engines: dict[Shape, dict[str, Engine]] = {}
    torch.set_num_threads(args.threads)
    for request in sys.stdin:
        N, T, C, H = shape = tuple(json.loads(request))
        if shape not in engines:
            gru = quantized(shape, cpu.CONFIGS[args.config], args.device, args.precision)
            x, grad = inputs((N, T, C, H), args.device)
            ours = step(gru, x, grad)
            engines[shape] = {
                "ours": ours,
                "thread": on_thread(ours),
                "nothing": nothing(gru, x, grad),
            }
            for engine in engines[shape].values():
                in_a_row(engine, 20)
        print(
            json.dumps({name: in_a_row(each, 50) for name, each in engines[shape].items()}),
            flush=True,
        )


def on_thread(engine: Engine) -> Engine:
    """A step whose backward runs on the calling thread."""

    def run() -> object:
        with torch.autograd.set_multithreading_enabled(False):
            return engine()

    return run


def in_a_row(engine: Engine, calls: int) -> float:
    """Microseconds of a call, of some one after the other."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    finish()
    start = perf_counter()
    for _ in range(calls):
        engine()
    finish()
    return (perf_counter() - start) / calls * 1e6


def in_turns(args: argparse.Namespace) -> None:
    """The table of eager steps."""
    versions = {"old": Version(args.old)} if args.old else {}
    versions["new"] = Version(None)
    where = torch.cuda.get_device_name() if args.device == "cuda" else machine()
    print(f"{where}; torch {torch.__version__}; {args.config}; medians of {args.repeats}, us")
    kinds = ("ours", "thread", "nothing")
    titles = [f"{name + ' ' + kind:>12}" for kind in kinds for name in versions]
    print(line("N,T,C,H", [*titles, f"{'new/old':>8}"]))
    for shape in EAGER_SHAPES[: args.shapes]:
        turns = [
            {
                (name, kind): time
                for name, each in versions.items()
                for kind, time in each.times(shape).items()
            }
            for _ in range(args.repeats)
        ]
        t = {key: statistics.median(each[key] for each in turns) for key in turns[0]}
        columns = [f"{t[name, kind]:12.1f}" for kind in kinds for name in versions]
        ratio = t["new", "ours"] / t[next(iter(versions)), "ours"]
        print(line(shape, [*columns, f"{ratio:8.2f}"]), flush=True)


# --- several processes


def in_parallel(args: argparse.Namespace) -> None:
    """Rows per second of each process alone and of all together under DDP."""
    device, local = args.device, int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=torch.device(device))
    else:
        dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    if first:
        where = torch.cuda.get_device_name() if args.device == "cuda" else machine()
        print(f"{dist.get_world_size()} x {where}; torch {torch.__version__}; {args.config}")
        print(line("N,T,C,H", [f"{'alone':>11} {'together':>11} {'efficiency':>10}  rows/s each"]))
    shapes = CPU_SHAPES if args.device == "cpu" else SCALED_SHAPES
    for shape in shapes[: args.shapes]:
        gru = quantized(shape, cpu.CONFIGS[args.config], device, args.precision)
        x, grad = inputs(shape, device)
        alone = seconds(gru, x, grad, args.repeats)
        together = seconds(nn.parallel.DistributedDataParallel(gru), x, grad, args.repeats)
        slowest = torch.tensor([alone, together], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        alone, together = slowest.tolist()
        if first:
            rates = [f"{shape[0] / each:11.1f}" for each in (alone, together)]
            print(line(shape, [*rates, f"{alone / together:10.0%}"]), flush=True)
    dist.destroy_process_group()


def seconds(gru: nn.Module, x: Tensor, grad: Tensor, repeats: int) -> float:
    """Median seconds of a step that leaves gradients at the weights; all begin together."""
    times = []
    for _ in range(repeats + 3):
        gru.zero_grad()
        dist.barrier()
        start = perf_counter()
        gru(x)[0].backward(grad)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return statistics.median(times[3:])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--config", choices=cpu.CONFIGS, default="int8")
    parser.add_argument("--shapes", type=int, help="only the first ones")
    parser.add_argument("--precision", choices=("bf16", "tf32", "fp32"))
    parser.add_argument("--ddp", action="store_true", help="under torchrun")
    parser.add_argument("--memory", action="store_true", help="of backward, on the CPU")
    parser.add_argument("--eager", action="store_true", help="eager steps of small sizes")
    parser.add_argument("--old", type=Path, help="folder of another version's package")
    parser.add_argument("--correct-bias", action="store_true", help="its cost, on both devices")
    args = parser.parse_args()
    if args.precision is not None and not hasattr(QuantGRU, "precision"):
        parser.error("this QuantGRU has no choice of precision")
    return args


def main() -> None:
    """Measure and print."""
    args = arguments()
    if args.ddp:
        in_parallel(args)
    elif args.correct_bias:
        with_correction(args)
    elif args.eager:
        in_turns(args)
    elif args.memory:
        in_memory(args)
    elif args.device == "cuda":
        on_gpu(args)
    else:
        on_cpu(args)


if __name__ == "__main__":
    main()
