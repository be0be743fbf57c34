"""Encoding and decoding of activations against a copy on the same device, measured in one run.

    python benchmarks/actnn.py codec [--device cuda] [--mib 1024] [--repeats 10] [--threads 1]

Bytes moved are those of the tensor and of its codes. `encode` and `decode` are GB of them per
second, `of copy` the share of the rate at which torch copies a tensor of this size, bytes read and
written counted. Bits `1..7` are bits per sample: 1 to 7 in turn, for 256 samples. `host us` is the
time that a call takes on the host, for a small tensor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from actnn.codec import Codes, Key, decode, encode, noise_state
from calibration import machine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (1, 2, 3, 4, 8)
GROUPS = (32, 64, 96, 128, 512, 1024, 4096)
SMALL = 1 << 16  # elements
SAMPLES = 256


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The least time of a call, of three series on a GPU and of all calls on a CPU."""
    for _ in range(2):
        call()
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        return min(found)
    found = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / repeats)
    return min(found)


def host_microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Time on the host of a call that does not wait for the device."""
    for _ in range(100):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        call()
    spent = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.synchronize()
    return spent / 1000 * 1e6


def copy_rate(size: int, device: torch.device, repeats: int) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device, repeats)


def rates(
    x: Tensor, bits: int | Tensor, key: Key, group: int, capacity: int | None, repeats: int
) -> list[float]:
    """Bytes moved per second by encode and by decode."""

    def call() -> Codes:
        return encode(x, bits, key, group=group, capacity=capacity)

    codes = call()
    calls = (call, lambda: decode(codes))
    return [(x.nbytes + codes.nbytes) / seconds(each, x.device, repeats) for each in calls]


def forms() -> Iterator[tuple[torch.dtype, int, int]]:
    """The dtypes, bits and groups that are measured; bits 0 are bits per sample."""
    for dtype in DTYPES:
        for bits in BITS:
            yield dtype, bits, 256
    yield torch.float64, 4, 256
    for group in GROUPS:
        yield torch.float32, 4, group
    yield torch.float32, 0, 256
    yield torch.bfloat16, 0, 256


def print_rates(device: torch.device, size: int, repeats: int) -> None:
    """Print a line for each form."""
    copy = copy_rate(size, device, repeats)
    print(f"copy of {size >> 20} MiB: {copy / 1e9:.0f} GB/s")
    print("dtype     bits group    encode   of copy    decode   of copy")
    key = Key(noise_state(0, device=device), 0)
    for dtype, bits, group in forms():
        x = torch.randn(size // dtype.itemsize, dtype=torch.float32, device=device).to(dtype)
        x = x.view(SAMPLES, -1)
        each: int | Tensor = bits
        capacity = None
        if bits == 0:
            each = torch.arange(SAMPLES, device=device) % 7 + 1
            capacity = int(each.sum())
        figures = "".join(
            f"{r / 1e9:10.1f}{r / copy:10.3f}"
            for r in rates(x, each, key, group, capacity, repeats)
        )
        print(f"{str(dtype)[6:]:10}{bits or '1..7':>4}{group:6}{figures}", flush=True)


def print_host_times(device: torch.device) -> None:
    """Print the time of calls on the host."""
    state = noise_state(0, device=device)
    key, x = Key(state, 0), torch.randn(SMALL, device=device)
    codes, operator = encode(x, 4, key), torch.ops.actnn.encode
    bits = torch.full((SAMPLES,), 4, device=device)
    of_samples = encode(x.view(SAMPLES, -1), bits, key)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(x, 4, key),
        "decode": lambda: decode(codes),
        "encode, bits per sample": lambda: encode(x.view(SAMPLES, -1), bits, key),
        "decode, bits per sample": lambda: decode(of_samples),
        "actnn::encode": lambda: operator(x, 4, 256, state, 0, True),
        "torch.add": lambda: torch.add(x, 1),
    }
    for what, call in calls.items():
        print(f"host us of {what}: {host_microseconds(call, device):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, help="of the tensor; 1024 on a GPU, 64 on a CPU")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    torch.set_num_threads(chosen.threads)
    size = (chosen.mib or (1024 if device.type == "cuda" else 64)) << 20
    print(torch.cuda.get_device_name(device) if device.type == "cuda" else machine())
    print_rates(device, size, chosen.repeats)
    print_host_times(device)
