r"""The C++ library on a GPU against Python on the CPU, bit for bit; skipped without a GPU.

    python -m pytest tests/cpp/test_cpp_cuda.py -q -s
    python tests/cpp/test_cpp_cuda.py --plans 40          # the same without pytest

Builds the library with g++ and cmake, then runs random plans of all kinds on the default stream, on
a stream of the caller, and in a CUDA graph. All differences are printed with the launches of their
call. `--build FOLDER` keeps the build. With compute-sanitizer:

    compute-sanitizer --tool memcheck FOLDER/tests/cuda_golden_test cpp/tests/golden.bin
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from cuda_library import (
    KINDS,
    CudaLibrary,
    GPUCase,
    Prepared,
    Tensors,
    difference,
    gpu_case,
    nvrtc,
)
from make_golden import frozen_gru, saved

from quant_gru import QuantConfig, QuantGRU

ROOT = Path(__file__).parents[2]
PLANS = 220
# a stand-in for the driver, see cpp/tests/fake_cuda.cpp, reads memory of the host
DEVICE = "cpu" if "QUANT_GRU_CUDA_DRIVER" in os.environ else "cuda"

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"
)


def built(folder: Path) -> CudaLibrary:
    """Build the library in a folder, for this machine."""
    if "QUANT_GRU_NVRTC" not in os.environ and nvrtc():
        os.environ["QUANT_GRU_NVRTC"] = str(nvrtc())
    bin_ = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cmake, ninja = (shutil.which(name, path=bin_) for name in ("cmake", "ninja"))
    assert cmake, "Expected cmake to be installed, got none"
    options = ["-DQUANT_GRU_CUDA=ON", "-DQUANT_GRU_INSTRUCTION_SETS=portable"]
    options += ["-DQUANT_GRU_OPTIMIZATION=-O2", "-DQUANT_GRU_EXAMPLES=OFF"]
    if ninja:
        options += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    if shutil.which("ccache"):
        options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    targets = ["quant_gru_shared", "cuda_golden_test", "fake_cuda"]
    for command in (
        [cmake, "-S", str(ROOT / "cpp"), "-B", str(folder), *options],
        [cmake, "--build", str(folder), "--parallel", "--target", *targets],
    ):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return CudaLibrary(folder / "libgru_quant_shared.so")


class Run:
    """A case with its prepared call, or the error of its preparation."""

    def __init__(self, library: CudaLibrary, case: GPUCase, pool: ThreadPoolExecutor) -> None:
        self.case = case
        # kernels compile in several threads
        self._call: Future[Prepared] = pool.submit(library.prepare, case.file, case.T, case.N)
        self._tensors: Tensors | None = None

    @property
    def call(self) -> Prepared:
        """The call; raises the error of its preparation."""
        return self._call.result()

    @property
    def tensors(self) -> Tensors:
        """The tensors on the GPU."""
        if self._tensors is None:
            self._tensors = Tensors(self.case.case, DEVICE)
        return self._tensors


def all_runs(library: CudaLibrary, plans: int) -> list[Run]:
    """Random plans of all kinds; every second one is large."""
    kinds, runs = list(KINDS), []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i in range(plans):
            seed, kind = i // len(kinds), kinds[i % len(kinds)]
            runs.append(Run(library, gpu_case(seed, kind, large=seed % 2 == 1), pool))
    return runs


def synchronize() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def on_default_stream(run: Run) -> None:
    """Two runs in order, the second one over what the first one left."""
    for _ in range(2):
        run.tensors.forget()
        run.tensors.run(run.call)


def on_own_stream(run: Run) -> None:
    """On a stream that waits for nothing."""
    stream = torch.cuda.Stream()
    run.tensors.forget()
    stream.wait_stream(torch.cuda.current_stream())
    run.tensors.run(run.call, stream.cuda_stream)
    stream.synchronize()


def in_graph(run: Run) -> None:
    """In a graph that is replayed twice."""
    graph, tensors = torch.cuda.CUDAGraph(), run.tensors
    call = run.call
    tensors.forget()
    with torch.cuda.graph(graph):
        tensors.run(call, torch.cuda.current_stream().cuda_stream)
    synchronize()
    assert bool((tensors.y == -1).all()), "Expected a capture to run nothing"
    for _ in range(2):
        tensors.forget()
        graph.replay()


WAYS: dict[str, Callable[[Run], None]] = {}
if DEVICE == "cuda":
    # first, because a call must need no run before its capture
    WAYS |= {"a CUDA graph": in_graph, "a stream of the caller": on_own_stream}
WAYS["the default stream"] = on_default_stream


def failures(runs: list[Run], way: Callable[[Run], None]) -> list[str]:
    """Run all cases and describe those that fail."""
    found = []
    for run in runs:
        try:
            way(run)
            synchronize()
            wrong = run.tensors.differences()
            launches = str(run.call) if wrong else ""
        except (RuntimeError, AssertionError) as error:
            wrong, launches = [str(error)], ""
        if wrong:
            found.append("\n".join([run.case.name, *wrong, launches]))
            print("FAILED", found[-1], flush=True)
    return found


def step_by_step(library: CudaLibrary) -> None:
    """One sequence, step by step with states in place, against a whole sequence."""
    gru = frozen_gru(40, 64, layers=2)
    x = torch.randn(50, 1, 40)
    expected, last = gru(x)
    call = library.prepare(saved(gru), 1, 1)
    given = x.to(DEVICE)
    states = torch.zeros(2, 1, 64, device=DEVICE)
    y = torch.empty(50, 1, 64, device=DEVICE)
    for t in range(50):
        call.run(given[t], y[t], states, states)
    synchronize()
    assert torch.equal(y.cpu(), expected)
    assert torch.equal(states.cpu(), last)


def large_batch(library: CudaLibrary) -> None:
    """More rows than fit a GPU at once, from unaligned memory."""
    gru = frozen_gru(41, 128)
    x = torch.randn(20, 3001, 41)
    expected, _ = gru(x)
    call = library.prepare(saved(gru), 20, 3001)
    given = torch.empty(x.numel() + 1, device=DEVICE)[1:].view(x.shape)
    given.copy_(x)
    y = torch.empty(expected.shape, device=DEVICE)
    call.run(given, y)
    synchronize()
    assert torch.equal(y.cpu(), expected), str(call)


def all_projections(library: CudaLibrary) -> None:
    """Sizes that select each projection, with and without an overlap with the recurrence."""
    wrong, sources = [], set()
    for config in (QuantConfig.int8(), QuantConfig.w8a16(), QuantConfig.int16()):
        for C, H, T, N in (
            (40, 64, 1, 1), (40, 64, 9, 1), (41, 100, 100, 32), (128, 256, 100, 64),
            (400, 512, 9, 64), (512, 256, 400, 32), (256, 512, 64, 128), (64, 1100, 6, 5),
        ):  # fmt: skip
            gru = QuantGRU(C, H, config=config)
            gru.calibrate(torch.randn(5, 4, C))
            gru.finalize_calibration()
            frozen, x = gru.freeze(), torch.randn(T, N, C)
            call = library.prepare(saved(frozen), T, N)
            y, given = torch.empty(T, N, H, device=DEVICE), x.to(DEVICE)
            call.run(given, y)
            synchronize()
            found = difference("y", y, frozen(x)[0])
            sources |= {line.split()[0] for line in str(call).splitlines()}
            if found:
                wrong.append(f"C {C}, H {H}, T {T}, N {N}: {found}\n{call}")
    print("kernels:", *sorted(sources))
    assert not wrong, "\n".join(wrong)


def two_streams(library: CudaLibrary) -> None:
    """Two calls of one size at the same time, each with a workspace of its own."""
    gru = frozen_gru(64, 128)
    file = saved(gru)
    calls = [library.prepare(file, 60, 16) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in calls]
    inputs = [torch.randn(60, 16, 64) for _ in calls]
    given = [each.to(DEVICE) for each in inputs]
    results = [torch.empty(60, 16, 128, device=DEVICE) for _ in calls]
    synchronize()
    for _ in range(20):
        for call, stream, x, y in zip(calls, streams, given, results, strict=True):
            call.run(x, y, stream=stream.cuda_stream)
    synchronize()
    for x, y in zip(inputs, results, strict=True):
        assert torch.equal(y.cpu(), gru(x)[0])


def no_allocation(library: CudaLibrary) -> None:
    """A run takes no memory."""
    gru = frozen_gru(64, 128)
    call = library.prepare(saved(gru), 100, 64)
    x = torch.randn(100, 64, 64, device=DEVICE)
    y = torch.empty(100, 64, 128, device=DEVICE)
    call.run(x, y)
    synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(100):
        call.run(x, y)
    synchronize()
    assert torch.cuda.mem_get_info()[0] == free


OTHERS: list[Callable[[CudaLibrary], None]] = [step_by_step, large_batch]
if DEVICE == "cuda":
    OTHERS += [all_projections, two_streams, no_allocation]


@pytest.fixture(scope="module")
def gpu_library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    """The library, built for this machine."""
    return built(tmp_path_factory.mktemp("cpp_cuda"))


@pytest.fixture(scope="module")
def runs(gpu_library: CudaLibrary) -> list[Run]:
    """All random plans, prepared."""
    return all_runs(gpu_library, PLANS)


@pytest.mark.parametrize("way", list(WAYS))
def test_random_plans(runs: list[Run], way: str) -> None:
    """Every random plan gives Python's codes."""
    found = failures(runs, WAYS[way])
    assert not found, f"{len(found)} of {len(runs)} plans differ"


@pytest.mark.parametrize("check", OTHERS, ids=lambda check: check.__name__)
def test_calls(gpu_library: CudaLibrary, check: Callable[[CudaLibrary], None]) -> None:
    """The other checks."""
    check(gpu_library)


def test_golden_file_in_cpp(gpu_library: CudaLibrary, tmp_path: Path) -> None:
    """The program that compute-sanitizer runs."""
    folder = gpu_library.path.parent
    program = folder / "tests" / "cuda_golden_test"
    done = subprocess.run(
        [str(program), str(ROOT / "cpp/tests/golden.bin")],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def main() -> None:
    """Run everything without pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=PLANS)
    parser.add_argument("--build", type=Path, help="where to build; otherwise a temporary folder")
    args: Any = parser.parse_args()
    start = time.perf_counter()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        library = built(args.build or Path(temporary))
        print(f"built after {time.perf_counter() - start:.0f} s", flush=True)
        runs = all_runs(library, args.plans)
        print(f"prepared {len(runs)} plans after {time.perf_counter() - start:.0f} s", flush=True)
        for name, way in WAYS.items():
            found = failures(runs, way)
            wrong += len(found)
            after = time.perf_counter() - start
            print(f"{name}: {len(found)} of {len(runs)} plans differ, after {after:.0f} s")
        for check in OTHERS:
            try:
                check(library)
                print(f"{check.__name__}: passed")
            except (RuntimeError, AssertionError) as error:
                wrong += 1
                print(f"{check.__name__}: FAILED {error}")
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()
