"""Every code of a QuantGRU against the definition in exact arithmetic; see exact_gru.py."""

import numpy as np
import pytest
from exact_gru import definition
from gru_helpers import CONFIGS, FUSIBLE, fused, quantized, seeded

from quant_gru import QuantConfig
from sweeps import first_of


def assert_equals_definition(gru, T=3, N=2, scale=1.0):
    directions = 2 if gru.bidirectional else 1
    x = seeded(T, N, gru.input_size, seed=11, scale=scale)
    h0 = seeded(gru.num_layers * directions, N, gru.hidden_size, seed=12, scale=0.5 * scale)
    expected, _ = definition(gru, x, h0)
    found = gru.trace_codes(x, h0)
    assert sorted(found) == sorted(expected)
    for name, codes in expected.items():
        assert found[name].tolist() == codes, name


pytestmark = pytest.mark.filterwarnings("ignore:one signed bit", "ignore:the scale of")
SMALL = {"input_size": 3, "hidden_size": 4}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_code_is_the_definition_s(config):
    assert_equals_definition(quantized(config, **SMALL))


@pytest.mark.parametrize("config", ["pot8-fused", "free8"])
def test_layers_and_directions(config):
    gru = quantized(config, input_size=2, hidden_size=3, num_layers=2, bidirectional=True)
    assert_equals_definition(gru, T=2, N=2)


@pytest.mark.parametrize("config", ["pot8", "free8-fused"])
def test_far_beyond_the_calibrated_range(config):
    """Everything saturates somewhere."""
    assert_equals_definition(quantized(config, **SMALL, num_layers=2), N=1, scale=30.0)


@pytest.mark.parametrize("config", ["pot8", "free8"])
def test_without_bias(config):
    assert_equals_definition(quantized(config, **SMALL, bias=False))


@pytest.mark.parametrize(("activation", "width"), [("pwl", 8), ("quadratic", 16)])
def test_other_tables(activation, width):
    config = QuantConfig.uniform(width, False).replace_globals(activation=activation)
    assert_equals_definition(quantized(config, **SMALL))


@pytest.mark.parametrize("config", ["pot8", "free8"])
def test_adjusted_operators(config):
    """Scales, zero points and widths set by hand leave nothing behind of the old ones."""
    gru = quantized(config, **SMALL, num_layers=2)
    gru(seeded(2, 2, 3))
    gru.adjust_quant_config("z_out", bitwidth=5)
    gru.adjust_quant_config("h", zero_point=-100)
    gru.adjust_quant_config("z_pre", scale=0.25, layer=1)
    gru.adjust_quant_config("W", bitwidth=3)
    gru.adjust_quant_config("Rh", is_unsigned=True, is_symmetric=False)
    gru.adjust_quant_config("x", bitwidth=11, layer=1)
    gru.adjust_quant_config("R", scale=2.0**-5, layer=0)
    assert_equals_definition(gru, T=2, N=1)


def random_config(seed):
    """Widths 1..32, symmetry, signedness, granularity, scales and tables at random."""
    rng = np.random.default_rng(seed)
    widths = [[1, 2, 3, 4], range(5, 13), range(13, 25), range(25, 33)]

    def width():
        return int(rng.choice(widths[rng.choice(4, p=[0.15, 0.45, 0.25, 0.15])]))

    config = QuantConfig()
    for name in config.operators:
        if name.startswith("weight."):
            granularity = str(rng.choice(["tensor", "gate", "channel"]))
            config = config.replace(name, bitwidth=width(), granularity=granularity)
        else:
            config = config.replace(
                name,
                bitwidth=width(),
                is_symmetric=bool(rng.integers(2)),
                is_unsigned=bool(rng.integers(2)) and name != "gate.g_out",
            )
    for name in FUSIBLE:
        if rng.integers(2):
            config = config.replace(name, bitwidth=None)
    return config.replace_globals(
        scale_kind=str(rng.choice(["pot", "free"])),
        activation=str(rng.choice(["exact", "pwl", "quadratic"], p=[0.6, 0.2, 0.2])),
    )


@pytest.mark.parametrize("seed", first_of(range(14), 6))
def test_mixed_widths(seed):
    """Any mixture of widths 1..32 is exact, forward and between layers."""
    gru = quantized(
        random_config(seed),
        input_size=2,
        hidden_size=3,
        num_layers=2,
        method=("minmax", "percentile")[seed % 2],
    )
    assert_equals_definition(gru, T=2, N=1)


@pytest.mark.parametrize(
    "width", first_of([1, 3, 9, 15, 17, 24, 28, 32, 2, 7, 12, 13, 20, 25, 27, 31], 8)
)
def test_uniform_widths(width):
    config = QuantConfig.uniform(width, is_symmetric=width % 2 == 0)
    config = fused(config) if width % 3 == 0 else config
    kind = "free" if width % 4 < 2 else "pot"
    config = config.replace_globals(scale_kind=kind)
    gru = quantized(config, input_size=2, hidden_size=2, method="minmax")
    assert_equals_definition(gru, T=2, N=1)
