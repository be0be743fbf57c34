"""Calls of the C++ library beside those of Python, in one run: microseconds and ratios.

    python benchmarks/cpp_library.py [--repeats 15] [--config int8] [--threads 1]

Builds the library with all instruction sets. Both sides take turns on the same frozen GRU and the
same inputs, real values in and out. With one step, `Stream::step` stands beside `stream(x)`,
otherwise `Model::run` beside `frozen(x)`. The outputs are compared bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
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


def built(cuda: bool = False) -> ctypes.CDLL:
    """The functions of time_calls.cpp and time_passes.cpp."""
    ccache = shutil.which("ccache")
    options = [f"-DQUANT_GRU_CUDA={int(cuda)}"]
    if ccache:
        options.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}")
    configure = ["cmake", "-S", str(HERE / "cpp_library"), "-B", str(BUILD), *options]
    for command in (configure, ["cmake", "--build", str(BUILD), "--parallel", "2"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    library = ctypes.CDLL(str(BUILD / "libtime_calls.so"))
    for name in ("open_model", "open_stream", "open_passes"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("time_runs", "time_steps", "time_passes"):
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
        path = Path(folder) / "gru.qgru"
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


def main() -> None:
    """Measure all shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--config", choices=CONFIGS, default="int8")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = built()
    print(f"{machine()}; {executor.chosen()}; {args.config}; shortest of {args.repeats}, us")
    print(f"{'N,T,C,H':>15} {'Python':>10} {'C++':>10} {'Python/C++':>10}")
    with torch.inference_mode():
        for shape in SHAPES:
            gru, _, x = modules(shape, CONFIGS[args.config])
            columns = measure(*engines(library, gru.freeze(), x, args.threads), args.repeats)
            print(f"{','.join(map(str, shape)):>15} {columns}", flush=True)


if __name__ == "__main__":
    main()
