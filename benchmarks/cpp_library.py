"""Calls of the C++ library beside those of Python, in one run: microseconds and ratios.

    python benchmarks/cpp_library.py [--repeats 15] [--config int8] [--threads 1]
    python benchmarks/cpp_library.py --cuda [--repeats 15] [--config int8]

Builds the library with all instruction sets. Both sides take turns on the same frozen GRU and the
same inputs, real values in and out. With one step, `Stream::step` stands beside `stream(x)`,
otherwise `Model::run` beside `frozen(x)`. The outputs are compared bit for bit.

With --cuda, `cuda::Call::run` stands beside `frozen(x)` on a GPU. A turn starts some calls on one
stream and then waits for the GPU. A third column replays CUDA graphs of ten runs of C++.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cpu import CONFIGS, SHAPES, modules
from torch import Tensor

from calibration import machine
from quant_gru import FrozenQuantGRU
from quant_gru.kernels.cpu import executor

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "cpp_library"
GPU_SHAPES = [*SHAPES, (1024, 100, 128, 256), (64, 200, 256, 512), (4096, 20, 100, 100)]


def built() -> ctypes.CDLL:
    """The functions of time_calls.cpp and time_passes.cpp."""
    ccache = shutil.which("ccache")
    launcher = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}"] if ccache else []
    configure = ["cmake", "-S", str(HERE / "cpp_library"), "-B", str(BUILD), *launcher]
    for command in (configure, ["cmake", "--build", str(BUILD), "--parallel"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    library = ctypes.CDLL(str(BUILD / "libtime_calls.so"))
    for name in ("open_model", "open_stream", "open_cuda_call", "open_passes"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("time_runs", "time_steps", "time_cuda_runs", "time_passes"):
        getattr(library, name).restype = ctypes.c_double
    return library


def address(tensor: Tensor) -> ctypes.c_void_p:
    """The address of a tensor as an argument."""
    return ctypes.c_void_p(tensor.data_ptr())


def engines(
    library: ctypes.CDLL, frozen: FrozenQuantGRU, x: Tensor, threads: int
) -> tuple[Callable[[], object], Callable[[int], float]]:
    """A call from Python, and a function that returns the seconds of some calls of C++."""
    T, N, _ = x.shape
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gru.safetensors"
        frozen.save(path)
        model = ctypes.c_void_p(library.open_model(str(path).encode()))
    y = torch.empty(T, N, frozen.shape.hidden_size)
    if T == 1:
        theirs = frozen.stream(N)
        stream = ctypes.c_void_p(library.open_stream(model, ctypes.c_int64(N)))

        def steps(count: int) -> float:
            return library.time_steps(stream, address(x), address(y), ctypes.c_int64(count))

        steps(1)
        assert torch.equal(theirs(x[0]), y[0])
        return lambda: theirs(x[0]), steps
    sizes = (ctypes.c_int64(T), ctypes.c_int64(N))

    def runs(count: int) -> float:
        arguments = (model, address(x), *sizes, address(y), ctypes.c_int64(threads))
        return library.time_runs(*arguments, ctypes.c_int64(count))

    runs(1)
    assert torch.equal(frozen(x)[0], y)
    return lambda: frozen(x), runs


def measure(call: Callable[[], object], calls: Callable[[int], float], repeats: int) -> str:
    """The columns of a shape: the shortest turns of both sides, each of about 5 ms at least.

    Other programs lengthen turns, so that medians depend on them.
    """
    call()
    count = max(1, round(5e-3 / max(calls(3) / 3, 1e-7)))
    ours, python = [], []
    for _ in range(repeats):
        ours.append(calls(count) / count)
        start = time.perf_counter()
        for _ in range(count):
            call()
        python.append((time.perf_counter() - start) / count)
    a, b = min(ours), min(python)
    return f"{b * 1e6:10.2f} {a * 1e6:10.2f} {b / a:9.2f}x"


def find_nvrtc() -> None:
    """Let the library open NVRTC of the package nvidia-cuda-nvrtc, as Python does."""
    import nvidia

    found = [path for each in nvidia.__path__ for path in Path(each).rglob("libnvrtc.so.1?")]
    if found:
        os.environ.setdefault("QUANT_GRU_NVRTC", str(max(found)))


def gpu_turns(
    library: ctypes.CDLL, frozen: FrozenQuantGRU, x: Tensor
) -> list[Callable[[int], object]]:
    """Functions that start some calls on torch's current stream: Python, C++, graphs of C++."""
    T, N, _ = x.shape
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gru.safetensors"
        frozen.save(path)
        sizes = (ctypes.c_int64(T), ctypes.c_int64(N))
        call = ctypes.c_void_p(library.open_cuda_call(str(path).encode(), *sizes))
    if not call:
        raise SystemExit("Expected the C++ library to run on this GPU, got the error above")
    frozen, x = frozen.cuda(), x.cuda()
    y = torch.empty(T, N, frozen.shape.hidden_size, device="cuda")

    def runs(count: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        library.time_cuda_runs(call, address(x), address(y), stream, ctypes.c_int64(count))

    def python(count: int) -> None:
        for _ in range(count):
            frozen(x)

    runs(1)
    assert torch.equal(frozen(x)[0], y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runs(10)

    def replays(count: int) -> None:
        for _ in range(-(-count // 10)):
            graph.replay()

    return [python, runs, replays]


def measure_gpu(turns: list[Callable[[int], object]], repeats: int) -> str:
    """The columns of a shape: the shortest turns, each of about 5 ms at least."""

    def seconds(turn: Callable[[int], object], count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        turn(count)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    for turn in turns:
        seconds(turn, 20)
    count = 10 * max(1, round(5e-4 / seconds(turns[1], 20)))
    all_times = [[seconds(turn, count) for turn in turns] for _ in range(repeats)]
    python, ours, graph = (min(each) for each in zip(*all_times, strict=True))
    columns = f"{python * 1e6:10.2f} {ours * 1e6:10.2f} {python / ours:9.2f}x"
    return f"{columns} {graph * 1e6:10.2f}"


def print_gpu_table(library: ctypes.CDLL, args: argparse.Namespace) -> None:
    """Measure all shapes on a GPU and print the table."""
    name = torch.cuda.get_device_name()
    print(f"{machine()}; {name}; {args.config}; shortest of {args.repeats}, us")
    heads = ("N,T,C,H", "Python", "C++", "Python/C++", "C++ graph")
    print("{:>15} {:>10} {:>10} {:>10} {:>10}".format(*heads))
    with torch.inference_mode():
        for shape in GPU_SHAPES:
            gru, _, x = modules(shape, CONFIGS[args.config])
            columns = measure_gpu(gpu_turns(library, gru.freeze(), x), args.repeats)
            print(f"{','.join(map(str, shape)):>15} {columns}", flush=True)


def main() -> None:
    """Measure all shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--config", choices=CONFIGS, default="int8")
    parser.add_argument("--cuda", action="store_true", help="on a GPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.cuda:
        find_nvrtc()
    library = built()
    if args.cuda:
        print_gpu_table(library, args)
        return
    print(f"{machine()}; {executor.chosen()}; {args.config}; shortest of {args.repeats}, us")
    print(f"{'N,T,C,H':>15} {'Python':>10} {'C++':>10} {'Python/C++':>10}")
    with torch.inference_mode():
        for shape in SHAPES:
            gru, _, x = modules(shape, CONFIGS[args.config])
            columns = measure(*engines(library, gru.freeze(), x, args.threads), args.repeats)
            print(f"{','.join(map(str, shape)):>15} {columns}", flush=True)


if __name__ == "__main__":
    main()
