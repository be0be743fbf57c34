"""Estimates are what steps hold, for many kinds of layers."""

import copy
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import actnn
from actnn.planning.training_step import TrainingStep, default_loss


class First(nn.Module):
    """A module of which the first result counts."""

    def __init__(self, inner: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.inner, self.inputs = inner, inputs

    def forward(self, x):
        return self.inner(*[x] * self.inputs)[0]


class Sigmoid(nn.Module):
    """As a function: the module keeps codes of its derivative, too."""

    def forward(self, x):
        return x.sigmoid()


class Rope(nn.Module):
    """Attention whose queries and keys are results of arithmetic, as rotated ones are."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = (each.mul(1.5) for each in self.project(x).view(3, 8, 4, 64, 16))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(8, 64, 64)


class HandRMS(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Transposed(nn.Module):
    """A batch norm of tokens, as in PatchTST."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x):
        return self.norm(x.mT).mT


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * 3 * x**2


class Bounded(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def between_linear(layer: nn.Module, width: int = 256, after: int = 256) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), layer, nn.Linear(after, 64))


def between_convolutions(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 16, 1), layer, nn.Conv2d(16, 16, 1))


TOKENS, IMAGES = (8, 64, 64), (8, 4, 32, 32)
EQUAL = {
    "linear": (between_linear(nn.Linear(256, 256)), TOKENS),
    "conv1d": (nn.Sequential(nn.Conv1d(64, 64, 3), nn.Conv1d(64, 32, 3)), TOKENS),
    "conv2d": (between_convolutions(nn.Conv2d(16, 16, 3)), IMAGES),
    "conv3d": (nn.Sequential(nn.Conv3d(4, 8, 3), nn.Conv3d(8, 4, 1)), (2, 4, 16, 16, 16)),
    "transposed": (between_convolutions(nn.ConvTranspose2d(16, 16, 2, stride=2)), IMAGES),
    "batch norm": (between_convolutions(nn.BatchNorm2d(16)), IMAGES),
    "group norm": (between_convolutions(nn.GroupNorm(4, 16)), IMAGES),
    "instance norm": (between_convolutions(nn.InstanceNorm2d(16, affine=True)), IMAGES),
    "local response": (between_convolutions(nn.LocalResponseNorm(3)), IMAGES),
    "upsample": (between_convolutions(nn.Upsample(scale_factor=2, mode="bilinear")), IMAGES),
    "layer norm": (between_linear(nn.LayerNorm(256)), TOKENS),
    "narrow norm": (between_linear(nn.LayerNorm(64), 64, 64), TOKENS),
    "RMS norm": (between_linear(nn.RMSNorm(256)), TOKENS),
    "relu": (between_linear(nn.ReLU()), TOKENS),
    "gelu": (between_linear(nn.GELU()), TOKENS),
    "sigmoid": (between_linear(Sigmoid()), TOKENS),
    "softmax": (between_linear(nn.Softmax(-1)), TOKENS),
    "glu": (between_linear(nn.GLU(), after=128), TOKENS),
    "attention": (First(nn.MultiheadAttention(64, 4, batch_first=True), 3), TOKENS),
    "transformer": (
        nn.Sequential(nn.TransformerEncoderLayer(256, 4, 256, batch_first=True, dropout=0.0)),
        (4, 32, 256),
    ),
    "dropout": (between_linear(nn.Dropout()), TOKENS),
    "max pool": (between_convolutions(nn.MaxPool2d(2)), IMAGES),
    "average pool": (between_convolutions(nn.AvgPool2d(2)), IMAGES),
    "residual": (
        nn.Sequential(
            nn.Conv2d(4, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(),
            nn.Conv2d(16, 16, 3),
            nn.LeakyReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 4),
        ),
        (32, 4, 64, 64),
    ),
    "norm by hand": (between_linear(HandRMS(), 64, 64), TOKENS),
    "queries": (nn.Sequential(nn.Linear(64, 64), Rope(), nn.Linear(64, 64)), TOKENS),
    "transposed norm": (between_linear(Transposed(), 64, 64), TOKENS),
    "Function": (between_linear(Bounded(Cube.apply)), TOKENS),
    "LSTM": (First(nn.LSTM(64, 128)), (20, 32, 64)),
    "LSTM cell": (nn.Sequential(First(nn.LSTMCell(64, 128)), nn.Linear(128, 8)), (512, 64)),
    "RNN": (First(nn.RNN(64, 128)), (20, 32, 64)),
}
LESS = {
    "GRU": (First(nn.GRU(64, 128)), (20, 32, 64)),
}


def sum_of_result(model, x):
    return model(x).sum()  # of which autograd saves nothing


def bytes_of_autograd(model, x):
    """Bytes of all storages that autograd keeps, and that nothing else holds."""
    known = {t.untyped_storage()._cdata for t in (x, *model.parameters(), *model.buffers())}
    kept = {}

    def save(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        sum_of_result(model, x)
    return sum(t.untyped_storage().nbytes() for a, t in kept.items() if a not in known)


@pytest.mark.parametrize("name", [*EQUAL, *LESS])
def test_an_estimate_is_what_steps_hold(name):
    model, shape = (EQUAL | LESS)[name]
    x = torch.randn(shape)
    estimate = actnn.estimate(model, x, loss=sum_of_result)
    assert estimate.total.exact == pytest.approx(bytes_of_autograd(model, x), rel=0.001)
    for bits, expected in estimate.total.compressed.items():
        compressed = actnn.compress(copy.deepcopy(model), bits=bits)
        loss = sum_of_result(compressed, x)
        held = actnn.report(compressed).held
        del loss
        if name in EQUAL:
            assert expected == pytest.approx(held, rel=0.05)
        else:
            assert expected > held


@pytest.mark.parametrize(
    "function",
    [
        F.leaky_relu,
        lambda x: F.prelu(x, torch.tensor([0.25])),
        torch.abs,
        lambda x: x.clamp(-1, 1),
        lambda x: F.leaky_relu(x * 2, inplace=True),
        lambda x: checkpoint(F.leaky_relu, x, use_reentrant=False),
    ],
)
def test_bits_of_functions_at_bounds_are_counted(function):
    model, x = between_linear(Bounded(function)), torch.randn(TOKENS)
    estimate = actnn.estimate(model, x, loss=sum_of_result)
    actnn.compress(model, bits=2)
    for _ in range(2):  # the first step finds out, and holds the operand itself
        loss = sum_of_result(model, x)
        held = model.actnn.held_bytes
        loss.backward()
    assert estimate.total.compressed[2] == held


def test_rectified_results_have_one_mask():
    model, x = between_linear(nn.ReLU()), torch.randn(TOKENS)
    estimate = actnn.estimate(model, x, loss=sum_of_result)
    loss = sum_of_result(actnn.compress(model, bits=2), x)
    assert estimate.total.compressed[2] == model.actnn.held_bytes
    del loss


class FirstToken(nn.Module):
    """A head on one token of many."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 256), nn.Linear(256, 4)

    def forward(self, x):
        return self.head(self.body(x)[:, 0])


def test_a_small_part_of_a_large_tensor_is_counted_as_it_is_held():
    model, x = FirstToken(), torch.randn(TOKENS)
    estimate = actnn.estimate(model, x, loss=sum_of_result)
    assert estimate.total.exact == bytes_of_autograd(model, x) == 8 * 64 * 256 * 4
    loss = sum_of_result(actnn.compress(model, bits=4), x)
    assert estimate.total.compressed[4] == model.actnn.held_bytes == 8 * 256 * 4
    del loss


class Net(nn.Module):
    """A model with frozen parameters and a buffer that backward needs."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.randn(16, 30, 30))

    def forward(self, x):
        return self.frozen(self.first(x) * self.scale)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_tensors_in_other_mappings_are_the_batch(kind):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), torch.randn(8, 3, 32, 32)

    def loss(model, batch):
        assert type(batch) is kind
        return sum_of_result(model, batch["x"])

    batch = kind(x=x)
    assert actnn.estimate(model, batch, loss=loss).total.exact == bytes_of_autograd(model, x)
    assert batch["x"] is x
    step = TrainingStep(model, batch, loss)
    assert step.known()[-1] is x
    assert step.shrunk(4).example["x"].shape[0] == 2


def test_the_batch_buffers_and_frozen_parameters_are_not_counted():
    model, x = Net(), torch.randn(8, 3, 32, 32)
    own = bytes_of_autograd(model, x)
    assert own == 8 * 16 * 30 * 30 * 4  # the input of the frozen layer
    assert actnn.estimate(model, x, loss=sum_of_result).total.exact == own


class Scored(nn.Module):
    """A model that computes its loss, as those of Hugging Face do."""

    def __init__(self, make):
        super().__init__()
        self.inner, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        y = self.inner(x)
        return self.make(y.square().mean() if self.training else None, y)


@pytest.mark.parametrize(
    "make",
    [
        lambda loss, y: {"logits": y, "loss": loss},
        lambda loss, y: SimpleNamespace(logits=y, loss=loss),
        lambda loss, y: UserDict(logits=y, loss=loss),
    ],
)
def test_the_loss_of_a_model_is_the_default(make):
    model, x = Scored(make), torch.randn(8, 4)
    assert torch.equal(default_loss(model, x), model.inner(x).square().mean())
    assert torch.equal(default_loss(model, UserDict(x=x)), default_loss(model, {"x": x}))


def test_outputs_without_a_loss_are_one():
    model, x = Scored(lambda loss, y: {"logits": y, "loss": loss}).eval(), torch.randn(8, 4)
    assert torch.equal(default_loss(model, x), model.inner(x).square().mean())


@pytest.fixture
def wrong_fake():
    """An operator whose version for tensors without data is wrong."""
    with torch.library._scoped_library("actnn_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")

        def fake(x):
            raise RuntimeError("Expected inputs of BF16 type")

        library._register_fake("twice", fake)
        yield torch.ops.actnn_tests.twice


class Twice(nn.Module):
    def __init__(self, operator, after):
        super().__init__()
        self.inner, self.operator, self.after = nn.Linear(64, 64), operator, after

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        self.operator(x)
        return self.after(x)


def test_operators_without_a_right_fake_version_run_in_earnest(wrong_fake, caplog):
    x = torch.randn(512, 64)
    exact = actnn.estimate(Twice(torch.neg, torch.exp), x)
    assert actnn.estimate(Twice(wrong_fake, torch.exp), x) == exact
    assert not caplog.records

    def too_large(x):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    with pytest.raises(actnn.ActNNError, match=r"actnn_tests\.twice.*report\(model, step=\)"):
        actnn.estimate(Twice(wrong_fake, too_large), x)

    def broken(x):
        return x @ torch.ones(3, 3)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        actnn.estimate(Twice(wrong_fake, broken), x)


def test_estimates_know_the_values_of_masks():
    """Decoders make a mask only if it hides something."""
    seen = []

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, mask):
            seen.append(is_fake(x))
            places = torch.arange(mask.shape[1], device=mask.device)
            x = self.inner(x)
            if not bool((mask.cumsum(1)[:, -1] == places[-1] + 1).all()):
                x = x * mask.unsqueeze(-1).to(x.dtype)
            return self.outer(x)

    net, x, mask = Masked(), torch.randn(8, 64, 64), torch.ones(8, 64, dtype=torch.long)
    before = torch.get_rng_state()
    whole = actnn.estimate(net, (x, mask)).total.exact
    mask[0, 40:] = 0
    assert actnn.estimate(net, (x, mask)).total.exact > whole
    assert seen == [True, True]
    assert torch.equal(torch.get_rng_state(), before)
