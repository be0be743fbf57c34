"""The gradient of a confident prediction is 1 - p: decoded probabilities have to sum to 1."""

import pytest
import torch
from actnn_models import distance, gradient, run_by
from torch import nn

import actnn
from actnn.saving import norm_limits

CLASSES, COUNT = 200, 256
WAYS = ("context", "model", "aot_eager", "aot_eager_decomp_partition")


@pytest.fixture(autouse=True)
def _compile_anew():
    yield
    torch.compiler.reset()  # all models share frames, which are compiled a few times at most


class Confident(nn.Module):
    """Logits of which one is larger than all others by more than 8, and the loss."""

    def __init__(self, dim=1):
        super().__init__()
        self.a, self.b, self.dim = nn.Linear(32, CLASSES), nn.Linear(CLASSES, CLASSES), dim

    def forward(self, x, y, margin):
        z = self.b(torch.relu(self.a(x))) * 3 + margin
        if self.dim == 0:
            return nn.functional.nll_loss(z.t().log_softmax(0).t(), y)
        return nn.functional.cross_entropy(z, y)


@pytest.mark.parametrize(
    ("way", "dtype", "dim", "larger"),
    [
        *((way, torch.float32, 1, larger) for way in WAYS for larger in (10, 15)),
        *(("context", dtype, 1, 10) for dtype in (torch.float64, torch.bfloat16)),
        ("aot_eager", torch.bfloat16, 1, 10),
        ("context", torch.float32, 0, 15),
    ],
    ids=str,
)
def test_the_gradient_of_confident_predictions(way, dtype, dim, larger):
    torch.manual_seed(0)
    model = Confident(dim).to(dtype)
    x, y = torch.randn(COUNT, 32, dtype=dtype), torch.randint(CLASSES, (COUNT,))
    batch = x, y, larger * nn.functional.one_hot(y, CLASSES).to(dtype)
    exact = gradient(model(*batch), model).double()
    run = run_by(way, model, bits=8, min_bytes=0)
    assert distance(gradient(run(*batch), model).double(), exact) <= 0.12


@pytest.mark.parametrize("way", WAYS[1:])
def test_lossless_codes_change_no_logarithm(way):
    torch.manual_seed(0)
    model = Confident()
    x, y = torch.randn(COUNT, 32), torch.randint(CLASSES, (COUNT,))
    batch = x, y, 10 * nn.functional.one_hot(y, CLASSES)
    exact = gradient(model(*batch), model)
    run = run_by(way, model, bits=8, min_bytes=0)
    model.actnn.set_choices({"": actnn.Choice("keep")})
    assert distance(gradient(run(*batch), model), exact) <= 1e-5


def test_masked_rows_stay_what_they_are():
    z = torch.randn(64, CLASSES, requires_grad=True)
    mask = torch.zeros(64, CLASSES, dtype=torch.bool)
    mask[:, 1::2] = True
    target = torch.randn(64, CLASSES // 2)

    def gradient_of_rows():
        z.grad = None
        rows = (z * 1).masked_fill(mask, -torch.inf).log_softmax(-1)
        (rows[:, ::2] * target).sum().backward()
        return z.grad

    exact = gradient_of_rows()
    with actnn.compressed(bits=8, min_bytes=0):
        found = gradient_of_rows()
    assert distance(found, exact) <= 0.01
    assert not found[mask].any()


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_logarithms_are_normalized_part_by_part(dim, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(norm_limits, "_PART", 100)
    x = torch.randn(6, 7, 20).transpose(0, 1)
    expected = x.log_softmax(dim)
    norm_limits._normalize_logarithms(x, dim)
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)
    for one in (torch.randn(9), torch.randn(0, 3), torch.randn(3, 0)):
        same = one.log_softmax(-1)
        norm_limits._normalize_logarithms(one, -1)
        assert torch.equal(one, same)
