"""The CUDA kernels of masks, dropout and norms, on an emulated GPU and compiled for real ones."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda"))
from host_machine import COMPILER, Host, folder_of

from actnn.layers.derivatives import RULES, kind_of
from actnn.layers.pooling import Window
from actnn.saving.bit_masks import pack_mask
from actnn.saving.cuda.executor import (
    REAL,
    SOURCES,
    Limits,
    RowSizes,
    kernel_of,
    limit_rows,
    run,
    run_windows,
)
from quant_gru.kernel_runtime.cuda import compiler
from quant_gru.kernel_runtime.cuda.launch import Kernel

pytestmark = pytest.mark.slow
emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Host(folder_of(tmp_path_factory), sources=SOURCES)


def numbers(n: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(n) * 4
    x[::5], x[1::7], x[2::11] = 0.0, 6.0, -0.0
    if n > 20:
        x[3], x[10], x[15] = float("nan"), float("inf"), -float("inf")
    return x.to(dtype)


def bits_for(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(-(-x.numel() // 8), dtype=torch.uint8)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))


@emulated
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_rectifiers_and_their_gradients(host, dtype):
    x = numbers(2085, dtype)
    dy = numbers(2085, dtype).nan_to_num(1.0)
    functions = {
        "relu": (torch.relu, {"high": float("nan")}),
        "relu6": (torch.nn.functional.relu6, {"high": 6.0}),
        "leaky": (lambda v: torch.nn.functional.leaky_relu(v, 0.1), {"slope": 0.1, "kind": 1}),
    }
    for function, settings in functions.values():
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        ours, bits = torch.empty_like(x), bits_for(x)
        run("rectify", x, ours, bits=bits, machine=host, **settings)
        assert equal(y.detach(), ours)
        back = torch.empty_like(x)
        run("pass", dy, back, bits=bits, slope=settings.get("slope", 0.0), machine=host)
        # kernels of torch differ in what they do with the gradient at a NaN
        assert torch.equal(dx[~x.isnan()], back[~x.isnan()])
        only = bits_for(x)
        run("rectify", x, None, bits=only, machine=host, **settings)
        assert torch.equal(bits, only)
        in_place = x.clone()
        run("rectify", in_place, in_place, bits=only, machine=host, **settings)
        assert equal(in_place, ours)


@emulated
def test_tensors_at_any_address(host):
    x = numbers(60, torch.float32)[1:]
    y, bits = torch.empty_like(x), bits_for(x)
    run("rectify", x, y, bits=bits, high=float("nan"), machine=host)
    assert equal(torch.relu(x), y)
    assert torch.equal(bits, pack_mask(~(x <= 0)))


@emulated
@pytest.mark.parametrize("n", [1, 7, 8, 2041, 2048, 2085])
def test_nothing_is_written_beyond_the_end(host, n):
    """Neither a byte of bits nor an element of the last block."""
    guard, width = 64, 3
    x = torch.randn(n + 2 * guard)[guard : guard + n]
    settings = {"high": float("nan"), "machine": host}
    for function, size in (("rectify", -(-n // 8)), ("slopes", -(-n // 8) * width)):
        bits = torch.full((size + 2 * guard,), 0xA5, dtype=torch.uint8)
        y = torch.full((n + 2 * guard,), 7.0)
        inside = bits[guard : guard + size]
        if function == "rectify":
            run(function, x, y[guard : guard + n], bits=inside, **settings)
            assert torch.equal(y[guard : guard + n], x.relu())
            run("pass", x, y[guard : guard + n], bits=inside, machine=host)
        else:
            run(function, x, None, bits=inside, seed=torch.tensor([1, 2]), width=width,
                machine=host)  # fmt: skip
            run("times", x, y[guard : guard + n], bits=inside, width=width, machine=host)
        for each, value in ((bits, 0xA5), (y, 7.0)):
            assert (each[:guard] == value).all()
            assert (each[len(each) - guard :] == value).all()


@emulated
def test_restored_values_have_the_sign_of_the_mask(host):
    x = torch.rand(100)
    x[::3] = 0.0
    mask = torch.rand(100) < 0.5
    y = torch.empty_like(x)
    tiny = torch.finfo(torch.float32).tiny
    run("restore", x, y, bits=pack_mask(mask), low=tiny, machine=host)
    assert torch.equal(y > 0, mask)
    assert torch.equal(y, torch.where(mask, x.clamp(min=tiny), 0))


@emulated
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_dropout(host, dtype):
    n, p = 40000, 0.3
    x, dy = torch.ones(n, dtype=dtype), torch.ones(n, dtype=dtype)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    seed = torch.tensor([12345678901234])
    settings = {"seed": seed, "low": p, "slope": 1 / (1 - p), "machine": host}
    run("dropout", x, y, **settings)
    run("dropout", dy, dx, **settings)
    assert torch.equal(y, dx)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).to(dtype).item()}
    dropped = (y == 0).numpy()
    assert abs(dropped.mean() - p) < 4 * (p * (1 - p) / n) ** 0.5
    pairs = np.logical_and(dropped[1:], dropped[:-1]).mean()
    assert abs(pairs - p * p) < 0.01
    other = torch.empty_like(x)
    run("dropout", x, other, **{**settings, "seed": seed + 1})
    assert not torch.equal(y, other)


SMOOTH = [*(kind() for kind, rule in RULES.items() if rule.kind is not None), torch.nn.GELU("tanh")]


@emulated
@pytest.mark.parametrize(
    ("module", "bits"),
    [(each, 3) for each in SMOOTH] + [(torch.nn.GELU(), 4), (torch.nn.GELU(), 8)],
    ids=str,
)
def test_codes_of_derivatives(host, module, bits):
    rule, x = RULES[type(module)], torch.randn(997) * 3
    kind = kind_of(module, rule)
    source = module(x) if rule.of_output else x
    dy = torch.randn(997)
    exact = rule.backward(dy, source, module)
    step = (rule.largest - rule.least) / (2**bits - 1)
    draws = []
    for tensor in range(150):
        codes = torch.empty(-(-997 // 8) * bits, dtype=torch.uint8)
        state, settings = torch.tensor([5, 6]), {"width": bits, "machine": host}
        settings |= {"low": rule.least}
        run(
            "slopes",
            source,
            None,
            bits=codes,
            seed=state,
            tensor=tensor,
            high=1 / step,
            kind=kind,
            **settings,
        )
        dx = torch.empty_like(dy)
        run("times", dy, dx, bits=codes, slope=step, **settings)
        draws.append(dx)
    draws = torch.stack(draws)
    assert ((draws - exact).abs() <= step * dy.abs() * 1.001 + 1e-6).all()
    error = (draws.mean(0) - exact).abs()
    assert (error <= 5 * step / 2 * dy.abs() / 150**0.5 + 1e-6).all()
    assert draws.std(0).max() > 0


@emulated
@pytest.mark.parametrize("last", [False, True])
def test_window_positions(host, last):
    pool = torch.nn.MaxPool2d((2, 3), (2, 1), (1, 0), dilation=(1, 2))
    x = torch.randn(2, 3, 8, 9)
    if last:
        x = x.to(memory_format=torch.channels_last)
    window = Window(pool, 2, x.shape)
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, *window.settings)
    if last:
        indices = indices.contiguous(memory_format=torch.channels_last)
    expected = window.offsets(indices)
    sizes = [[1, 8, 9], [1, *indices.shape[-2:]], [1, 2, 3], [1, 2, 1], [0, 1, 0], [1, 1, 2]]
    offsets, again = torch.empty_like(expected), torch.empty_like(indices)
    inner = 3 if last else 1
    run_windows("window_offsets", indices, offsets, inner, sizes, machine=host)
    run_windows("window_indices", again, offsets, inner, sizes, machine=host)
    assert torch.equal(offsets, expected)
    assert torch.equal(again, indices)


@emulated
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((301, 40, 1), torch.float32),
        ((2000, 33, 1), torch.bfloat16),
        ((1, 1, 1), torch.float32),
        ((4, 3, 49), torch.bfloat16),
        ((1, 5, 96), torch.float32),
        ((1, 5, 400), torch.float16),
        ((7, 3, 3000), torch.float32),
    ],
    ids=str,
)
def test_rows_of_norms(host, sizes, dtype):
    """Rows above the limit have it after the kernel; others keep their bits."""
    torch.manual_seed(0)
    rows = sizes[1]
    x = torch.randn(sizes) * torch.logspace(-2, 2, rows)[:, None] + torch.arange(rows)[:, None]
    x = x.to(dtype)
    mean = torch.arange(rows).float() + 0.25
    codes = torch.tensor([[0.0, 1e6]] * 700).bfloat16(), 700
    for center in (mean, None):
        off = x.float() - (0 if center is None else center[:, None])
        scale = torch.full((rows,), 2.0)
        scale[::2] = 0.001  # below the limit
        eps, most = 0.2, 4.0
        limit = (1 - eps * scale.square()) * most
        square = off.square().mean((0, 2)) * scale.square()
        factor = (square / limit).clamp(min=1).rsqrt()
        expected = (x.float() + off * (factor - 1)[:, None]).to(dtype)
        memory = torch.full((x.numel() + 128,), 7.0, dtype=dtype)
        found = memory[64:-64].view(sizes)
        found.copy_(x)
        limits = Limits(eps, most, 1e-6)
        limit_rows(found, center, scale, *codes, RowSizes(*sizes), limits, machine=host)
        assert (memory[:64] == 7).all()
        assert (memory[-64:] == 7).all()
        calm = square < limit * 0.999
        assert calm.any() or rows == 1
        assert torch.equal(found[:, calm], x[:, calm])
        tolerance = 1e-5 if dtype == torch.float32 else 0.01
        largest = off.abs().amax((0, 2))[:, None] + rows
        assert ((found.float() - expected.float()).abs() <= tolerance * largest).all()
        again = found.clone()
        limits = Limits(eps, most * 1.01, 1e-6)
        limit_rows(again, center, scale, *codes, RowSizes(*sizes), limits, machine=host)
        assert torch.equal(again, found)  # what has the limit keeps it


@emulated
@pytest.mark.parametrize("groups", [1, 63, 64, 20000])
def test_rows_above_noise_are_not_read(host, groups):
    """By the largest step, of which the sign is a mark; others are limited."""
    x = torch.randn(4000, 2, 5) * 10
    mean, scale = torch.zeros(2), torch.tensor([1.0, 0.5])
    limits = Limits(0.1, 5.0, 1e-6)  # variances: 0.9 and 3.9
    for place in {0, groups // 2, groups - 1}:
        steps = torch.zeros(groups, 2).bfloat16()
        steps[place, 1] = -5.5  # between 4 sqrt(0.9) and 4 sqrt(3.9)
        found = x.clone()
        limit_rows(found, mean, scale, steps, groups, RowSizes(4000, 2, 5), limits, machine=host)
        assert torch.equal(found[:, 1], x[:, 1])
        square = found[:, 0].square().mean()
        assert abs(float(square) - 0.9 * 5) < 1e-3


@emulated
def test_rows_that_are_not_finite(host):
    """An infinity or a NaN does not reach other rows."""
    x = torch.randn(8, 4, 9)
    x[2, 1, 3], x[3, 2, 4] = float("inf"), float("nan")
    found, scale = x.clone(), torch.full((4,), 0.1)
    codes = torch.ones(1, 2).bfloat16(), 1
    limits = Limits(1e-5, 2.0, 1e-6)
    limit_rows(found, torch.zeros(4), scale, *codes, RowSizes(8, 4, 9), limits, machine=host)
    assert torch.equal(found[:, [0, 3]], x[:, [0, 3]])
    assert not found[2, 1, 3].isfinite()
    assert not found[3, 2, 4].isfinite()


@pytest.mark.skipif(compiler.missing() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_compile(arch, tmp_path, monkeypatch):
    monkeypatch.setenv(SOURCES.cache.variable, str(tmp_path))
    dtype = dict(zip(("sm_80", "sm_90a", "sm_100"), REAL, strict=True))[arch]
    kernels = [kernel_of(name, dtype, True, 1, 3) for name in ("rectify", "dropout", "slopes")]
    kernels.append(Kernel.of("windows", "window_offsets", {}))
    kernels.append(Kernel.of("rows", "limit_rows", {"REAL": REAL[dtype], "ROWS": 32}))
    for kernel in kernels:
        code = compiler.machine_code(SOURCES, kernel.source, dict(kernel.macros), arch)
        assert code.startswith(b"\x7fELF")
