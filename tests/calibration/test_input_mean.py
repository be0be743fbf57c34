"""The mean of inputs: the same for any order and split, and rounded so that it stays the same."""

import math
import pickle
from fractions import Fraction

import pytest
import torch

from quant_gru import QuantConfig, QuantGRU
from quant_gru.calibration.input_mean import MeanObserver
from quant_gru.integer.bias_correction import InputMean
from quant_gru.integer.qparams import float32


def mean_of(*parts):
    observer = MeanObserver()
    for part in parts:
        observer.update(part.double())
    found = observer.mean()
    return None if found is None else list(found.values)


def test_rounded_half_even_to_a_share_of_the_largest_input():
    x = torch.tensor([[7.0, 1 + 2.0**-14, 0.0], [-8.0, 1 + 2.0**-14, 2.0**-20], [5.0, 1.0, 0.0]])
    unit = Fraction(1, 2**12)  # inputs are below 16
    exact = [sum(map(Fraction, column)) / 3 for column in x.T.tolist()]
    assert mean_of(x) == [float(round(m / unit) * unit) for m in exact]
    assert mean_of(torch.tensor([[1.0, 2.0**-17]]), torch.tensor([[-1.0, 2.0**-17]])) is None
    assert mean_of(torch.tensor([[1.0, 2.0**-16 * 1.5]])) == [1.0, 2.0**-15]
    assert all(float32(m) == m for m in mean_of(torch.randn(50, 7) * 1e-30 + 3e-30))
    assert mean_of(torch.full((3, 1), 1e-44)) == [float32(1e-44)]
    assert mean_of(torch.zeros(3, 4)) is None
    assert mean_of(torch.zeros(0, 4)) is None


@pytest.mark.parametrize("scale", [1e-20, 1, 1e20])
def test_order_and_split_do_not_matter(scale):
    x = (torch.randn(999, 5) + torch.tensor([0, 1, -3, 100, 1e-3])) * scale
    both = torch.cat((x, -x))  # means of 0, but for the rounding of sums
    order = torch.randperm(999)
    whole = mean_of(x)
    assert whole == mean_of(*x[order].split(7)) == mean_of(x.flip(0))
    assert mean_of(both) is None
    assert mean_of(both[torch.randperm(1998)]) is None
    exponent = math.frexp(float(x.abs().max()))[1]
    for found, exact in zip(whole, x.double().mean(0).tolist(), strict=True):
        assert abs(found - exact) <= 2.0 ** (exponent - 17)


def test_only_valid_steps_count():
    x = torch.rand(6, 3, 2) + 5
    lengths = torch.tensor([6, 4, 1])
    gru = QuantGRU(2, 3, config=QuantConfig.int16())
    gru.calibrate(torch.nn.utils.rnn.pack_padded_sequence(x, lengths))
    gru.finalize_calibration()
    found = gru._state.scales[0][0].input_mean
    valid = torch.cat([x[:length, row] for row, length in enumerate(lengths.tolist())])
    assert list(found.values) == mean_of(valid)


def test_each_layer_and_direction_has_a_mean_of_its_input():
    gru = QuantGRU(2, 3, 2, bidirectional=True, config=QuantConfig.int8())
    gru.calibrate(torch.rand(6, 3, 2) + 1)
    gru.finalize_calibration()
    sizes = [[len(cell.input_mean.values) for cell in layer] for layer in gru._state.scales]
    assert sizes == [[2, 2], [6, 6]]
    first = [cell.input_mean for cell in gru._state.scales[0]]
    assert first[0] == first[1]


def test_integers_of_a_mean():
    for values in ((1.0, -2.5), (0.0, 3 * 2.0**-140), (2.0**100, 0.0), (0.0, 0.0), (48.0, -16.0)):
        integers, exp2_inv = InputMean(values).integers()
        assert InputMean.of(integers, exp2_inv).values == values
        assert not any(values) or any(each % 2 for each in integers)


def test_copies_leave_tensors_of_devices_behind():
    mean = InputMean((1.0, -2.0))
    mean.on(torch.device("cpu"), 8)
    copy = pickle.loads(pickle.dumps(mean))
    assert copy == mean
    assert not copy._kept
