"""ONNX files of models with many GRUs or calls: bytes, nodes and times beside the float model.

    python benchmarks/onnx_steps.py steps   # 14 GRUs of one step each, H of 4 to 16
    python benchmarks/onnx_steps.py least   # the same in the fewest nodes that int8 could have
    python benchmarks/onnx_steps.py calls   # one GRU that is called 1 and 12 times

Nodes are those that depend on an input, with functions replaced by their nodes: a runtime computes
the others once. Times are the shortest and the median of runs that alternate between the files, in
ONNX Runtime with one thread. The float model is what torch.onnx.export writes of torch.nn.GRU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import inliner
from torch import Tensor

from quant_gru import calibrate_model, convert_model, export_onnx, onnx_operator_library

SIZES = (4, 8, 8, 16, 16, 8, 4) * 2
PRESETS = ("int8", "int8_wide", "w8a16", "int16")
PROFILES = ("integer", "operator")
TURNS = 1000


class Steps(torch.nn.Module):
    """GRUs of one step with a linear layer after each; all states go in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.grus = torch.nn.ModuleList(torch.nn.GRU(16, size) for size in SIZES)
        self.linears = torch.nn.ModuleList(torch.nn.Linear(size, 16) for size in SIZES)

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the output (T, N, 16) and the states."""
        after = []
        for gru, linear, state in zip(self.grus, self.linears, states, strict=True):
            y, state = gru(x, state)
            x = torch.tanh(linear(y))
            after.append(state)
        return x, after


class Decoder(torch.nn.Module):
    """A GRU whose output is its next input."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls, self.gru = calls, torch.nn.GRU(64, 64, batch_first=True)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last output and the state."""
        for _ in range(self.calls):
            x, state = self.gru(x, state)
        return x, state


def given(T: int, N: int) -> tuple[Tensor, list[Tensor]]:
    """Return an input of the steps."""
    return torch.randn(T, N, 16), [torch.zeros(1, N, size) for size in SIZES]


def session_of(path: Path) -> Any:
    """Load a file, with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.register_custom_ops_library(onnx_operator_library())
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def write_float(model: torch.nn.Module, path: Path, example: Any) -> None:
    """Export a float model by torch alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, example, path, dynamo=True, external_data=False, verbose=False, opset_version=21
        )


def nodes_that_run(path: Path) -> int:
    """Return how many nodes depend on an input."""
    graph = inliner.inline_local_functions(onnx.load(path)).graph
    changing, count = {each.name for each in graph.input}, 0
    for node in graph.node:
        if changing.intersection(node.input):
            changing.update(node.output)
            count += 1
    return count


def times_of(
    paths: dict[str, Path], arrays: list[NDArray[Any]], runs: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of runs that alternate between files, after some runs each."""
    sessions = {name: session_of(path) for name, path in paths.items()}
    taken: dict[str, list[float]] = {name: [] for name in paths}
    for turn in range(TURNS + 5):
        for name, session in sessions.items():
            feeds = dict(zip((each.name for each in session.get_inputs()), arrays, strict=True))
            for _ in range(runs):
                start = time.perf_counter()
                session.run(None, feeds)
                if turn >= 5:
                    taken[name].append(time.perf_counter() - start)
    return taken


def print_steps(folder: Path) -> None:
    """Print bytes, nodes and times of 14 GRUs of one step."""
    torch.manual_seed(0)
    model, example = Steps().eval(), given(1, 1)
    paths = {"float": folder / "float.onnx"}
    write_float(model, paths["float"], example)
    for preset in PRESETS:
        quantized = convert_model(model, preset)
        calibrate_model(quantized, [given(50, 8)], lambda m, batch: m(*batch))
        for profile in PROFILES:
            path = paths[f"{preset} {profile}"] = folder / f"{preset}_{profile}.onnx"
            export_onnx(quantized, path, example, profile, batch=1, time=1)
    taken = times_of(paths, [example[0].numpy(), *(state.numpy() for state in example[1])])
    print(
        "| 14 steps | bytes | of float | nodes | shortest, us | of float | median, us | of float |"
    )
    print("|---|---|---|---|---|---|---|---|")
    size = paths["float"].stat().st_size
    least, middle = min(taken["float"]), statistics.median(taken["float"])
    for name, path in paths.items():
        bytes_, best, usual = path.stat().st_size, min(taken[name]), statistics.median(taken[name])
        print(
            f"| {name} | {bytes_} | {bytes_ / size:.2f} | {nodes_that_run(path)} "
            f"| {1e6 * best:.0f} | {best / least:.1f} "
            f"| {1e6 * usual:.0f} | {usual / middle:.1f} |"
        )


class Graph:
    """Nodes of a graph, and its constants."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def op(self, kind: str, *inputs: str | NDArray[Any], outputs: int = 1, **given: Any) -> Any:
        """Append a node; return the name of its output, or those of several."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(onnx.helper.make_node(kind, [*map(self._name, inputs)], names, **given))
        return names if outputs > 1 else names[0]

    def _name(self, value: str | NDArray[Any]) -> str:
        if isinstance(value, str):
            return value
        self.constants.append(onnx.numpy_helper.from_array(value, f"c{len(self.constants)}"))
        return str(self.constants[-1].name)


def one_step(graph: Graph, x: str, h: str, H: int, nan: bool) -> Any:
    """Append an int8 step in the fewest nodes known; its numbers are those of no plan.

    A bias is a row of the matrix, offsets of tables are part of it, and a table also has 1 - z.

    Args:
        graph: The graph.
        x: The input (1, 1, 16).
        h: The state (1, 1, H).
        H: Units.
        nan: Whether NaN counts as 0, as the definition says.
    """

    def limited(v: str, size: int) -> Any:
        """Append limits that differ from channel to channel, which Clip has not."""
        least, most = (np.full(size, end, np.float32) for end in (-127, 127))
        return op("Min", op("Max", v, least), most)

    def clipped(v: str) -> Any:
        return op("Clip", op("Round", v), np.float32(-128), np.float32(127))

    op, random = graph.op, np.random.default_rng(0)
    both = op("Round", op("Div", op("Concat", x, h, axis=-1), np.full(16 + H, 1 / 64, np.float32)))
    if nan:
        both = op("Where", op("Equal", both, both), both, np.float32(0))
    both = limited(both, 16 + H)
    matrix = random.standard_normal((16 + H, 9 * H)).astype(np.float32) / 8
    product = limited(op("Round", op("MatMul", both, matrix)), 9 * H)
    parts = np.array([3 * H, H, 3 * H, 2 * H])
    Wx, Wx_g, Rh, sides = op(
        "Split", op("Mul", product, np.full(9 * H, 2, np.float32)), parts, outputs=4, axis=-1
    )
    place = op("Cast", op("Add", Wx, Rh), to=onnx.TensorProto.INT32)
    gates = op("Gather", np.linspace(0, 1, 1 << 11, dtype=np.float32), place, axis=0)
    gates, rest = op("Split", gates, np.array([2 * H, H]), outputs=2, axis=-1)
    products = limited(op("Round", op("Mul", gates, sides)), 2 * H)
    old, rRh = op("Split", products, outputs=2, axis=-1, num_outputs=2)
    place = op("Cast", op("Add", Wx_g, rRh), to=onnx.TensorProto.INT32)
    candidate = op("Gather", np.linspace(-128, 127, 1 << 11, dtype=np.float32), place, axis=0)
    new = clipped(op("Mul", rest, candidate))
    return op("Mul", clipped(op("Add", old, new)), np.float32(1 / 128))


def write_least(path: Path, nan: bool) -> int:
    """Write `Steps` in `one_step`; return how many nodes a step has."""
    graph, x, states, step = Graph(), "x", [], 0
    inputs = {"x": 16, **{f"h{i}": H for i, H in enumerate(SIZES)}}
    for i, H in enumerate(SIZES):
        before = len(graph.nodes)
        states.append(one_step(graph, x, f"h{i}", H, nan))
        step = len(graph.nodes) - before
        linear = graph.op("MatMul", states[-1], np.full((H, 16), 1 / 16, np.float32))
        x = graph.op("Tanh", graph.op("Add", linear, np.zeros(16, np.float32)))

    def values(sizes: dict[str, int]) -> list[Any]:
        kind = onnx.TensorProto.FLOAT
        return [onnx.helper.make_tensor_value_info(n, kind, [1, 1, H]) for n, H in sizes.items()]

    outputs = {x: 16, **dict(zip(states, SIZES, strict=True))}
    made = onnx.helper.make_graph(
        graph.nodes, "least", values(inputs), values(outputs), graph.constants
    )
    opset = onnx.helper.make_opsetid("", 21)
    onnx.save(onnx.helper.make_model(made, opset_imports=[opset], ir_version=10), path)
    return step


def print_least(folder: Path) -> None:
    """Print the times of 14 int8 steps in the fewest nodes, beside float and the exported file."""
    torch.manual_seed(0)
    model, example = Steps().eval(), given(1, 1)
    paths = {name: folder / f"{name}.onnx" for name in ("float", "int8", "least", "without NaN")}
    write_float(model, paths["float"], example)
    quantized = convert_model(model, "int8")
    calibrate_model(quantized, [given(50, 8)], lambda m, batch: m(*batch))
    export_onnx(quantized, paths["int8"], example, batch=1, time=1)
    steps = {name: write_least(paths[name], name == "least") for name in ("least", "without NaN")}
    arrays = [example[0].numpy(), *(state.numpy() for state in example[1])]
    taken, again = times_of(paths, arrays), times_of(paths, arrays, runs=3)
    print("| 14 steps | in a GRU | nodes | shortest, us | of float | 3 in a row, us | of float |")
    print("|---|---|---|---|---|---|---|")
    for name, path in paths.items():
        columns = [
            f"{1e6 * min(found[name]):.0f} | {min(found[name]) / min(found['float']):.1f}"
            for found in (taken, again)
        ]
        print(
            f"| {name} | {steps.get(name, '')} | {nodes_that_run(path)} | {' | '.join(columns)} |"
        )


def print_calls(folder: Path) -> None:
    """Print bytes and times of a GRU that is called once and 12 times."""
    print("| profile | calls | bytes | export, s | load, ms |")
    print("|---|---|---|---|---|")
    example = torch.randn(2, 1, 64), torch.zeros(1, 2, 64)
    for profile in ("integer", "qdq", "float", "node"):
        for calls in (1, 12):
            path = folder / "model.onnx"
            model = convert_model(Decoder(calls).eval(), "int8")
            calibrate_model(model, [example], lambda m, batch: m(*batch))
            exports, loads = [], []
            for _ in range(3):
                start = time.perf_counter()
                export_onnx(model, path, example, profile, verify=False)
                exports.append(time.perf_counter() - start)
                start = time.perf_counter()
                session_of(path)
                loads.append(time.perf_counter() - start)
            print(
                f"| {profile} | {calls} | {path.stat().st_size} | {min(exports):.2f} "
                f"| {1e3 * min(loads):.1f} |",
                flush=True,
            )


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("steps", "least", "calls"))
    options = parser.parse_args()
    print("onnxruntime", onnxruntime.__version__, "numpy", np.__version__)
    with tempfile.TemporaryDirectory() as folder:
        tables = {"steps": print_steps, "least": print_least, "calls": print_calls}
        tables[options.table](Path(folder))


if __name__ == "__main__":
    main()
