"""Every kind of kernel of actnn once, to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/actnn/sanitized_kernels.py
    compute-sanitizer --tool racecheck python tests/actnn/sanitized_kernels.py
    python tests/actnn/sanitized_kernels.py --device cpu

Prints a line for each case, and exits with 1 if a result differs from the CPU's. Sizes are small
and odd: the last group, byte and thread block are not full, and tensors begin at any element. On a
CPU its own code runs, which checks this program.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from actnn.codec import Key, decode, encode, noise_state, reference
from actnn.layers.compress import compress
from actnn.layers.derivatives import RULES
from actnn.layers.dropout import dropped
from actnn.layers.pooling import Window
from actnn.saving.bit_masks import pass_gradient, positive_mask, rectify, restore_positive

# dtype, bits, group, elements, first element
FLAT = [
    *((torch.float32, bits, 256, 4173, 0) for bits in range(1, 9)),
    (torch.bfloat16, 4, 256, 70_001, 0),
    (torch.bfloat16, 7, 96, 1001, 0),
    (torch.bfloat16, 3, 1024, 5000, 3),
    (torch.float16, 5, 64, 4096, 1),
    (torch.float16, 2, 32, 31, 0),
    (torch.float64, 4, 256, 2000, 0),
    (torch.float32, 2, 2080, 9001, 0),
    (torch.float32, 3, 96, 257, 2),
    (torch.float32, 8, 256, 1, 0),
]
# dtype, bits' dtype, samples, elements of a sample, group, bits that are missing
SAMPLES = [
    (torch.float32, torch.int32, 37, 777, 256, 9),
    (torch.bfloat16, torch.int64, 37, 704, 256, 0),
    (torch.float16, torch.int64, 300, 65, 32, 5),
    (torch.float64, torch.int32, 5, 6400, 96, 0),
    (torch.float32, torch.int64, 1, 3, 64, 0),
]
Case = tuple[str, Callable[[], bool]]


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().nan_to_num(9.0), b.cpu().nan_to_num(9.0))


def _flat(device: str, form: tuple[torch.dtype, int, int, int, int]) -> bool:
    dtype, bits, group, n, start = form
    x = (torch.randn(n + start) * 3).to(dtype)[start:]
    if n > 600:
        x[500] = float("nan")
        x[40], x[301:310] = float("inf"), -float("inf")
    results = True
    for stochastic in (True, False):
        key = Key(noise_state(5, device=device), 7)
        moved = torch.empty(n + start, dtype=dtype, device=device)[start:].copy_(x)
        codes = encode(moved, bits, key, group=group, stochastic=stochastic)
        expected = reference.encode_flat(x, bits, noise_state(5), 7, group, stochastic)
        wanted = reference.decode_flat(*expected, bits, group, n, dtype)
        results &= _equal(codes.data, expected[0]) and _equal(decode(codes), wanted)
        results &= _equal(codes.params.float(), expected[1].float())
    return results


def _samples(device: str, form: tuple[torch.dtype, torch.dtype, int, int, int, int]) -> bool:
    dtype, kind, samples, m, group, missing = form
    x, bits = torch.randn(samples, m).to(dtype), torch.randint(-1, 11, (samples,)).to(kind)
    capacity = int(bits.clamp(1, 8).sum()) - missing
    y = [
        decode(encode(x.to(d), bits.to(d), Key(noise_state(1, device=d), 2), group=group,
                      capacity=capacity))
        for d in ("cpu", device)
    ]  # fmt: skip
    return _equal(*y)


def _masks(device: str, dtype: torch.dtype, n: int, start: int) -> bool:
    x = (torch.randn(n + start) * 4).to(dtype)
    x[::5] = 0.0
    there, x = x.to(device)[start:], x[start:]
    equal = True
    for low, high, slope in ((0.0, float("inf"), 0.0), (0.0, 6.0, 0.0), (0.0, float("inf"), 0.1)):
        (y, bits), (z, found) = (rectify(v, low, high, slope, False) for v in (x, there))
        equal &= _equal(y, z) and _equal(bits, found)
        with torch.no_grad():
            dx, dz = (pass_gradient(b, v, (1,), slope) for b, v in ((bits, x), (found, there)))
        equal &= _equal(dx, dz)
        equal &= _equal(rectify(there.clone(), low, high, slope, True)[0], y)
    bits = positive_mask(there)
    restored = restore_positive(there.abs(), bits)
    return equal and _equal(bits, positive_mask(x)) and _equal(restored > 0, x > 0)


def _dropout(device: str, dtype: torch.dtype, n: int) -> bool:
    x, seed = torch.ones(n, dtype=dtype, device=device), torch.tensor([7**20], device=device)
    y = dropped(x, 0.3, seed, (1,))
    in_place = dropped(x.clone(), 0.3, seed, (1,), x)
    kept = float((y != 0).float().mean())
    return _equal(y, in_place) and abs(kept - 0.7) < 5 * (0.21 / n) ** 0.5


def _slopes(device: str, module: nn.Module, dtype: torch.dtype, bits: int) -> bool:
    rule, ours = RULES[type(module)], compress(copy.deepcopy(module), bits=bits, min_bytes=0)
    x = torch.randn(1003).to(dtype).to(device).requires_grad_()
    (dx,) = torch.autograd.grad(ours(x).sum(), x)
    (wanted,) = torch.autograd.grad(module(x).sum(), x)
    step = (rule.largest - rule.least) / ((1 << bits) - 1)
    return bool(((dx - wanted).abs() <= 1.1 * step + 0.05).all())


def _windows(device: str, pool: nn.Module, shape: tuple[int, ...], last: bool) -> bool:
    n = len(shape) - 2
    x = torch.randn(shape)
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[n]
    x = x.contiguous(memory_format=layout) if last else x
    window = Window(pool, n, x.shape)
    forward = {2: torch.ops.aten.max_pool2d_with_indices, 3: torch.ops.aten.max_pool3d_with_indices}
    _, indices = forward[n](x, *window.settings)
    indices = indices.contiguous(memory_format=layout) if last else indices
    expected, offsets = window.offsets(indices), window.offsets(indices.to(device))
    return _equal(offsets, expected) and _equal(window.indices(offsets), indices)


def cases(device: str) -> Iterator[Case]:
    """Names, and functions that say whether the results are right."""
    for flat in FLAT:
        yield f"codec {flat}", lambda flat=flat: _flat(device, flat)
    for each in SAMPLES:
        yield f"codec by sample {each}", lambda each=each: _samples(device, each)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for n, start in ((2085, 0), (63, 1), (8, 0), (1, 0)):
            yield f"masks {dtype} {n} {start}", lambda a=(dtype, n, start): _masks(device, *a)
        yield f"dropout {dtype}", lambda dtype=dtype: _dropout(device, dtype, 2045)
    modules = [kind() for kind, rule in RULES.items() if rule.kind is not None]
    for bits, module in enumerate([*modules, nn.GELU("tanh")], 1):
        for dtype in (torch.float32, torch.bfloat16):
            name = f"derivative {module} {dtype} {bits} bits"
            yield name, lambda a=(module, dtype, bits): _slopes(device, *a)
    flat_pool = nn.MaxPool2d((2, 3), (2, 1), (1, 0), dilation=(1, 2))
    deep_pool = nn.MaxPool3d(3, 2, 1, ceil_mode=True)
    for last in (False, True):
        yield f"window 2d {last}", lambda a=last: _windows(device, flat_pool, (2, 3, 8, 9), a)
        yield f"window 3d {last}", lambda a=last: _windows(device, deep_pool, (2, 5, 7, 6, 9), a)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    torch.manual_seed(0)
    failed = 0
    for name, run in cases(device):
        print(f"{name}: ", end="", flush=True)
        right = run()
        print("equal" if right else "DIFFERENT", flush=True)
        failed += not right
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
