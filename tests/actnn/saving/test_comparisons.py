"""Operations whose backward looks for the elements that are equal to their result."""

import pytest
import torch
from actnn_models import compressed_copy, gradients
from torch import nn

import actnn
from actnn.planning.meter import HostMeter

ROWS = torch.arange(256) % 64
OPERATIONS = {
    "amax": lambda y: y.amax(-1),
    "amin": lambda y: y.amin(0),
    "max": lambda y: y.max(),
    "min": lambda y: y.min(),
    "median": lambda y: y.median(),
    "nanmedian": lambda y: y.nanmedian(),
    "aminmax": lambda y: torch.stack(torch.aminmax(y, dim=-1)),
    "scatter_reduce": lambda y: torch.zeros(64, 256).scatter_reduce(
        0, ROWS[:, None].expand(-1, 256), y, "amax"
    ),
    "segment_reduce": lambda y: torch.segment_reduce(y, "max", lengths=torch.tensor([100, 156])),
    "norm": lambda y: torch.linalg.vector_norm(y, float("inf"), dim=-1),
    "distance of pairs": lambda y: nn.functional.pairwise_distance(y, y.flip(0), float("inf")),
    "distance": lambda y: torch.dist(y, y.flip(0), float("inf")),
    "distances": lambda y: torch.cdist(y, y.flip(1), float("inf")),
    "shifted softmax": lambda y: (y - y.amax(-1, keepdim=True)).softmax(-1)[:, :9],
    "view": lambda y: y.view(16, 16, 256).transpose(0, 1).amax(0),
    "part": lambda y: y.chunk(2, -1)[1].amax(-1),
    "after another": lambda y: y * y.detach() + y.amax(-1, keepdim=True),
    "before another": lambda y: y.amax(-1, keepdim=True) + y.detach() * y,
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("bits", [2, 8])
def test_gradients_are_those_of_torch(name, bits):
    operation, x = OPERATIONS[name], torch.randn(256, 256, requires_grad=True)
    if name == "aminmax" and torch.__version__ < "2.13":
        pytest.skip("this version of torch cannot differentiate aminmax")
    (exact,) = torch.autograd.grad(operation(x * 1.5).sum(), x)
    saving = actnn.compressed(bits=bits, min_bytes=0)
    for _ in range(2):  # the first step holds more: see test_divisors.py
        with saving:
            loss = operation(x * 1.5).sum()
    assert "compared in backward" in {record.reason for record in saving.records}
    assert saving.held_bytes == sum(record.held for record in saving.records)
    (found,) = torch.autograd.grad(loss, x)
    # The result of softmax has 8 bits.
    torch.testing.assert_close(found, exact, rtol=0, atol=0.02 if "softmax" in name else 1e-6)


def test_what_is_compared_is_held_as_long_as_in_torch():
    x = torch.randn(256, 256, requires_grad=True)
    with HostMeter([x]) as meter:
        before = meter.allocated()
        with actnn.compressed(bits=2, min_bytes=0) as saving:
            loss = (x * 1.5).chunk(2, -1)[1].amax(-1).sum()
        assert saving.held_bytes <= meter.allocated() - before <= saving.held_bytes + 512
        loss.backward()
        del loss
    assert saving.held_bytes == 0


def test_in_place_changes_of_what_is_compared_are_errors():
    x = torch.randn(256, 256, requires_grad=True)
    with actnn.compressed(bits=2, min_bytes=0):
        y = x * 1.5
        loss = y.amax(-1).sum()
        y.add_(1)
    with pytest.raises(RuntimeError, match="changed by an in-place operation"):
        loss.backward()


def test_what_was_saved_before_a_change_in_place_stays_rounded():
    x = torch.randn(256, 256, requires_grad=True)

    def loss(y, add):
        before = y.sin().sum()
        return before + add(y, 3).amax(-1).sum()

    (exact,) = torch.autograd.grad(loss(x * 1.5, torch.add), x)
    with actnn.compressed(bits=8, min_bytes=0) as saving:
        ours = loss(x * 1.5, torch.Tensor.add_)
    assert [r.reason for r in saving.records] == ["compressed", *["compared in backward"] * 2]
    (found,) = torch.autograd.grad(ours, x)
    assert (found - exact).norm() < 0.02 * exact.norm()


def test_norms_of_two_are_rounded():
    x = torch.randn(256, 256, requires_grad=True)
    with actnn.compressed(bits=4, min_bytes=0) as saving:
        torch.nn.functional.normalize(x * 1.5).sum()
    assert "compared in backward" not in {record.reason for record in saving.records}


def test_compiled_graphs_compare_exact_tensors():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 32)

        def forward(self, x):
            y = torch.tanh(self.b(torch.sigmoid(self.a(x)) * 2))
            return (y - y.amax(-1, keepdim=True)).softmax(-1).square()

    model, x = Model(), torch.randn(64, 16)
    exact = gradients(model, x)
    ours = torch.compile(compressed_copy(model, bits=8), backend="aot_eager")
    for a, b in zip(exact, gradients(ours, x), strict=True):
        assert (a - b).norm() < 0.02 * a.norm()
