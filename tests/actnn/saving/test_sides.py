"""What backward compares with a bound has codes on the right side of it."""

import math

import pytest
import torch
from actnn_models import distance
from torch.nn import functional as F

from actnn.saving.context import Saving
from actnn.saving.sides import Interval, restore_sides, sides_of

COMPARED = {
    "leaky relu": F.leaky_relu,
    "leaky relu in place": lambda x: F.leaky_relu_(x * 1),
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp min": lambda x: x.clamp(min=0.1),
    "clamp max": lambda x: x.clamp_max(0.1),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.5),
    "relu6": F.relu6,
    "relu6 in place": lambda x: F.relu6(x, inplace=True),
    "clamp in place": lambda x: (x * 1).clamp_(-0.5, 0.5),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2])),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "hardsigmoid": F.hardsigmoid,
    "rrelu of one slope": lambda x: F.rrelu(x, 0.2, 0.2, training=True),
    "rrelu in evaluation": lambda x: F.rrelu(x, 0.1, 0.3),
    "norm of order 1": lambda x: torch.stack([x, x / 2], -1).norm(1, -1),
    "clamp of real parts": lambda x: torch.complex(x, x).real.clamp(-0.5, 0.5),
}
WIDE = torch.where(torch.arange(64) % 16 == 0, 100.0, 1.0)  # a wide range of each group


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", COMPARED)
def test_no_element_has_the_derivative_of_another_side(name, bits):
    torch.manual_seed(0)
    x, weight = torch.randn(256, 32), (torch.randn(32, 64) / 6).requires_grad_()

    def loss():
        return (COMPARED[name](x @ weight * WIDE) / WIDE).sin().mean()

    (exact,) = torch.autograd.grad(loss(), weight)
    saving = Saving(bits=bits, min_bytes=1024)
    for _ in range(4):
        with saving:
            value = loss()
        (found,) = torch.autograd.grad(value, weight)
        assert distance(found, exact) < (0.02 if bits == 8 else 0.25)
        del value
        assert saving.held_bytes == 0
    assert "compared with a bound" not in {record.reason for record in saving.records}


PAIRS = {
    "maximum": lambda x: torch.maximum(x, x * 0.99 + 0.001),
    "minimum": lambda x: torch.min(x, -x),
    "fmax": lambda x: torch.fmax(x, x.flip(0)),
    "fmin": lambda x: torch.fmin(x, x.flip(0)),
    "maximum with a constant": lambda x: torch.maximum(x, torch.zeros(())),
    "clamp": lambda x: x.clamp(torch.full((64,), -0.1), torch.full((64,), 0.2)),
    "clamp below": lambda x: torch.clamp_min(x, x.roll(1, 0)),
    "clamp above": lambda x: torch.clamp_max(x, x.roll(1, 0)),
    "margins": lambda x: F.multi_margin_loss(x * 9, torch.arange(256) % 64, reduction="none"),
    "smooth distance": lambda x: F.smooth_l1_loss(x, x.roll(1, 0), beta=1e-3, reduction="none"),
    "Huber loss": lambda x: F.huber_loss(x, x.roll(1, 0), delta=1e-3, reduction="none"),
    "remainder": lambda x: torch.remainder(x, x.roll(1, 0)),
    "fmod": lambda x: torch.fmod(x, x.roll(1, 0)),
    "distance of order 1": lambda x: torch.cdist(x[None, :16], x[None, 16:], p=1.0)[0],
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_compared_with_tensors_is_exact(name):
    torch.manual_seed(0)
    x, weight = torch.randn(256, 32), (torch.randn(32, 64) / 6).requires_grad_()

    def loss():
        y = PAIRS[name](x @ weight * WIDE)
        return (y * torch.linspace(-1, 1, y.shape[-1])).mean()

    (exact,) = torch.autograd.grad(loss(), weight)
    saving = Saving(bits=8, min_bytes=1024)
    for _ in range(3):
        with saving:
            value = loss()
        (found,) = torch.autograd.grad(value, weight)
        assert distance(found, exact) < 0.01
    assert "compared in backward" in {record.reason for record in saving.records}


def test_later_steps_hold_one_bit_more():
    x, held = torch.randn(64, 64, requires_grad=True), []
    for function in (torch.sin, F.leaky_relu, torch.abs):
        saving = Saving(bits=8, min_bytes=0)
        for _ in range(2):
            with saving:
                y = function(x * 2)
            y.sum().backward()
        held.append(sum(record.held for record in saving.records))
    assert held[1] - held[0] == x.numel() // 8
    assert held[2] - held[0] == 2 * x.numel() // 8


def test_the_last_operation_is_right_in_the_first_step():
    x = (torch.linspace(-3, 3, 4096) * WIDE.repeat(64)).requires_grad_()
    with Saving(bits=8, min_bytes=0):
        value = (x * 1).clamp(-0.5, 0.5).sum()
    value.backward()
    assert torch.equal(x.grad, x.abs().le(0.5).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    "bounds", [(0.0, math.inf), (-math.inf, 0.0), (-1.0, 1.0), (0.0, 6.0), (1e4, math.inf)]
)
def test_sides_are_those_of_exact_numbers(bounds, closed, dtype):
    """Of bounds, infinities and zeros, too, whatever the decoded numbers are."""
    interval = Interval(*bounds, closed)
    ends = [bound for bound in bounds if math.isfinite(bound)]
    x = torch.tensor([*ends, 0.0, -0.0, math.inf, -math.inf, 0.3, -0.3, 7.0, 2e4]).to(dtype)
    sides = sides_of(x, {interval: None})
    for decoded in (x, -x, x + 0.5, x - 0.5, torch.zeros_like(x)):
        found = restore_sides(decoded.clone(), sides)
        assert torch.equal(interval.has(found), interval.has(x))
    assert torch.equal(restore_sides(x.clone(), sides), x)
    assert sides.nbytes == -(-x.numel() // 8)


def test_not_a_number_stays_so():
    sides = sides_of(torch.tensor([math.nan, 1.0]), {Interval(0.0, math.inf): None})
    assert restore_sides(torch.tensor([math.nan, 1.0]), sides)[0].isnan()
