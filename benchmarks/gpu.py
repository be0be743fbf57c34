"""Quantized inference on a GPU against cuDNN: ratios measured in one run.

    python benchmarks/gpu.py [--config int8] [--repeats 20] [--shapes 3]
    python benchmarks/gpu.py --steps
    python benchmarks/gpu.py --launches [--shapes 3]

Whole calls of QuantGRU, quantize and dequantize included, one after the other, as Python makes them
(eager) and replayed from a CUDA graph. `cuDNN` is nn.GRU, the best of TF32, float16 and bfloat16.
`us/step` is the recurrence alone. Every figure is a median; engines take turns. Codes are compared
with the reference first, and whole calls with those of the CPU.

`of floor` is the part of our time in a graph that the hardware itself needs: the recurrence's
multiplications and exchanges of states, the projection's multiplications, and all bytes once
through memory, each at the rate measured on an H200 when nothing else is done. `in`, `project` and
`steps` are the time on the GPU of each part of an eager call, by the profiler: parts that overlap
add up to more than a call. `adds` is what a call in a graph takes longer than its recurrence alone,
in a graph of the same call without all that comes before. This needs the package cuda-bindings.

`--launches` measures eager calls whose launches become graphs by themselves, and in another process
with QUANT_GRU_CUDA_GRAPHS=0 calls whose launches do not: GRUs of one layer, and of two layers and
both directions. It also prints the memory that graphs take on the GPU for 60 lengths of the latter.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from cpu import CONFIGS

from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer import cell as reference
from quant_gru.kernel_runtime.cuda import compiler, driver
from quant_gru.kernels._native import Form
from quant_gru.kernels.cuda.boundary import boundary
from quant_gru.kernels.cuda.forward import executor
from quant_gru.kernels.cuda.machine import machine_of
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.projection.select import POLICY
from quant_gru.kernels.cuda.recurrence import planner

STEPS = [(1, 1, 40, 64), (32, 1, 64, 128)]  # where the host is the limit
SHAPES = [
    (1, 100, 64, 128),
    (1, 1000, 128, 256),
    (16, 100, 64, 128),
    (32, 50, 64, 128),
    (32, 200, 128, 256),
    (64, 200, 256, 512),
    (64, 200, 512, 1024),
    (128, 100, 256, 256),
    (256, 50, 128, 128),
    (8, 1000, 256, 512),
    (32, 1000, 80, 256),
    (512, 20, 100, 100),
]

STACKS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
}
LENGTHS = range(41, 101)

Engine = Callable[[], object]


def captured(engine: Engine) -> Engine:
    """The engine as a CUDA graph."""
    return graph_of(engine).replay


def graph_of(engine: Engine, keep: bool = False) -> torch.cuda.CUDAGraph:
    """The graph itself; `keep` for one that may be looked into, and is still to be instantiated."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            engine()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    with torch.cuda.graph(graph):
        engine()
    return graph


def recurrence_alone(gru: QuantGRU, x: torch.Tensor) -> Engine | None:
    """The recurrence of a call in a graph, whose input an earlier call has projected.

    None where there is no launch of all steps.
    """
    from cuda.bindings import driver as cu

    gru = copy.deepcopy(gru)
    # it does not wait for a projection that goes on
    POLICY.overlaps = False
    try:
        graph = graph_of(lambda: gru(x), keep=True)
    finally:
        POLICY.overlaps = True
    graph.instantiate()
    graph.replay()
    whole = checked(cu.cuGraphClone(cu.CUgraph(init_value=graph.raw_cuda_graph())))
    # the first call tells how many there are
    nodes = checked(cu.cuGraphGetNodes(whole, cu.cuGraphGetNodes(whole)[2]))[0]
    names = [_kernel_of(each) for each in nodes]
    if names.count(b"recurrent") != 1:
        return None
    for node, name in zip(nodes, names, strict=True):
        if name != b"recurrent":
            checked(cu.cuGraphDestroyNode(node))
    alone = checked(cu.cuGraphInstantiate(whole, 0))

    def replay(_kept: object = (graph, gru)) -> None:
        checked(cu.cuGraphLaunch(alone, torch.cuda.current_stream().cuda_stream))

    return replay


def _kernel_of(node: Any) -> bytes:
    """The kernel that a node of a graph launches; nothing where it copies or fills memory."""
    from cuda.bindings import driver as cu

    if checked(cu.cuGraphNodeGetType(node)) != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        return b""
    return checked(cu.cuFuncGetName(checked(cu.cuGraphKernelNodeGetParams(node)).func))


def checked(results: tuple[Any, ...]) -> Any:
    """What a function of the driver returned."""
    if int(results[0]):
        raise RuntimeError(f"Expected the driver to succeed, got {results[0]!r}")
    return results[1] if len(results) == 2 else results[1:]


def in_a_row(engine: Engine, calls: int) -> float:
    """Microseconds of a call, by events around some calls one after the other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        engine()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls * 1e3


def medians(engines: dict[str, Engine], repeats: int) -> dict[str, float]:
    """Median microseconds of a call of each engine.

    As many calls follow each other as take 20 ms, at least five: what the first of them finds, an
    idle GPU and a thread of autograd that sleeps, is not what calls of a model find.
    """
    times: dict[str, list[float]] = {name: [] for name in engines}
    calls: dict[str, int] = {}
    for name, engine in engines.items():
        for _ in range(3):
            engine()
        calls[name] = max(5, round(20_000 / in_a_row(engine, 5)))
    for _ in range(repeats):
        for name, engine in engines.items():
            times[name].append(in_a_row(engine, calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


# H200: clocks a second, multiply-adds of m16n8k32 a clock of a multiprocessor, those of all dense
# ones a second, bytes of memory a second, and how long blocks of a cluster take to exchange states
CLOCK, IMMA, DENSE, BANDWIDTH = 1.98e9, 2706.0, 1.6e15 / 2, 4.2e12
EXCHANGE = {1: 0.03e-6, 2: 0.22e-6, 4: 0.24e-6, 8: 0.25e-6, 16: 0.28e-6}


def floor(
    shape: tuple[int, int, int, int],
    form: Form,
    planes: int,
    chosen: planner.Shape | None,
    clusters: Mapping[int, int],
) -> float:
    """Microseconds that no kernel of this layout goes below.

    Args:
        shape: N, T, C, H.
        form: Structure of the plan.
        planes: Bytes of a code of x.
        chosen: Layout of the recurrence, None for a product and a kernel per step.
        clusters: Blocks of a cluster -> how many such clusters the device holds at once.
    """
    N, T, C, H = shape
    if chosen is None:
        step = 3.0 * H * H * N * form.weight_bytes * form.state_bytes / DENSE
    else:
        columns = max(8, chosen.rows)  # of the matrix instruction
        work = 3.0 * chosen.units / chosen.blocks * chosen.features * columns * chosen.passes(form)
        alone, most = chosen.resident(form, clusters)
        waves = -(-chosen.tiles(N) // most)
        # blocks that share a multiprocessor multiply in turn
        shared = min(-(-chosen.tiles(N) // alone), most // alone)
        step = waves * (shared * work / IMMA / CLOCK + EXCHANGE[chosen.blocks])
    projection = 3.0 * H * C * T * N * planes * form.weight_bytes / DENSE
    memory = (4.0 * T * N * (C + H) + 3 * H * (C + H)) / BANDWIDTH
    return 1e6 * (T * step + projection + memory)


PARTS = {
    "quantize_input": "in",
    "recurrent": "steps",
    "step": "steps",
    "generic": "steps",
    "finish": "project",
    "project_bytes": "project",
    "project": "project",
}


def parts(events: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Microseconds by part; kernels that are not ours are products of the projection.

    The kernel that compares weights after some calls is left out.

    Args:
        events: Names of kernels and their microseconds.
    """
    found = dict.fromkeys(("in", "project", "steps"), 0.0)
    for name, time in events:
        if name != "contents":
            found[PARTS.get(name, "project")] += time
    return found


def profiled(engine: Engine, calls: int = 10) -> dict[str, float]:
    """The parts of a call."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    engine()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            engine()
        torch.cuda.synchronize()
    return parts(
        (event.key, event.self_device_time_total / calls)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA
    )


class LastRecurrence:
    """A machine that remembers the recurrent launch, to repeat it."""

    def __init__(self, machine: driver.Device) -> None:
        self.machine = machine
        self.arch, self.clusters = machine.arch, machine.clusters
        self.again: Engine = lambda: None

    def launch(self, *arguments: object) -> None:
        """Launch, and remember."""
        if getattr(arguments[0], "function", "") == "recurrent":
            self.again = lambda: self.machine.launch(*arguments)  # type: ignore[arg-type]
        self.machine.launch(*arguments)  # type: ignore[arg-type]


def cudnn(C: int, H: int, x: torch.Tensor) -> Engine:
    """nn.GRU in x's dtype."""
    plain = torch.nn.GRU(C, H, device=x.device, dtype=x.dtype).eval()
    return lambda: plain(x)


def quantized(gru: QuantGRU, x: torch.Tensor) -> QuantGRU:
    """The GRU on the GPU, calibrated with a part of x; (T, N, C)."""
    part = x[:100, :32]
    gru = gru.eval().cuda()
    gru.calibrate(part.transpose(0, 1) if gru.batch_first else part)
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def in_graphs(engines: dict[str, Engine], repeats: int) -> dict[str, float]:
    """As `medians`, of CUDA graphs; names begin with 'graph '.

    One at a time: cuDNN's workspaces in graphs must not meet those outside.
    """
    found: dict[str, float] = {}
    for name, engine in engines.items():
        found |= medians({f"graph {name}": captured(engine)}, repeats)
    return found


def fastest(times: dict[str, float], kind: str) -> float:
    """The least of those whose names begin so."""
    return min(value for name, value in times.items() if name.startswith(kind))


def measure(
    shape: tuple[int, int, int, int], config: QuantConfig, repeats: int
) -> tuple[str, tuple[float, float]]:
    """One line of the table, and how many times as fast as cuDNN, eager and in graphs."""
    N, T, C, H = shape
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=config)
    x, h0 = torch.randn(T, N, C, device="cuda"), torch.zeros(N, H, device="cuda")
    quantized(gru, x)
    plan = gru._plan().cells[0][0]
    few = boundary.quantize(plan.x, x[:20])[0]
    states = boundary.quantize(plan.h, h0)[0]
    expected = reference.run(plan, few, states)[0]
    equal = torch.equal(executor.run(plan, few, states)[0], expected)
    with torch.no_grad():
        equal &= torch.equal(gru(x)[0].cpu(), copy.deepcopy(gru).cpu()(x.cpu())[0])

    recorder = LastRecurrence(machine_of(x.device))
    codes = boundary.quantize(plan.x, x)[0]
    kept = executor.run(plan, codes, states, machine=recorder)
    engines: dict[str, Engine] = {"ours": lambda: gru(x), "alone": recorder.again}
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        engines[f"cudnn {kind}"] = cudnn(C, H, x.to(kind))
    t = medians(engines, repeats)
    t |= in_graphs({name: engines[name] for name in engines if name != "alone"}, repeats)
    del kept
    adds = "-"
    if alone := recurrence_alone(gru, x):
        both = medians({"whole": captured(engines["ours"]), "alone": alone}, repeats)
        adds = f"{1 - both['alone'] / both['whole']:.1%}"
    eager, graph = fastest(t, "cudnn"), fastest(t, "graph cudnn")
    numbers = numbers_of(plan)
    form = numbers.form
    chosen = planner.choose(form, H, N, 1, recorder.clusters())
    part = profiled(engines["ours"])
    least = floor(shape, form, numbers.x_planes, chosen, recorder.clusters())
    laid = (
        "generic"
        if chosen is None
        else (f"{chosen.blocks},{chosen.split},{chosen.spread},{chosen.rows}")
    )
    line = (
        f"{','.join(map(str, shape)):>16} {eager:9.1f} {t['ours']:9.1f} {eager / t['ours']:7.2f}x"
        f" {graph:9.1f} {t['graph ours']:9.1f} {graph / t['graph ours']:7.2f}x"
        f" {t['alone'] / T:8.3f} {laid:>9} {least / t['graph ours']:8.0%}"
        f" {part['in']:7.1f} {part['project']:7.1f} {part['steps']:7.1f} {adds:>6}"
        f" {'equal' if equal else 'DIFFERENT'}"
    )
    return line, (eager / t["ours"], graph / t["graph ours"])


def step_alone(N: int, H: int, config: QuantConfig) -> float:
    """Microseconds of a step of the recurrence, without what a launch takes once."""
    gru = QuantGRU(64, H, config=config)
    quantized(gru, torch.randn(100, 8, 64, device="cuda"))
    short, long = (torch.randn(T, N, 64, device="cuda") for T in (200, 1000))
    times = [profiled(lambda x=x: gru(x))["steps"] for x in (short, long)]  # type: ignore[misc]
    return (times[1] - times[0]) / 800


def used() -> int:
    """Bytes in use on the GPU, but for those that PyTorch keeps for later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def own_launches(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of calls of each stack and shape in this process, and bytes of many lengths."""
    found: dict[str, Any] = {}
    for stack, options in STACKS.items():
        times = found[stack] = []
        for N, T, C, H in (*STEPS, *SHAPES[: args.shapes]):
            torch.manual_seed(0)
            gru = QuantGRU(C, H, config=CONFIGS[args.config], **options)
            x = torch.randn(T, N, C, device="cuda")
            quantized(gru, x)
            times.append(medians({"ours": lambda gru=gru, x=x: gru(x)}, args.repeats)["ours"])  # type: ignore[misc]
    gru = QuantGRU(64, 128, config=CONFIGS[args.config], **STACKS["two layers, both directions"])
    x = torch.randn(LENGTHS.stop, 32, 64, device="cuda")
    quantized(gru, x)

    def run(T: int) -> None:
        for _ in range(8):  # they are recorded at the third
            gru(x[:T])

    run(LENGTHS.stop)
    before = used()
    for T in LENGTHS:
        run(T)
    found["bytes"] = used() - before
    return found


def in_a_process(graphs: str) -> dict[str, Any]:
    """The result of `own_launches` in a process of its own."""
    command = [sys.executable, *sys.argv, "--launches", "here"]
    result = subprocess.run(
        command,
        env={**os.environ, "QUANT_GRU_CUDA_GRAPHS": graphs},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def compare_launches(args: argparse.Namespace) -> None:
    """Print calls with and without graphs of launches, and the memory that graphs take."""
    without, graphs = in_a_process("0"), in_a_process("1")
    for stack in STACKS:
        print(f"{stack}\n{'N,T,C,H':>16} {'launches':>9} {'graphs':>9} {'ratio':>8}")
        ratios = []
        for shape, old, new in zip((*STEPS, *SHAPES), without[stack], graphs[stack], strict=False):
            ratios.append(new / old)
            print(f"{','.join(map(str, shape)):>16} {old:9.1f} {new:9.1f} {new / old:7.2f}x")
        if ratios:
            print(f"geometric mean: {statistics.geometric_mean(ratios):.2f}x")
    took = (graphs["bytes"] - without["bytes"]) / 2**20
    print(f"graphs of {len(LENGTHS)} lengths of GRU(64, 128), {stack}: {took:.1f} MiB")


def main() -> None:
    """Measure all shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--config", choices=CONFIGS, default="int8")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first ones")
    parser.add_argument("--steps", action="store_true", help="of the recurrence alone")
    parser.add_argument(
        "--launches",
        nargs="?",
        const="both",
        choices=["both", "here"],
        help="as graphs of their own and without; here: numbers of this process alone, as JSON",
    )
    args = parser.parse_args()
    if args.launches == "here":
        with torch.no_grad():
            print(json.dumps(own_launches(args)))
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}; NVRTC {compiler.version()}; "
        f"{args.config}; medians of {args.repeats}, us"
    )
    if args.launches:
        compare_launches(args)
        return
    if args.steps:
        with torch.no_grad():
            for N in (1, 8):
                for H in (64, 128, 256, 512, 1024):
                    print(f"N={N} H={H:4}: {step_alone(N, H, CONFIGS[args.config]):.3f} a step")
        return
    print(
        f"{'N,T,C,H':>16} {'cuDNN':>9} {'ours':>9} {'ratio':>8} {'graph':>9} {'ours':>9}"
        f" {'ratio':>8} {'us/step':>8} {'shape':>9} {'of floor':>8}"
        f" {'in':>7} {'project':>7} {'steps':>7} {'adds':>6}"
    )
    with torch.no_grad():
        ratios = []
        for shape in SHAPES[: args.shapes]:
            line, ratio = measure(shape, CONFIGS[args.config], args.repeats)
            ratios.append(ratio)
            print(line, flush=True)
    if ratios:
        eager, graph = (statistics.geometric_mean(each) for each in zip(*ratios, strict=True))
        print(f"geometric means: {eager:.2f}x eager, {graph:.2f}x in graphs")


if __name__ == "__main__":
    main()
