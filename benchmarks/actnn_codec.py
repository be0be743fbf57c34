"""Encoding and decoding of activations against a copy on the same device, measured in one run.

    python benchmarks/actnn_codec.py [--device cuda] [--mib 1024] [--repeats 10] [--threads 1]

Bytes moved are those of the tensor and of its codes. `GB/s` is bytes moved per time, `of copy` the
share of the rate at which torch copies a tensor of this size, bytes read and written counted.
`host us` is the time that a call takes on the host, for a small tensor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from actnn.codec import Key, decode, encode, noise_state
from calibration import machine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = (1, 2, 3, 4, 8)
SMALL = 1 << 16  # elements


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


def rates(x: Tensor, bits: int, key: Key, repeats: int) -> list[float]:
    """Bytes moved per second by encode and by decode."""
    codes = encode(x, bits, key)
    calls = (lambda: encode(x, bits, key), lambda: decode(codes))
    return [(x.nbytes + codes.nbytes) / seconds(call, x.device, repeats) for call in calls]


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
    copy = copy_rate(size, device, chosen.repeats)
    print(f"copy of {size >> 20} MiB: {copy / 1e9:.0f} GB/s")
    print("dtype     bits    encode   of copy    decode   of copy")
    key = Key(noise_state(0, device=device), 0)
    for dtype in DTYPES:
        x = torch.randn(size // dtype.itemsize, device=device).to(dtype)
        for bits in BITS:
            figures = "".join(
                f"{r / 1e9:10.1f}{r / copy:10.3f}" for r in rates(x, bits, key, chosen.repeats)
            )
            print(f"{str(dtype)[6:]:10}{bits:4}{figures}")
    x = torch.randn(SMALL, device=device)
    codes = encode(x, 4, key)
    for what, call in (("encode", lambda: encode(x, 4, key)), ("decode", lambda: decode(codes))):
        print(f"host us of {what}: {host_microseconds(call, device):.1f}")


if __name__ == "__main__":
    main()
