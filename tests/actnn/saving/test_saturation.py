"""Functions with a bounded result: no decoded number lies beyond, and the ends are exact."""

import pytest
import torch
from torch import nn

import actnn
from actnn.saving import Saving

SATURATED = {
    "tanh": (torch.tanh, 100),
    "sigmoid": (torch.sigmoid, 1000),
    "softmax": (lambda z: torch.softmax(z, -1), 1e4),
    "log_softmax": (lambda z: torch.log_softmax(z, -1), 1e4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_saturated_functions_pass_no_gradient(name, bits, dtype):
    torch.manual_seed(0)
    function, scale = SATURATED[name]
    z = (torch.randn(64, 256).sign() * scale).to(dtype).requires_grad_()
    with Saving(bits=bits, min_bytes=0):
        y = function(z)
    assert torch.equal(torch.autograd.grad(y.sum(), z)[0], torch.zeros_like(z))


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_derivatives_have_the_right_sign_and_are_zero_where_the_exact_ones_are(name, bits):
    torch.manual_seed(0)
    function, _ = SATURATED[name]
    z = (torch.randn(512, 256) * 30).requires_grad_()
    (exact,) = torch.autograd.grad(function(z).sum(), z)
    with Saving(bits=bits, min_bytes=0):
        y = function(z)
    (found,) = torch.autograd.grad(y.sum(), z)
    flat = exact == 0
    assert 0 < flat.sum() < flat.numel()
    assert (found[flat] == 0).all()
    assert (found >= 0).all()
    assert (found - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("kind", [torch.tanh, torch.sigmoid, nn.Tanh, nn.Sigmoid])
def test_large_inputs_give_no_large_gradients(kind):
    """Sound as integers of 16 bits: nearly all derivatives are 0."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(256, 256)
            self.act = kind() if isinstance(kind, type) else None

        def forward(self, x):
            return (self.act or kind)(self.linear(x))

    model, x = Net(), torch.randn(128, 256) * 3e4
    model(x).square().sum().backward()
    exact = model.linear.weight.grad.clone()
    actnn.compress(model, bits=4)
    model.zero_grad()
    model(x).square().sum().backward()
    assert (model.linear.weight.grad - exact).norm() <= 0.1 * exact.norm() + 1e-20


@pytest.mark.parametrize("name", SATURATED)
def test_functions_that_share_saturated_groups_are_as_near_as_others(name):
    """Half of the elements of each group are at an end."""
    torch.manual_seed(0)
    function, scale = SATURATED[name]
    z = torch.randn(2, 4, 64, 64)
    z[..., ::2] *= scale
    z.requires_grad_()
    weights = torch.randn(2, 4, 64, 64)
    (exact,) = torch.autograd.grad((function(z * 1) * weights).sum(), z)
    with Saving(bits=8, min_bytes=0):
        y = (function(z * 1) * weights).sum()
    (found,) = torch.autograd.grad(y, z)
    assert found.isfinite().all()
    assert (found - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_functions_have_exact_ends_too(dtype):
    torch.manual_seed(0)

    class Net(nn.Module):
        def forward(self, z):
            masked = (z * 1).masked_fill(z > 40, -torch.inf)
            saturated = torch.tanh(z * 1) + torch.sigmoid(z * 8)
            return saturated + torch.log_softmax(masked, -1)[:, :1]

    model, z = Net(), torch.randn(64, 256, dtype=dtype) * 30
    z[:, 0] = 0
    z.requires_grad_()
    (exact,) = torch.autograd.grad(model(z).sum(), z)
    actnn.compress(model, bits=4, min_bytes=0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(z).sum(), z)
    assert found.isfinite().all()
    assert 0 < (exact == 0).sum() < exact.numel()
    assert (found[exact == 0] == 0).all()
    assert (found - exact).norm() < 0.1 * exact.norm()
    assert torch.equal(found, exact) == (dtype == torch.float64)
