"""The float passes of the C++ library beside nn.GRU, in one run: microseconds and ratios.

    python benchmarks/cpp_passes.py [--threads 1] [--repeats 15]
    python benchmarks/cpp_passes.py --cuda

`forward` is ForwardPass<float>::Run without training beside nn.GRU in inference mode. `training` is
both passes beside a forward and a backward of nn.GRU, with all gradients. Both sides take turns and
the shortest turns count. On a GPU, nn.GRU is cuDNN, TF32 is off, and the host waits after each turn
of many calls; `graph` is a replay of the same passes as a CUDA graph.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import torch
from cpp_library import built, find_nvrtc
from cpu import SHAPES

from calibration import machine
from quant_gru.integer.plan import update_first

Calls = Callable[[int], None]
NAMES = (
    "W", "R", "bx", "br", "x", "h", "v", "tmp_Wx", "tmp_Rh", "W_t", "R_t", "x_t", "dh_new", "dx",
    "dW", "dR", "dbx", "dbr", "dh", "dp", "dq",
)  # fmt: skip


class Passes:
    """Both passes of the C++ library, with the weights of an nn.GRU."""

    def __init__(
        self, library: ctypes.CDLL, gru: torch.nn.GRU, x: torch.Tensor, training: bool, threads: int
    ) -> None:
        T, N, C = x.shape
        H = gru.hidden_size
        W, R, bx, br = (update_first(each.detach()).contiguous() for each in gru.parameters())
        sizes: dict[str, tuple[int, ...]] = {
            "h": (T + 1, N, H), "v": (T, N, 4 * H), "tmp_Wx": (T, N, 3 * H), "tmp_Rh": (N, 3 * H),
            "dh_new": (T + 1, N, H), "dx": (T, N, C), "dW": (C, 3 * H), "dR": (H, 3 * H),
            "dbx": (3 * H,), "dbr": (3 * H,), "dh": (N, H), "dp": (T, N, 3 * H),
            "dq": (T, N, 3 * H),
        }  # fmt: skip
        self.arrays = {name: x.new_zeros(size) for name, size in sizes.items()}
        self.arrays |= {
            "W": W.T.contiguous(), "R": R.T.contiguous(), "W_t": W, "R_t": R, "bx": bx, "br": br,
            "x": x, "x_t": x.permute(2, 0, 1).contiguous(),
        }  # fmt: skip
        self.arrays["dh_new"].fill_(1.0)
        addresses = [
            None if name == "v" and not training else self.arrays[name].data_ptr() for name in NAMES
        ]
        self._pointers = (ctypes.c_void_p * len(NAMES))(*addresses)
        self._library, self._steps = library, T
        blas = stream = None
        if x.is_cuda:
            blas = torch.cuda.current_blas_handle()
            stream = torch.cuda.current_stream().cuda_stream
        self._passes = ctypes.c_void_p(
            library.open_passes(
                int(training), N, C, H, ctypes.c_void_p(blas), ctypes.c_void_p(stream), threads
            )
        )

    def __call__(self, count: int) -> None:
        """Run the passes `count` times."""
        self._library.time_passes(self._passes, self._steps, self._pointers, ctypes.c_int64(count))


def theirs(gru: torch.nn.GRU, x: torch.Tensor, training: bool) -> Calls:
    """Calls of nn.GRU: forward, and in training backward with gradients of 1."""
    if not training:

        def infer(count: int) -> None:
            with torch.inference_mode():
                for _ in range(count):
                    gru(x)

        return infer
    x = x.clone().requires_grad_()
    grad = torch.ones(*x.shape[:2], gru.hidden_size, device=x.device)

    def train(count: int) -> None:
        for _ in range(count):
            gru(x)[0].backward(grad)

    return train


def replays(calls: Calls) -> Calls:
    """The same calls as replays of a CUDA graph of one of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        calls(1)

    def replay(count: int) -> None:
        for _ in range(count):
            graph.replay()

    return replay


def shortest(engines: list[Calls], repeats: int, wait: Callable[[], None]) -> list[float]:
    """Seconds of a call of each engine: their shortest turns, each of about 5 ms at least."""

    def measure(engine: Calls, count: int) -> float:
        wait()
        start = time.perf_counter()
        engine(count)
        wait()
        return (time.perf_counter() - start) / count

    for engine in engines:
        engine(2)
    counts = [max(1, round(5e-3 / measure(engine, 2))) for engine in engines]
    turns = [
        [measure(engine, count) for engine, count in zip(engines, counts, strict=True)]
        for _ in range(repeats)
    ]
    return [min(each) for each in zip(*turns, strict=True)]


def row(library: ctypes.CDLL, shape: tuple[int, ...], args: argparse.Namespace) -> str:
    """The columns of a shape."""
    N, T, C, H = shape
    torch.manual_seed(0)
    device = "cuda" if args.cuda else "cpu"
    gru = torch.nn.GRU(C, H, device=device)
    x = torch.randn(T, N, C, device=device)
    wait = torch.cuda.synchronize if args.cuda else lambda: None
    columns = [f"{','.join(map(str, shape)):>15}"]
    for training in (False, True):
        ours = Passes(library, gru, x, training, args.threads)
        ours(1)
        difference = float((ours.arrays["h"][1:] - gru(x)[0].detach()).abs().max())
        assert difference < 1e-5, f"Expected the states of nn.GRU, got a difference of {difference}"
        engines = [theirs(gru, x, training), ours]
        if args.cuda:
            engines.append(replays(ours))
        times = shortest(engines, args.repeats, wait)
        columns += [f"{seconds * 1e6:10.1f}" for seconds in times]
        columns.append(f"{times[0] / min(times[1:]):7.2f}x")
    return " ".join(columns)


def main() -> None:
    """Measure all shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cuda", action="store_true", help="on a GPU, beside cuDNN")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if args.cuda:
        find_nvrtc()
    library = built()
    name = torch.cuda.get_device_name() if args.cuda else f"{machine()}; {args.threads} threads"
    print(f"{name}; float32; shortest of {args.repeats}, us")
    graph = [f"{'graph':>10}"] if args.cuda else []
    heads = [
        head
        for kind in ("forward", "training")
        for head in (f"{'nn.GRU':>10}", f"{kind:>10}", *graph, f"{'ratio':>8}")
    ]
    print(f"{'N,T,C,H':>15}", *heads)
    stream = torch.cuda.stream(torch.cuda.Stream()) if args.cuda else torch.inference_mode(False)
    with stream:
        for shape in SHAPES:
            print(row(library, shape, args), flush=True)


if __name__ == "__main__":
    main()
