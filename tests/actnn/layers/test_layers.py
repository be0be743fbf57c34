"""Layers with codes of their own: exact gradients, or unbiased ones; nothing but codes is held."""

import copy

import pytest
import torch
from actnn_models import compressed_copy, gradients
from torch import nn

import actnn
from sweeps import first_of

EXACT = {
    "relu": (lambda: nn.ReLU(), 1 / 32),
    "relu6": (lambda: nn.ReLU6(), 1 / 32),
    "hardtanh": (lambda: nn.Hardtanh(-0.5, 1.5), 1 / 32),
    "leaky": (lambda: nn.LeakyReLU(0.1), 1 / 32),
    "max1": (lambda: nn.MaxPool1d(3, 2, 1), 1 / 8),
    "max1 dilated ceil": (lambda: nn.MaxPool1d(2, 3, 1, dilation=2, ceil_mode=True), 1 / 8),
    "max2": (lambda: nn.MaxPool2d(3, 2, 1), 1 / 8),
    "max2 unequal": (lambda: nn.MaxPool2d((2, 4), (3, 1), (1, 2)), 1 / 2),
    "max2 dilated ceil": (lambda: nn.MaxPool2d(3, 2, 1, dilation=2, ceil_mode=True), 1 / 8),
    "max3": (lambda: nn.MaxPool3d(2), 1 / 8),
    "max3 dilated": (lambda: nn.MaxPool3d((2, 1, 3), (2, 2, 1), (1, 0, 1), (1, 2, 2)), 1),
    "average1": (lambda: nn.AvgPool1d(3, 2, 1), 0),
    "average2": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), 0),
    "average3": (lambda: nn.AvgPool3d(2), 0),
    "adaptive1": (lambda: nn.AdaptiveAvgPool1d(3), 0),
    "adaptive2": (lambda: nn.AdaptiveAvgPool2d((3, 2)), 0),
    "adaptive3": (lambda: nn.AdaptiveAvgPool3d((2, 3, 2)), 0),
}


def input_for(name: str, dtype=torch.float32) -> torch.Tensor:
    dims = int(name[-1]) if name[-1].isdigit() and name != "relu6" else None
    dims = dims or next((int(c) for c in name.split()[0] if c.isdigit() and name[0] in "ma"), 2)
    x = torch.randn(2, 3, *{1: (40,), 2: (12, 15), 3: (6, 8, 7)}[dims])
    x.view(-1)[::7] = 0.0
    x.view(-1)[::11] = 6.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_masks_and_positions_are_exact(name, dtype):
    if name == "average3" and dtype is torch.bfloat16:
        pytest.skip("not for bfloat16, of which torch has no such kernel")
    make, share = EXACT[name]
    layer, x = nn.Sequential(make(), nn.Flatten()), input_for(name, dtype)
    ours = compressed_copy(layer, bits=2)
    exact, same = gradients(layer, x), gradients(ours, x)
    assert torch.equal(layer(x), ours(x))
    assert all(torch.equal(a, b) for a, b in zip(exact, same, strict=True))
    ours(x.clone().requires_grad_())
    held = sum(record.held for record in ours.actnn.records)
    assert held <= share * x.numel() * 4 + 8


@pytest.mark.parametrize("name", ["relu", "relu6", "max2", "average2"])
def test_channels_last_is_kept(name):
    layer, x = EXACT[name][0](), input_for(name).to(memory_format=torch.channels_last)
    ours = compressed_copy(layer)
    exact, same = gradients(layer, x), gradients(ours, x)
    assert torch.equal(exact[0], same[0])
    assert ours(x.requires_grad_()).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "kind", [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh, nn.SiLU, nn.Mish, nn.Hardswish]
)
def test_in_place_activations(kind):
    layer = nn.Sequential(nn.Linear(32, 32), kind(inplace=True), nn.Linear(32, 8))
    x = torch.randn(16, 32)
    for bits in (32, 8):
        exact, ours = gradients(layer, x), gradients(compressed_copy(layer, bits=bits), x)
        for a, b in zip(exact, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0 if bits == 32 else 0.05)


def test_nan_passes_as_in_torch():
    x = torch.tensor([[float("nan"), -1.0, 2.0, 0.0, float("inf"), -float("inf")]])
    for kind in (nn.ReLU, nn.ReLU6, nn.LeakyReLU):
        exact, ours = gradients(kind(), x), gradients(compressed_copy(kind()), x)
        assert torch.equal(exact[0], ours[0])
        for each in (kind(), compressed_copy(kind())):
            assert each(x).isnan().tolist() == [[True, *[False] * 5]]


def test_windows_that_do_not_fit_a_byte_run_as_in_torch():
    layer, x = nn.MaxPool2d(17, 1), torch.randn(1, 2, 20, 20)
    ours = compressed_copy(layer)
    assert torch.equal(gradients(layer, x)[0], gradients(ours, x)[0])
    both = compressed_copy(nn.MaxPool2d(2, return_indices=True))(x.requires_grad_())
    assert both[1].dtype == torch.int64


SMOOTH = [
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.Mish(),
    nn.Hardswish(),
    nn.Softplus(2.0),
    nn.Sigmoid(),
    nn.Tanh(),
]


class Then1(nn.Module):
    """A layer whose weight is 1: what the end of a model saves may be kept."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight = inner, nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        return (self.inner(x)[..., None] @ self.weight)[..., 0]


@pytest.mark.filterwarnings("ignore:Compression adds")  # one batch: its gradient has no variance
@pytest.mark.parametrize("layer", first_of(SMOOTH, 4))
def test_codes_of_derivatives_are_unbiased(layer):
    x = torch.randn(512) * 3
    ours = compressed_copy(Then1(layer), bits=2)
    exact = gradients(layer, x)[0]
    draws = torch.stack([gradients(ours, x)[0] for _ in range(300)])
    assert torch.equal(layer(x), ours(x))
    error, largest = (draws.mean(0) - exact).abs(), draws.abs().amax()
    # A draw is at most one step off; its deviation is at most half a step.
    assert (error <= 5 * largest / 3 / 2 / 300**0.5).all()
    assert error.mean() < 0.01 * largest
    assert draws.std(0).max() > 0.05
    ours(x.requires_grad_())
    records = [r for r in ours.actnn.records if r.reason == "codes of the derivative"]
    assert len(records) == 1
    assert records[0].held == 512 * 2 // 8


def test_second_derivatives_of_codes_are_errors():
    ours, x = compressed_copy(nn.GELU(), bits=4), torch.randn(64, requires_grad=True)
    with pytest.raises(actnn.ActNNError, match="without create_graph"):
        torch.autograd.grad(ours(x).sum(), x, create_graph=True)


def test_second_derivatives_of_masks_are_exact():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    ours, x = compressed_copy(model, bits=32), torch.randn(3, 4, requires_grad=True)
    results = []
    for each in (model, ours):
        (dx,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), x)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_is_regenerated(p):
    layer = compressed_copy(nn.Dropout(p))
    x = torch.ones(200, 200, requires_grad=True)
    y = layer(x)
    assert layer.actnn.held_bytes == 0
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, y)
    assert set(y.unique().tolist()) == {0.0, (1 / torch.tensor(1 - p)).item()}
    zeros = (y == 0).float().mean().item()
    assert abs(zeros - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert not torch.equal(layer(x), y)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)


def test_dropout_follows_the_layout_of_its_input():
    layer = compressed_copy(nn.Dropout(0.5))
    x = torch.ones(4, 6, 8).transpose(0, 2).requires_grad_()
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones(8, 6, 4))
    assert torch.equal(dx, y)


def test_dropout_in_eval_mode_and_at_its_limits():
    x = torch.randn(8, 8, requires_grad=True)
    assert torch.equal(compressed_copy(nn.Dropout(0.5)).eval()(x), x)
    assert not compressed_copy(nn.Dropout(1.0))(x).any()


def test_functional_relu_has_an_exact_mask():
    x = torch.randn(64, 64, requires_grad=True)
    weight = nn.Parameter(torch.randn(64, 64))
    with actnn.compressed(bits=2, min_bytes=0):
        y = torch.relu(x * 1) @ weight
    y.sum().backward()
    expected = torch.where(x > 0, torch.ones_like(x) @ weight.t(), 0)
    assert torch.equal(x.grad, expected)


LINEAR = {
    "conv1": (nn.Conv1d(4, 6, 3), (2, 4, 20)),
    "conv2": (nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), (2, 4, 9, 9)),
    "conv2 depthwise": (nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 9, 9)),
    "conv3": (nn.Conv3d(2, 3, 3, dilation=2), (2, 2, 7, 7, 7)),
    "transposed1": (nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 20)),
    "transposed2": (nn.ConvTranspose2d(4, 6, 3, output_padding=1, stride=2), (2, 4, 9, 9)),
    "transposed3": (nn.ConvTranspose3d(2, 3, 2, bias=False), (2, 2, 4, 4, 4)),
    "linear": (nn.Linear(16, 8), (4, 5, 16)),
    "bilinear upsampling": (nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 6, 6)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_of_inputs_and_biases_of_linear_layers_are_exact(name):
    layer, shape = LINEAR[name]
    x = torch.randn(shape)
    exact, ours = gradients(layer, x), gradients(compressed_copy(layer, bits=2), x)
    assert torch.equal(exact[0], ours[0])
    if getattr(layer, "bias", None) is not None:
        assert torch.equal(exact[2], ours[2])


NORMS = [nn.BatchNorm1d(64), nn.LayerNorm(64), nn.GroupNorm(2, 64), nn.RMSNorm(64)]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
def test_norms_have_exact_forwards_and_small_bias(norm):
    model, x = nn.Sequential(nn.Linear(64, 64), norm), torch.randn(64, 64)
    ours = compressed_copy(model, bits=4)
    exact = gradients(model, x)
    assert torch.equal(model(x), ours(x))
    draws = [gradients(ours, x) for _ in range(60)]
    total = max(float(each.norm()) for each in exact)
    for index, each in enumerate(exact):
        mean = torch.stack([draw[index] for draw in draws]).mean(0)
        assert (mean - each).norm() <= 0.05 * total
    for name, buffer in copy.deepcopy(model).named_buffers():
        assert dict(ours.named_buffers())[name].shape == buffer.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(64),
        nn.LayerNorm([15, 64]),
        nn.LayerNorm(64, bias=False),
        nn.LayerNorm(64, elementwise_affine=False),
        nn.RMSNorm(64, eps=1e-5),
        nn.RMSNorm(64),
        nn.RMSNorm(64, eps=1e-5, elementwise_affine=False),
    ],
    ids=str,
)
def test_norms_share_codes_with_the_layer_after_them(norm, dtype):
    """Weights may be zero: the result is made from the normalized input, not the reverse."""
    norm = copy.deepcopy(norm)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
            parameter.view(-1)[::7] = 0
    model = nn.Sequential(nn.Linear(64, 64), norm, nn.Linear(64, 32)).to(dtype)
    x = torch.randn(8, 15, 64).to(dtype)
    ours = compressed_copy(model, bits=8)
    y = ours(x)
    assert torch.equal(model(x), y)
    records = {r.module: r for r in ours.actnn.records if r.nbytes >= x.nbytes}
    if getattr(norm, "eps", None) is not None or dtype in (torch.float32, torch.float64):
        assert records["1"].reason == "normalized input"
        assert records["2"].reason == f"shared with {records['1'].index}"
        assert records["2"].nbytes == x.nbytes
        assert ours.actnn.held_bytes < x.nbytes * 9 / 8 / x.element_size() + 2048
    del y
    for a, b in zip(gradients(model, x), gradients(ours, x), strict=True):
        assert (a - b).norm() <= 0.03 * a.norm()


@pytest.mark.parametrize("norm", [nn.LayerNorm((4, 8)), nn.RMSNorm((4, 8))], ids=str)
def test_norms_of_whole_tensors(norm):
    model, x = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 4)), torch.randn(4, 8)
    for a, b in zip(gradients(model, x), gradients(compressed_copy(model, bits=8), x), strict=True):
        assert (a - b).norm() <= 0.05 * a.norm()


@pytest.mark.parametrize("norm", [nn.LayerNorm(256), nn.RMSNorm(512, eps=1e-5)], ids=str)
def test_tokens_with_groups_of_their_own_keep_the_norms_input(norm):
    width = norm.normalized_shape[0]
    ours = compressed_copy(nn.Sequential(nn.Linear(8, width), norm, nn.Linear(width, 8)), bits=8)
    _loss = ours(torch.randn(64, 8))
    assert "normalized input" not in {record.reason for record in ours.actnn.records}


def test_tokens_of_other_sizes_in_one_group_keep_their_accuracy():
    """A small token beside large ones would vanish in a common range of inputs."""
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    nn.init.zeros_(model[0].bias)
    x = torch.randn(64, 8, 32)
    x[:, 0] *= 1e-3
    exact, ours = gradients(model, x), gradients(compressed_copy(model, bits=4), x)
    assert (ours[0][:, 0] - exact[0][:, 0]).norm() < 0.05 * exact[0][:, 0].norm()


def test_results_of_norms_that_change_in_place_are_held_themselves():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)

        def forward(self, x):
            y = self.norm(self.a(x))
            return self.b(y.add_(1))

    model, x = Shift(), torch.randn(8, 16)
    ours = compressed_copy(model, bits=8)
    for a, b in zip(gradients(model, x), gradients(ours, x), strict=True):
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-6
    assert next(r.reason for r in ours.actnn.records if r.module == "b") == "compressed"
    loss = ours(x).sum()
    with torch.no_grad():
        ours.norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="stay as it was"):
        loss.backward()


def test_running_statistics_are_exact():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(4, 3, 8, 8)
    ours = compressed_copy(model, bits=2)
    for _ in range(3):
        gradients(model, x)
        gradients(ours, x)
    assert torch.equal(model[1].running_mean, ours[1].running_mean)
    assert torch.equal(model[1].running_var, ours[1].running_var)


def test_embeddings_keep_their_indices():
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 4))
    index = torch.randint(50, (8, 16))
    ours = compressed_copy(model, bits=8)
    results = []
    for each in (model, ours):
        each(index).sum().backward()
        results.append(each[0].weight.grad)
    assert torch.equal(*results)
