"""Conversions of dtypes at the boundary of the CPU's kernels: the bits of PyTorch."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from bits import same_bits

from quant_gru.integer.call_form import FLOATS
from quant_gru.kernels import cpu

HERE, KERNELS = Path(__file__).parent, Path(cpu.__file__).parents[1]
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.slow
LOW = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module", params=["-O1", "-O3"])
def convert(request, tmp_path_factory):
    """convert(values, dtype): values in float32, which native code reads or writes."""
    if COMPILER is None:
        pytest.skip("needs g++")
    path = tmp_path_factory.mktemp("real") / "real_values.so"
    flags = ["-std=c++17", request.param, "-ffp-contract=off", "-fPIC", "-shared", f"-I{KERNELS}"]
    subprocess.run([COMPILER, *flags, HERE / "real_values.cpp", "-o", path], check=True)
    library = ctypes.CDLL(str(path))

    def run(values, dtype):
        writes = values.dtype is torch.float32
        found = torch.empty(values.shape, dtype=dtype)
        real, single = (found, values) if writes else (values, found)
        addresses = [ctypes.c_void_p(each.data_ptr()) for each in (real, single)]
        count = ctypes.c_int64(values.numel())
        library.convert(FLOATS[real.dtype], addresses[0], count, addresses[1], int(writes))
        return found

    return run


@pytest.mark.parametrize("dtype", LOW)
def test_every_value_of_16_bits(convert, dtype):
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    assert same_bits(convert(values, torch.float32), values.float())
    assert same_bits(convert(values.float(), dtype), values)


@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_rounding(convert, dtype):
    """All exponents; fractions at, below and beyond ties of both dtypes; limits."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = (high[:, None] | low).flatten().to(torch.int32).view(torch.float32)
    assert same_bits(convert(values, dtype), values.to(dtype))


def test_double_precision_is_rounded(convert):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5000, dtype=torch.float64, generator=generator)
    values = torch.cat([values, values * 1e300, values * 1e-300, values * 1e-40])
    assert same_bits(convert(values, torch.float32), values.float())
