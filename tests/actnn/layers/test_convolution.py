"""Convolutions: gradients of torch, at a lower peak."""

import pytest
import torch
from actnn_models import compressed_copy, gradients
from torch import nn

from actnn.layers.convolution import _Convolution
from actnn.planning.meter import HostMeter


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "stride": 2, "groups": 4, "bias": False},
        {"kernel_size": (1, 3), "dilation": (1, 2), "padding": "same"},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
        {"kernel_size": 1},
    ],
    ids=str,
)
def test_gradients_equal_those_of_torch(options, layout):
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, **options)).to(memory_format=layout)
    ours = compressed_copy(net, bits=32, min_bytes=0)
    x = torch.randn(2, 3, 9, 10).contiguous(memory_format=layout)
    for a, b in zip(gradients(net, x), gradients(ours, x), strict=True):
        assert torch.equal(a, b)
    net[1].weight.requires_grad_(False)
    ours[1].weight.requires_grad_(False)
    a, b = (each(x) for each in (net, ours))
    assert a.stride() == b.stride()
    for y in (a, b):
        y.square().sum().backward()
    assert torch.equal(net[0].weight.grad, ours[0].weight.grad)


@pytest.mark.parametrize("options", [{"dilation": 2}, {"groups": 8}], ids=str)
def test_kernels_that_read_the_input_for_its_own_gradient(options):
    """PyTorch has such kernels where neither cuDNN nor oneDNN computes, as in double precision."""
    net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, **options)).double()
    net = net.to(memory_format=torch.channels_last)
    ours, x = compressed_copy(net, bits=32, min_bytes=0), torch.randn(2, 8, 9, 9).double()
    for a, b in zip(gradients(net, x), gradients(ours, x), strict=True):
        assert torch.equal(a, b)


def test_the_decoded_input_is_gone_before_the_gradient_of_the_input_exists():
    net = nn.Sequential(nn.Conv2d(1, 32, 1), nn.Conv2d(32, 1, 1))
    ours = compressed_copy(net, bits=2)
    x = torch.randn(4, 1, 64, 64)
    largest = 4 * 32 * 64 * 64 * 4
    with HostMeter([*ours.parameters(), x]) as meter:
        loss = ours(x).sum()
        meter.reset_peak()
        held = meter.allocated()
        loss.backward()
    assert meter.peak() - held < 1.2 * largest


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_of_the_weight_is_a_sum_over_parts_of_the_batch(bias):
    x, weight = torch.randn(7, 4, 9, 9).double(), torch.randn(6, 2, 3, 3).double()
    leaves = [weight, torch.randn(6).double()] if bias else [weight]
    leaves = [leaf.requires_grad_() for leaf in (x, *leaves)]
    settings = ((2, 1), (1, 0), (1, 2), False, (0, 0), 2)
    results = []
    for parts in (1, 3, 7):
        y = _Convolution.apply(*leaves, *([] if bias else [None]), settings, parts)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
