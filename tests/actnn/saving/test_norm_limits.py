"""Norms whose rows have no variance, such as maps of filters that are 0."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from actnn_models import distance, gradient
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda"))
from host_machine import COMPILER, Host, folder_of

import actnn
from actnn.saving.cuda import executor

WIDTH = 32


class Tokens(nn.Module):
    """A norm of channels, as a function, for images."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)


class Images(nn.Module):
    """Small maps, of which groups of codes span several, a norm, and a layer that mixes them."""

    def __init__(self, norm):
        super().__init__()
        self.embed, self.norm, self.head = nn.Conv2d(3, WIDTH, 1), norm, nn.Conv2d(WIDTH, 8, 3)
        with torch.no_grad():
            self.embed.weight[:8] = self.embed.bias[:8] = 0

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.embed(x)) + 1))


def rms_norm(x):
    """As on a GPU; on a CPU, F.rms_norm has several operations."""
    return torch.ops.aten._fused_rms_norm(x, [WIDTH], None, 1e-5)[0]


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


NORMS = {
    "GroupNorm": lambda: nn.GroupNorm(8, WIDTH),
    "GroupNorm, eps 1e-12": lambda: nn.GroupNorm(8, WIDTH, eps=1e-12),
    "BatchNorm": lambda: nn.BatchNorm2d(WIDTH),
    "BatchNorm, eps 1e-12": lambda: nn.BatchNorm2d(WIDTH, eps=1e-12),
    "batch norm": lambda: Function(lambda x: F.batch_norm(x, None, None, training=True)),
    "InstanceNorm": lambda: nn.InstanceNorm2d(WIDTH),
    "InstanceNorm, affine": lambda: nn.InstanceNorm2d(WIDTH, eps=1e-12, affine=True),
    "layer norm": lambda: Tokens(lambda x: F.layer_norm(x, [WIDTH], eps=1e-12)),
    "RMS norm": lambda: Tokens(rms_norm),
}


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Host(folder_of(tmp_path_factory), sources=executor.SOURCES)


def compressed_loss(model, x, way, min_bytes):
    """The loss, whose saved tensors became codes of 8 bits in a compressed model or a context."""
    if way == "model":
        return actnn.compress(model, bits=8, min_bytes=min_bytes)(x).square().mean()
    with actnn.compressed(bits=8, min_bytes=min_bytes):
        return model(x).square().mean()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("way", ["model", "context"])
@pytest.mark.parametrize("name", NORMS)
def test_rows_without_variance(name, way, layout):
    torch.manual_seed(0)
    model, x = Images(NORMS[name]()).to(memory_format=layout), torch.randn(4, 3, 5, 5)
    x[1] = 0  # tokens without variance
    x = x.to(memory_format=layout)
    if name in ("layer norm", "RMS norm"):
        nn.init.zeros_(model.embed.bias)
    exact = gradient(model(x).square().mean(), model)
    value = compressed_loss(model, x, way, 1024)
    assert distance(gradient(value, model), exact) < 0.05


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("GroupNorm", torch.contiguous_format),
        ("BatchNorm", torch.contiguous_format),
        ("BatchNorm", torch.channels_last),
        ("InstanceNorm", torch.contiguous_format),
    ],
    ids=str,
)
def test_kernels_for_rows_without_variance(name, layout, host, monkeypatch):
    """As on a GPU: the kernels have the layout of every norm, and leave what is held as it is."""
    calls = []

    def limit_rows(x, *arguments):
        calls.append(x.clone())
        executor.limit_rows(x, *arguments, machine=host)
        calls[-1] = calls[-1] - x

    kernels = SimpleNamespace(
        available=lambda x: True, limit_rows=limit_rows, Limits=executor.Limits
    )
    monkeypatch.setattr("actnn.saving.norm_limits.cuda", kernels)
    test_rows_without_variance(name, "context", layout)
    assert len(calls) == 1
    rows = calls[0].abs().amax((0, 2, 3))
    assert (rows > 0).any()
    assert (rows == 0).any()


class Reading(nn.Module):
    """A norm whose backward also has what others have saved: as a checkpoint, or after a norm."""

    def __init__(self, norm, way):
        super().__init__()
        self.embed, self.first = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.norm, self.way = nn.Linear(WIDTH, WIDTH), norm, way
        with torch.no_grad():
            for each in (self.first.weight, self.mix.weight, self.mix.bias):
                each.mul_(0.1)

    def _last(self, x):
        return self.norm(self.mix(x))

    def forward(self, x):
        x = self.embed(x)
        if self.way == "after a norm":
            return F.gelu(self.norm(self.first(x)))
        return F.gelu(checkpoint(self._last, x, use_reentrant=self.way == "reentrant"))


@pytest.mark.parametrize("by", ["model", "context"])
@pytest.mark.parametrize("way", ["checkpoint", "reentrant", "after a norm"])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.GroupNorm(4, WIDTH),
        lambda: Function(lambda x: F.layer_norm(x, [WIDTH])),
        lambda: Function(rms_norm),
    ],
    ids=["LayerNorm", "GroupNorm", "layer norm", "RMS norm"],
)
def test_only_what_a_norm_has_saved_is_limited(norm, way, by):
    torch.manual_seed(0)
    model, x = Reading(norm(), way), 10 * torch.randn(64, 8)
    leaves = (*model.parameters(), x)
    x.requires_grad_()

    def found(value):
        for each in leaves:
            each.grad = None
        value.backward()  # a reentrant checkpoint refuses autograd.grad
        return torch.cat([each.grad.flatten() for each in leaves if each.grad is not None])

    exact = found(model(x).square().mean())
    value = compressed_loss(model, x, by, 0)
    assert distance(found(value), exact) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_variance_stay_as_they_are(dtype, monkeypatch):
    """Of 8 bits, the noise is small beside numbers of rows."""
    torch.manual_seed(0)
    model, x = Images(nn.GroupNorm(8, WIDTH)).to(dtype), torch.randn(4, 3, 5, 5, dtype=dtype)
    nn.init.normal_(model.embed.weight)
    found = []
    for _ in range(2):
        found.append(gradient(compressed_loss(model, x, "context", 1024), model))
        monkeypatch.setattr("actnn.saving.norm_limits.NORMS", {})
    assert distance(*found) < (1e-3 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_without_variance(bits):
    """Batch norms of rows of features, of which each group of codes has all channels."""
    torch.manual_seed(0)
    embed, head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 8)
    with torch.no_grad():
        embed.weight[:8] = embed.bias[:8] = 0
    model, x = nn.Sequential(embed, nn.BatchNorm1d(WIDTH), nn.Tanh(), head), torch.randn(64, 16)
    exact = gradient(model(x).square().mean(), model)
    with actnn.compressed(bits=bits, min_bytes=0):
        value = model(x).square().mean()
    assert distance(gradient(value, model), exact) < 0.4 / 2 ** (bits - 4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("norm", ["GroupNorm", "BatchNorm", "InstanceNorm"])
def test_noise_that_averages_out_is_not_limited(norm, compiled):
    """Of 4 bits, it is as large as channels with a tenth of the variance of others."""
    torch.manual_seed(0)
    model, x = Images(NORMS[norm]()), torch.randn(16, 3, 13, 13)
    model.embed.reset_parameters()
    with torch.no_grad():
        for each in model.embed.parameters():
            each[:8] *= 0.3
    model, x = (each.to(memory_format=torch.channels_last) for each in (model, x))
    exact = gradient(model(x).square().mean(), model)
    run = torch.compile(model, backend="aot_eager_decomp_partition") if compiled else model
    with actnn.compressed(bits=4, min_bytes=0):
        value = run(x).square().mean()
    most = 0.021 if compiled else 0.011
    assert distance(gradient(value, model), exact) < most


@pytest.mark.parametrize(
    ("norm", "size", "scale", "limited"),
    [
        ("group", 16, 0.0, False),
        ("group", 15, 0.0, True),
        ("group", 15, 1.0, False),
        ("batch", 16, 0.0, False),
        ("batch", 15, 0.0, True),
        ("batch", 15, 1.0, False),
    ],
)
def test_rows_above_noise_take_no_time(norm, size, scale, limited, monkeypatch):
    """So do rows that have groups of codes of their own."""
    calls, lerp = [], torch.lerp

    def counted(*arguments, out):
        calls.append(out)
        return lerp(*arguments, out=out)

    monkeypatch.setattr(torch, "lerp", counted)
    x = torch.randn(8, WIDTH, size, size)
    x[:, : WIDTH // 8] *= scale
    x.requires_grad_()
    with actnn.compressed(bits=8, min_bytes=0):
        y = (
            F.group_norm(x * 1, 8)
            if norm == "group"
            else F.batch_norm(x * 1, None, None, None, None, True)
        )
    y.sum().backward()
    assert bool(calls) == limited


def test_statistics_of_groups_are_kept():
    """Beside that of a group without variance, the other inverse deviations are as good as 0."""
    x = torch.randn(1024, 16, 4)
    x[::9, :4] = 0
    weight = torch.eye(4).requires_grad_()

    def loss():
        y = F.group_norm(x @ weight, 4, eps=1e-12)
        return (y * torch.arange(16)[:, None]).tanh().square().mean()

    (exact,) = torch.autograd.grad(loss(), weight)
    saving = actnn.compressed(bits=8, min_bytes=1 << 12)
    with saving:
        value = loss()
    (found,) = torch.autograd.grad(value, weight)
    assert distance(found, exact) < 0.05
    assert [r.reason for r in saving.records].count("statistic of a norm") == 2


def test_weights_that_are_made_are_no_rows():
    """Those of a norm with one row, which has one limit, as its weights have one shape."""
    torch.manual_seed(0)
    made, embed = nn.Linear(8, 256), nn.Linear(8, 256)
    x, upstream = torch.randn(1, 8), torch.randn(1, 256)

    def loss():
        return F.layer_norm(embed(x), (256,), weight=(20 * made(x)).view(256)) * upstream

    exact = torch.autograd.grad(loss().sum(), [embed.weight, made.weight])
    with actnn.saving.Saving(bits=8, min_bytes=0):
        y = loss()
    for a, b in zip(exact, torch.autograd.grad(y.sum(), [embed.weight, made.weight]), strict=True):
        assert torch.linalg.vector_norm(a - b) < 0.02 * torch.linalg.vector_norm(a)
