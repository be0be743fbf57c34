"""The CUDA kernels: bytes of the definition on an emulated GPU, and compiled for real ones."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from host_machine import COMPILER
from same_codes import check_flat, check_samples, random_tensor

from actnn.codec.cuda.executor import SOURCES, kernel_of, run, sums_of
from actnn.errors import ActNNError
from quant_gru.kernel_runtime.cuda import compiler
from quant_gru.kernel_runtime.cuda.launch import Kernel

pytestmark = pytest.mark.slow

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# dtype, bits, group, elements, stochastic: tiles of all dtypes, all packings, the general path
CASES = [
    (torch.float32, 2, 256, 2 * 1024 + 300, True),
    (torch.float32, 5, 64, 256 * 3 + 33, True),
    (torch.bfloat16, 4, 256, 2048 + 77, True),
    (torch.bfloat16, 3, 128, 1024 + 1, False),
    (torch.float16, 8, 64, 512 * 2 + 100, True),
    (torch.float16, 1, 512, 4096, True),
    (torch.float64, 8, 192, 768 + 700, True),
    (torch.float32, 7, 96, 333, True),
    (torch.bfloat16, 6, 1024, 1500, True),
    (torch.float32, 4, 32, 1024 + 37, True),
    (torch.bfloat16, 2, 96, 8 * 192 + 100, True),
    (torch.float32, 3, 2080, 5000, True),
]


@emulated
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_return_the_same_bytes(host, case):
    dtype, bits, group, n, stochastic = case
    for seed in range(4) if bits == 2 else (n % 4,):
        x = random_tensor(n, dtype, seed)
        check_flat(partial(run, machine=host), x, bits, group, stochastic)


@emulated
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_keep_the_bounds(host, case):
    dtype, bits, group, n, stochastic = case
    x = torch.nn.functional.hardtanh(random_tensor(n, dtype, 3))
    check_flat(partial(run, machine=host), x, bits, group, stochastic, bounds=(-1.0, 1.0))


@emulated
def test_kernels_take_elements_at_any_address(host):
    x = torch.randn(2000)
    for start in (1, 4):
        check_flat(partial(run, machine=host), x[start : start + 1300], 2, 256)


@emulated
@pytest.mark.parametrize("m", [301, 704])  # the general path, and tiles with a rest
def test_kernels_take_bits_of_samples(host, m):
    x = torch.randn(8, m)
    x[2, 5], x[3, 100:200] = torch.inf, -torch.inf
    bits = torch.tensor([3, 1, 8, 5, 2, 6, 4, 7])
    for capacity in (36, 35) if m == 301 else (35,):
        check_samples(partial(run, machine=host), x, bits, 64, capacity)


@emulated
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernels_sum_bits(host, dtype):
    for rows in (1, 7, 300, 1025):
        bits = torch.randint(-1, 11, (rows,), dtype=dtype)
        found, ends = sums_of(bits, host)
        assert torch.equal(found, bits.clamp(1, 8).long())
        assert torch.equal(ends, found.cumsum(0))


def test_codes_at_odd_addresses_are_an_error(host):
    data, params = torch.zeros(9, dtype=torch.uint8)[1:], torch.zeros(1, 2, dtype=torch.bfloat16)
    with pytest.raises(ActNNError, match="Expected codes and parameters to begin at multiples"):
        run("decode", torch.empty(32), data, params, 1, 2, 256, machine=host)


@emulated
def test_empty_tensors_launch_nothing(host):
    launched = len(host.launched)
    check_flat(partial(run, machine=host), torch.empty(0), 2, 256)
    assert len(host.launched) == launched


def kernels(arch):
    yield Kernel.of("sum_bits", "sum_bits", {"LONG": 0})
    forms = [(torch.float32, 2, 256), (torch.float16, 3, 512)]
    if arch == "sm_90a":
        forms += [(torch.bfloat16, 8, 256), (torch.float64, 4, 1024)]
        forms += [(torch.float32, 0, 64), (torch.bfloat16, 3, 96)]
    for function in ("encode", "decode"):
        for dtype, bits, group in forms:
            yield kernel_of(function, dtype, bits, group, dtype != torch.float64, True).kernel


@pytest.mark.skipif(compiler.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_compile(arch, tmp_path, monkeypatch):
    monkeypatch.setenv(SOURCES.cache.variable, str(tmp_path))

    def compiled(kernel):
        return compiler.machine_code(SOURCES, kernel.source, dict(kernel.macros), arch)

    with ThreadPoolExecutor(2) as pool:
        assert all(code.startswith(b"\x7fELF") for code in pool.map(compiled, kernels(arch)))
