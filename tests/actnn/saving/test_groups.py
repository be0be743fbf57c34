"""Groups of codes span as few channels as they can: beside loud ones, quiet ones would be lost."""

import pytest
import torch
from actnn_models import distance, gradient, run_by
from torch import nn

from actnn.saving.groups import group_of


@pytest.fixture(autouse=True)
def _compile_anew():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("shape", "convolved", "elements"),
    [
        ((4, 8, 16, 16), False, 256),
        ((4, 8, 40, 40), False, 256),
        ((4, 8, 14, 14), False, 192),
        ((4, 8, 7, 7), False, 32),
        ((4, 8, 2, 2), False, 32),
        ((4, 8, 4, 4, 5), False, 64),
        ((4, 8, 100), True, 96),
        ((4, 8, 100), False, 256),  # samples of 8 tokens
        ((4, 8), True, 256),
    ],
)
def test_groups_have_no_more_elements_than_channels(shape, convolved, elements):
    assert group_of(torch.randn(shape), 256, convolved) == elements
    assert group_of(torch.randn(shape), 64, convolved) == min(64, elements)


def test_groups_where_channels_are_innermost():
    x = torch.randn(4, 8, 7, 7).contiguous(memory_format=torch.channels_last)
    assert group_of(x, 256, True) == 256


class Quiet(nn.Module):
    """A depthwise convolution makes channels of very different size, a batch norm equal ones."""

    def __init__(self, dims):
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.wide, self.scale = convolution(4, 64, 1), convolution(64, 64, 1, groups=64)
        self.norm, self.last = norm(64), convolution(64, 8, 1)
        with torch.no_grad():
            self.scale.weight.fill_(1)[::2] = 0.01

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.scale(self.wide(x))))).square().mean()


@pytest.mark.parametrize(
    ("way", "size"),
    [
        *(("context", size) for size in [(64,), (8, 8), (4, 4, 4)]),
        ("model", (8, 8)),
        ("aot_eager", (8, 8)),
        ("aot_eager", (64,)),
    ],
    ids=str,
)
def test_quiet_channels_before_a_batch_norm(size, way):
    torch.manual_seed(0)
    model, x = Quiet(len(size)), torch.randn(8, 4, *size)
    exact = gradient(model(x), model)
    run = run_by(way, model, bits=8, min_bytes=0)
    for _ in range(2):
        assert distance(gradient(run(x), model), exact) <= 0.05
