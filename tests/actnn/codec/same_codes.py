"""Comparison of an executor with the definition, byte for byte, with guards around its results."""

import torch

from actnn.codec import noise_state, reference
from actnn.codec.codes import UNBOUNDED, data_bytes
from actnn.codec.noise import RUN

GUARD = 64
STATE = noise_state(0x0123456789ABCDEF, step=3)


class Guarded:
    """A tensor between bytes that must not change."""

    def __init__(self, size, dtype):
        self.bytes = torch.full((size * dtype.itemsize + 2 * GUARD,), 0xA5, dtype=torch.uint8)
        self.inside = self.bytes[GUARD : len(self.bytes) - GUARD].view(dtype)

    def check(self):
        assert (self.bytes[:GUARD] == 0xA5).all()
        assert (self.bytes[len(self.bytes) - GUARD :] == 0xA5).all()


def bits_equal(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_flat(run, x, bits, group, stochastic=True, bounds=UNBOUNDED):
    """Compare equal bits. `run` has the arguments of `run` in cuda/executor.py, without machine."""
    (n,) = x.shape
    expected = reference.encode_flat(x, bits, STATE, 9, group, stochastic, bounds)
    data = Guarded(data_bytes(n, bits), torch.uint8)
    params = Guarded(2 * -(-n // group), torch.bfloat16)
    pairs = params.inside.view(-1, 2)
    run("encode", x, data.inside, pairs, 1, bits, group, STATE, 9, stochastic, bounds=bounds)
    assert bits_equal(data.inside, expected[0])
    assert bits_equal(pairs, expected[1])
    y = Guarded(n, x.dtype)
    run("decode", y.inside, data.inside, pairs, 1, bits, group, bounds=bounds)
    wanted = reference.decode_flat(*expected, bits, group, n, x.dtype, bounds)
    torch.testing.assert_close(y.inside, wanted, rtol=0, atol=0, equal_nan=True)
    for each in (data, params, y):
        each.check()


def check_samples(run, x, bits, group, capacity):
    """Compare bits per sample: x (samples, m), bits int64 (samples,)."""
    samples, m = x.shape
    expected = reference.encode_samples(x, bits, STATE, 9, group, True, capacity)
    data = Guarded(capacity * -(-m // RUN) * (RUN // 8), torch.uint8)
    data.inside.zero_()
    params = Guarded(2 * samples * -(-m // group), torch.bfloat16)
    pairs = params.inside.view(-1, 2)
    ends = bits.cumsum(0)
    more = {"bits_of": bits, "ends": ends, "capacity": capacity}
    run("encode", x.view(-1), data.inside, pairs, samples, 0, group, STATE, 9, True, **more)
    assert bits_equal(data.inside, expected[0])
    assert bits_equal(pairs, expected[1])
    y = Guarded(samples * m, x.dtype)
    run("decode", y.inside, data.inside, pairs, samples, 0, group, **more)
    wanted = reference.decode_samples(*expected, bits, group, m, x.dtype).view(-1)
    torch.testing.assert_close(y.inside, wanted, rtol=0, atol=0, equal_nan=True)
    for each in (data, params, y):
        each.check()


def random_tensor(n, dtype, seed):
    """Numbers of different sizes, with NaN, infinities, zeros and the largest numbers in places."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=random) * 2.0 ** float(torch.randint(-8, 8, (), generator=random))
    x = x + 3 * (seed % 3)
    kinds = torch.rand(-(-n // 32), generator=random).repeat_interleave(32)[:n]
    x = torch.where(kinds < 0.1, 0.0, x)
    x = torch.where((kinds > 0.1) & (kinds < 0.15), x * 1e-41, x)
    x = x.to(dtype)
    if n > 600 and seed % 4 == 0:
        x[500], x[40] = float("nan"), float("inf")
    if n > 600 and seed % 4 == 1:
        x[500], x[501] = torch.finfo(dtype).max, -0.0
    if n > 300 and seed % 4 in (1, 2):
        x[::50], x[32:64], x[70] = -torch.inf, torch.inf, torch.inf
        x[(n - 1) // 32 * 32 :] = -torch.inf
    return x
