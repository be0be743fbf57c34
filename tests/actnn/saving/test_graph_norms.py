"""Norms in compiled code: rows without variance, such as class tokens and filters that are 0."""

from operator import getitem

import pytest
import torch
from actnn_models import distance, gradient
from torch import nn

import actnn
from actnn.saving.graph_norms import limit_normalized
from sweeps import first_of

BACKEND = "aot_eager_decomp_partition"
WIDTH, TOKENS = 96, 16  # rows share groups of codes


class Own(nn.Module):
    """A norm as people write it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12)


class Tokens(nn.Module):
    """Tokens behind one that is 0, a norm, and a layer that mixes them."""

    def __init__(self, norm):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.embed, self.norm = nn.Linear(32, WIDTH), norm
        self.mix, self.head = nn.Linear(TOKENS, TOKENS), nn.Linear(WIDTH, 8)

    def forward(self, x):
        y = torch.cat([self.first.expand(len(x), -1, -1), self.embed(x)], 1)
        y = y + torch.zeros_like(y)
        z = self.norm(y) + 1
        return self.head(torch.tanh(self.mix(z.transpose(1, 2)).transpose(1, 2)))


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH, eps=1e-12),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH, eps=1e-12),
    "layer by hand": lambda: Own("layer"),
    "rms by hand": lambda: Own("rms"),
}


class Images(nn.Module):
    """Small maps, some of filters that are 0, a norm, and a layer that mixes them."""

    def __init__(self, norm):
        super().__init__()
        self.embed, self.norm, self.head = nn.Conv2d(3, 32, 1), norm, nn.Conv2d(32, 8, 3)
        with torch.no_grad():
            self.embed.weight[:8] = self.embed.bias[:8] = 0

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.embed(x)) + 1))


# With two eps, because rows of equal numbers are divided by its root.
NORMS_OF_IMAGES = {
    f"{kind.__name__} {eps} {affine}": lambda kind=kind, eps=eps, affine=affine: kind(
        *((8, 32) if kind is nn.GroupNorm else (32,)), eps=eps, affine=affine
    )
    for kind, eps, affine in (
        (nn.GroupNorm, 1e-12, True),
        (nn.GroupNorm, 1e-5, False),
        (nn.BatchNorm2d, 1e-12, True),
        (nn.BatchNorm2d, 1e-5, True),
        (nn.InstanceNorm2d, 1e-12, True),
        (nn.InstanceNorm2d, 1e-5, False),
    )
}


def error(model, x, min_bytes=0, **options):
    """The relative error of the gradient of compiled code with 8 bits."""
    exact = gradient(model(x).square().mean(), model)
    torch._dynamo.reset()
    actnn.compress(model, bits=8, min_bytes=min_bytes)
    compiled = torch.compile(model, **{"backend": BACKEND} | options)
    return distance(gradient(compiled(x).square().mean(), model), exact)


@pytest.mark.parametrize("name", NORMS)
def test_rows_without_variance(name):
    torch.manual_seed(0)
    assert error(Tokens(NORMS[name]()), torch.randn(8, TOKENS - 1, 32), 4096) < 0.1


@pytest.mark.parametrize(
    ("name", "dynamic", "backend"),
    first_of(
        [
            ("GroupNorm 1e-12 True", True, BACKEND),
            ("BatchNorm2d 1e-12 True", False, "aot_eager"),  # norms are operators of their own
            *((name, False, BACKEND) for name in NORMS_OF_IMAGES),
        ],
        3,
    ),
)
def test_maps_without_variance(name, dynamic, backend):
    torch.manual_seed(0)
    model, x = Images(NORMS_OF_IMAGES[name]()), torch.randn(4, 3, 5, 5)
    assert error(model, x, 4096, backend=backend, dynamic=dynamic) < 0.05


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.BatchNorm2d])
def test_statistics_of_maps_are_exact(kind):
    """Beside that of a map without variance, the other inverse deviations are as good as 0."""
    torch.manual_seed(0)
    norm = nn.GroupNorm(8, 32) if kind is nn.GroupNorm else nn.BatchNorm2d(32)
    assert error(Images(norm), torch.randn(4, 3, 5, 5), backend="aot_eager") < 0.05


class Pooled(nn.Module):
    """Norms of one group, as in PoolFormer, and an absolute value, whose backward compares."""

    def __init__(self):
        super().__init__()
        self.embed, self.norms = nn.Conv2d(3, 32, 1), nn.ModuleList()
        self.norms.extend(nn.GroupNorm(1, 32) for _ in range(2))
        self.wide, self.pool = nn.Conv2d(32, 64, 1), nn.AvgPool2d(3, 1, 1)
        self.back = nn.Conv2d(64, 32, 1)

    def forward(self, x):
        y = self.embed(x)
        for norm in self.norms:
            z = norm(y)
            y = y + self.pool(z) - z
        z = self.wide(y)
        return self.back(z * z.abs())


def test_views_that_norms_read_are_made_behind_all_inputs():
    torch.manual_seed(0)
    assert error(Pooled(), torch.randn(4, 3, 8, 8)) < 0.02


class FunctionalRMS(nn.Module):
    """A norm that is one operator on a GPU, in backward, too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return nn.functional.rms_norm(x, (WIDTH,), self.weight, 1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["aot_eager", BACKEND])
def test_rows_without_variance_of_fused_norms(backend):
    torch.manual_seed(0)
    model, x = Tokens(FunctionalRMS()).cuda(), torch.randn(8, TOKENS - 1, 32, device="cuda")
    assert error(model, x, 4096, backend=backend) < 0.1


def fused_rms_norm_backward(grad, x, shape, scale, weight, _):
    z, g = x * scale, grad * weight
    return scale * (g - z * (g * z).mean(-1, keepdim=True)), (grad * z).sum(0)


def test_backward_of_a_fused_norm_reads_rows_of_limited_size():
    """CPUs have no kernel of that operator: its formula takes its place."""
    operator = getattr(torch.ops.aten, "_fused_rms_norm_backward", None)
    if operator is None:
        pytest.skip("not for PyTorch without fused RMS norms")
    forward, backward = torch.fx.Graph(), torch.fx.Graph()
    sizes = {"x": (4, WIDTH), "weight": (WIDTH,), "getitem_1": (4, 1), "grad": (4, WIDTH)}
    x, weight = forward.placeholder("x"), forward.placeholder("weight")
    norm = forward.call_function(torch.ops.aten._fused_rms_norm.default, (x, [WIDTH], weight, 1e-6))
    forward.call_function(getitem, (norm, 0))
    forward.call_function(getitem, (norm, 1))
    given = {name: backward.placeholder(name) for name in sizes}
    for name, node in given.items():
        node.meta["val"] = torch.empty(sizes[name], device="meta")
    x, weight, scale, grad = given.values()
    arguments = (grad, x, [WIDTH], scale, weight, [True, True])
    norm = backward.call_function(operator.default, arguments)
    backward.output(norm)
    limit_normalized(forward, backward)
    norm.target = fused_rms_norm_backward
    backward.lint()
    torch.manual_seed(0)
    exact, grads = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    exact[1] = 0
    scales = (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    decoded, weights = exact + 0.01 * torch.randn(4, WIDTH), torch.ones(WIDTH)
    run = torch.fx.GraphModule({}, backward)
    _, expected = fused_rms_norm_backward(grads, exact, [WIDTH], scales, weights, None)
    _, found = run(decoded, weights, scales, grads)
    assert distance(found, expected) < 0.1
    unlimited = fused_rms_norm_backward(grads, decoded, [WIDTH], scales, weights, None)[1]
    assert distance(unlimited, expected) > 1
    assert torch.equal(run(exact, weights, scales, grads)[1], expected)


@pytest.mark.parametrize(
    ("norm", "dtype"),
    first_of([*((name, torch.float32) for name in (None, *NORMS)), (None, torch.bfloat16)], 2),
)
def test_rows_and_maps_with_variance_are_not_changed(norm, dtype):
    """Where nothing is rounded, limits would be seen as differences."""
    torch.manual_seed(0)
    model = Images(nn.GroupNorm(8, 32)) if norm is None else Tokens(NORMS[norm]())
    x = torch.randn(4, 3, 5, 5) if norm is None else torch.randn(8, TOKENS - 1, 32)
    model, x = model.to(dtype), x.to(dtype)
    nn.init.normal_(model.embed.weight if norm is None else model.first)
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=BACKEND)
        found.append(gradient(compiled(x).square().mean(), model))
        actnn.compress(model, bits=8, min_bytes=1 << 30)
    assert distance(*found) < (1e-6 if dtype == torch.float32 else 1e-2)


class Scaled(nn.Module):
    """What looks like a norm, but has a variance of other numbers, so that results may be large."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, WIDTH), nn.Linear(32, WIDTH)

    def forward(self, x):
        a, b = self.a(x), self.b(x) * 1e-2
        return torch.tanh(a * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1e-6)) + b


def test_other_scales_are_left_as_they_are():
    torch.manual_seed(0)
    assert error(Scaled(), torch.randn(64, 32), 4096) < 0.05


class Viewed(nn.Module):
    """A norm of rows whose elements backward also reads in other views."""

    def __init__(self, norm, view):
        super().__init__()
        self.embed, self.norm, self.view = nn.Linear(32, 64), norm, view
        self.rows = nn.Parameter(10.0 ** torch.arange(-2, 2, 4 / 64))

    def forward(self, x):
        y = self.embed(x) * self.rows[:, None]
        if self.view == "heads":
            return self.norm(y.view(len(x), -1, 4, 16)).tanh() + y.view(len(x), -1, 4, 16).sin()
        return self.norm(y).tanh() + y.transpose(1, 2).sin()


@pytest.mark.parametrize("view", ["heads", "transposed"])
@pytest.mark.parametrize("kind", first_of(["layer", "rms"], 1))
def test_other_views_of_rows_are_left_as_they_are(kind, view):
    """Queries of each head are normalized in published transformers, but saved together."""
    torch.manual_seed(0)
    model, x = Viewed(Own(kind), view), torch.randn(4, 64, 32)
    assert error(model, x, 1 << 30) < 1e-6
    assert error(actnn.uncompress(model), x) < 0.05


class Square(nn.Module):
    """Logarithms of probabilities of as many rows as columns, read in columns, too."""

    def __init__(self, again):
        super().__init__()
        self.a, self.b, self.again = nn.Linear(32, 64), nn.Linear(64, 8), again

    def forward(self, x):
        scores = self.a(x) * 5
        logs = scores.log_softmax(1)
        columns = logs.t().exp()
        if self.again == "logarithms":
            return self.b(logs) + (columns * logs).sum(1, keepdim=True)
        return self.b(columns) + (columns * scores).sum(1, keepdim=True)


@pytest.mark.parametrize("again", ["logarithms", "probabilities"])
def test_probabilities_that_are_transposed_are_those_of_their_rows(again):
    torch.manual_seed(0)
    assert error(Square(again), torch.randn(64, 32)) < 0.05
