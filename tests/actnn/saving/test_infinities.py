"""Infinities and numbers as good as that are legal in what backward needs: masks, log(0)."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import actnn
from actnn.saving import Saving

INF = math.inf


def hand_written_softmax(z):
    shifted = (z - z.amax(-1, keepdim=True)).exp()
    return shifted / shifted.sum(-1, keepdim=True)


def ctc(z):
    log_p = functional.log_softmax(z.view(32, 4, -1), -1)
    targets = torch.tensor([[0, 1, 2]] * 4) + 5
    lengths = torch.full((4,), 32), torch.full((4,), 3)
    return functional.ctc_loss(log_p, targets, *lengths, blank=0)


FUNCTIONS = {
    "log_softmax": lambda z: functional.log_softmax(z, -1)[:, 0],
    "cross_entropy": lambda z: functional.cross_entropy(z, torch.zeros(len(z)).long()),
    "log_softmax of half the bits": lambda z: functional.log_softmax(z.bfloat16(), -1)[:, 0],
    "logsumexp": lambda z: z.logsumexp(-1),
    "logcumsumexp": lambda z: z.logcumsumexp(-1)[:, 16:],
    "logaddexp": lambda z: torch.logaddexp(z, torch.zeros(())),
    "softmax": lambda z: functional.softmax(z, -1) ** 2,
    "softmax by hand": lambda z: hand_written_softmax(z) ** 2,
    "attention by hand": lambda z: functional.softmax(z, -1) @ torch.eye(64)[:, ::3],
    "exp": lambda z: z.exp(),
    "logarithm of zero": lambda z: functional.elu(z.exp().log()),
    "softplus": functional.softplus,
    "atan": torch.atan,
    "relu": lambda z: functional.relu(-z.neg()) * 2,
    "division by infinity": lambda z: 1 / (1 + z.exp().reciprocal()),
    "where": lambda z: torch.where(z > -1e4, z, 0) ** 2,
    "ctc": ctc,
}
MASKS = (-INF, -1e9, torch.finfo(torch.float32).min)
# One huge number takes the resolution of its group where it is saved itself; PyTorch's own ctc_loss
# has no gradient of infinities.
NOT_FOR = {("logaddexp", -1e9), ("softplus", -1e9), ("atan", -1e9), ("ctc", -INF)}


def gradients_of(function, masked, value, bits, x, weight):
    weight.grad = None
    saving = Saving(bits=bits or 8, min_bytes=0)
    with saving if bits else torch.enable_grad():
        z = (x @ weight).masked_fill(masked, value)
        y = function(z)
    y.float().square().mean().backward()
    return weight.grad


@pytest.mark.filterwarnings("ignore:Backward divides by numbers near 0")
@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n in FUNCTIONS for v in MASKS if (n, v) not in NOT_FOR]
)
def test_gradients_of_masked_numbers_are_those_of_pytorch(name, value):
    torch.manual_seed(0)
    weight = torch.randn(32, 64, requires_grad=True)
    x = torch.randn(128, 32) / 8
    masked = torch.rand(128, 64) < 0.3
    masked[:, 0] = masked[:, 5:8] = False
    exact = gradients_of(FUNCTIONS[name], masked, value, None, x, weight)
    assert exact.isfinite().all()
    assert exact.norm() > 0
    for bits in (8, 4):
        found = gradients_of(FUNCTIONS[name], masked, value, bits, x, weight)
        assert found.isfinite().all()
        assert (found - exact).norm() < {8: 0.06, 4: 0.3}[bits] * exact.norm()


def test_a_policy_over_masked_actions_trains():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(32, 512)

        def forward(self, x, mask):
            return functional.log_softmax(self.out(x).masked_fill(mask, -INF), -1)

    torch.manual_seed(0)
    model, x, target = Policy(), torch.randn(64, 32), torch.zeros(64, dtype=torch.long)
    mask = torch.rand(64, 512) < 0.3
    mask[:, 0] = False
    functional.nll_loss(model(x, mask), target).backward()
    exact = model.out.weight.grad.clone()
    for settings in ({}, {"bits": 2}, {"bits": 1}, {"level": "L3"}):
        actnn.compress(model, **settings)
        for _ in range(3):
            model.zero_grad()
            functional.nll_loss(model(x, mask), target).backward()
        assert (model.out.weight.grad - exact).norm() < 0.05 * exact.norm()
        assert model.actnn.records[-1].reason == "compressed"
        actnn.uncompress(model)


def test_infinities_at_any_width_and_level():
    """Of numbers beside infinities, 2 codes are left at 2 bits; masks have at least 2 bits."""
    torch.manual_seed(0)
    z = torch.randn(256, 64, requires_grad=True)
    mask = torch.rand(256, 64) < 0.3

    class Add(nn.Module):
        def forward(self, z):
            return torch.logaddexp(z.masked_fill(mask, -INF), z * 0.5)

    model = Add()
    for settings in ({"bits": 1}, {"bits": 2}, {"level": "L3"}):
        actnn.compress(model, min_bytes=0, **settings)
        for _ in range(6):
            z.grad = None
            model(z).mean().backward()
            assert z.grad.isfinite().all()
            assert (z.grad[mask] == 0.5 / z.numel()).all()
        actnn.uncompress(model)


def test_what_logsumexp_saves_is_kept():
    z = torch.randn(64, 64, requires_grad=True)
    saving = Saving(bits=4, min_bytes=0)
    with saving:
        y = (z * 2).logsumexp(-1)
    assert [record.reason for record in saving.records] == ["compared in backward"] * 2
    found, exact = (torch.autograd.grad(f.sum(), z)[0] for f in (y, (z * 2).logsumexp(-1)))
    assert torch.equal(found, exact)


@pytest.mark.parametrize("scale", [1e-60, 1e60, 1e300])
def test_float64_beyond_float32_is_kept(scale):
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    saving = Saving(bits=8, min_bytes=0)

    def loss(x):
        hidden = x * scale
        return ((hidden * 2).square() / scale**0.5 / scale**0.5 / scale).sum()

    with saving:
        y = loss(x)
    assert "beyond float32" in {record.reason for record in saving.records}
    assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(loss(x), x)[0])


def test_float64_groups_that_are_too_small_are_kept_and_others_are_not():
    x = torch.randn(4, 256, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([1.0, 1e-3, 1e-20, 0.0], dtype=torch.float64)[:, None]
    for last, reason in ((0.0, "compressed"), (1e-40, "beyond float32")):
        scale[3] = last
        saving = Saving(bits=8, min_bytes=0)
        with saving:
            (x * scale).square().sum()
        assert saving.records[-1].reason == reason
