"""Wider operators never make the output worse, and more bits everywhere make it better."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant_gru import QuantConfig, QuantGRU
from quant_gru.config import ACTIVATIONS, FUSIBLE, WEIGHTS

pytestmark = pytest.mark.slow

I, H, T, B = 16, 32, 12, 12  # noqa: E741
TOLERANCE = 0.3  # dB


@functools.cache
def float_case(seed, layers):
    """Weights, an input and the output in float64."""
    torch.manual_seed(seed)
    gru = torch.nn.GRU(I, H, layers)
    x = torch.randn(T, B, I)
    weights = {name: w.clone() for name, w in gru.state_dict().items()}
    with torch.no_grad():
        return weights, x, gru.double()(x.double())[0]


def calibrated(config, weights, x):
    layers = len(weights) // 4
    gru = QuantGRU(I, H, layers, config=config).eval()
    gru.load_state_dict(weights)
    gru.calibration_method = "minmax"
    gru.calibrate(x)
    gru.finalize_calibration()
    return gru


@functools.cache
def output_sqnr(seed, config, layers=1):
    """dB of the output over its error, codes taken as they are: float32 would round them."""
    weights, x, expected = float_case(seed, layers)
    gru = calibrated(config, weights, x)
    plan = gru._plan()
    first, last = plan.cells[0][0], plan.cells[-1][0]
    codes = gru.forward_integer(first.x.quantize(x))[0]
    found = (codes.double() - last.h.zero_point) * last.h.scale
    return 10 * math.log10(expected.square().sum() / (found - expected).square().sum())


def config_of(bits, kind, fused=()):
    config = QuantConfig.uniform(bits, is_symmetric=False).replace_globals(scale_kind=kind)
    for name in fused:
        config = config.replace(name, bitwidth=None)
    return config


@st.composite
def widened(draw):
    """A configuration, an operator that has a width in it, and two widths of that."""
    bits = draw(st.sampled_from([4, 8, 8, 12, 16, 24, 32]))
    fused = draw(st.sets(st.sampled_from(sorted(FUSIBLE))))
    names = [name for name in (*ACTIVATIONS, *WEIGHTS) if name not in fused]
    name = draw(st.sampled_from(names))
    widths = draw(st.sets(st.integers(4, 32) | st.just(bits), min_size=2, max_size=2))
    config = config_of(bits, draw(st.sampled_from(["pot", "free"])), sorted(fused))
    return config, name, sorted(widths)


@settings(max_examples=40)
@given(widened(), st.integers(0, 3))
def test_a_wider_operator_never_makes_the_output_worse(case, seed):
    config, name, widths = case
    narrow, wide = (output_sqnr(seed, config.replace(name, bitwidth=w)) for w in widths)
    assert wide >= narrow - TOLERANCE


@pytest.mark.parametrize("kind", ["pot", "free"])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    "name", ["Wx", "Rh", "rRh", "old_contrib", "new_contrib", "r_out", "output.h", "Wx, Rh"]
)
def test_no_width_destroys_the_output(name, bits, kind):
    """Those whose multipliers have the most to lose, at the ends and in the middle."""
    for fused in ((), ("op.rRh", "op.old_contrib", "op.new_contrib")):
        config = config_of(bits, kind, fused)
        least = output_sqnr(0, config) - TOLERANCE
        for width in (20, 24, 30, 32):
            wide = config
            for each in name.split(", "):
                if wide[each].bitwidth is not None:
                    wide = wide.replace(each, bitwidth=width)
            assert output_sqnr(0, wide) >= least, (width, fused)


@pytest.mark.parametrize("kind", ["pot", "free"])
@pytest.mark.parametrize("layers", [1, 2])
def test_every_bit_gives_decibels(kind, layers):
    """6 dB a bit to 31 bits; `free` scales are float32 numbers, which end at 140 to 150 dB."""
    widths = (8, 16, 17, 24, 26, 28, 30, 31, 32)
    found = {bits: output_sqnr(0, config_of(bits, kind), layers) for bits in widths}
    for low, high in itertools.pairwise(widths):
        most = 140 if kind == "free" else 165
        expected = min(found[low] + 5 * (high - low), most)
        assert found[high] >= expected, found


@pytest.mark.parametrize("config", [QuantConfig.int16(), QuantConfig.w8a16()])
def test_a_product_that_was_zero_in_calibration_costs_the_other_no_accuracy(config):
    """One step from a state of zeros: the scale of old_contrib says nothing."""
    weights, x, _ = float_case(0, 1)
    gru = calibrated(config.replace_globals(scale_kind="free"), weights, x[:1])
    frozen = gru._plan().cells[0][0].frozen
    each, q = frozen.sums["output.h"], frozen.quantizers
    gain = each.multipliers[1] / 2.0**each.shift / (q["op.new_contrib"].scale / q["output.h"].scale)
    assert abs(gain - 1) < 2.0**-18
