"""`tie_x_and_h`: one scale and zero point for the input and the states of a whole GRU."""

import pytest
import torch

from quant_gru import ConfigError, QuantConfig, QuantGRU
from quant_gru.calibration.search import choose_quantizer

METHODS = ("histogram", "minmax", "percentile", "ema")


def tied(config):
    return config.replace_globals(tie_x_and_h=True)


def calibrated(config, method="histogram", spread=1.0, **options):
    torch.manual_seed(0)
    gru = QuantGRU(5, 4, config=config, **options).eval()
    gru.calibration_method = method
    for _ in range(2):
        gru.calibrate(torch.randn(20, 3, 5) * spread)
    return gru


def quantizers(gru):
    gru.finalize_calibration()
    cells = [cell for layer in gru._state.scales for cell in layer]
    return [cell.quantizers[name] for cell in cells for name in ("input.x", "output.h")]


@pytest.mark.parametrize("kind", ["pot", "free"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_all_inputs_and_states_have_one_quantizer(method, kind, options):
    config = tied(QuantConfig.int8().replace_globals(scale_kind=kind))
    found = quantizers(calibrated(config, method, **options))
    assert len(set(found)) == 1
    own = quantizers(calibrated(config.replace_globals(tie_x_and_h=False), method, **options))
    assert len(set(own)) > 1


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_the_range_of_both_is_covered(spread):
    """With 'minmax' neither the input nor a state is clipped, whichever is the larger one."""
    gru = calibrated(tied(QuantConfig.int8()), "minmax", spread)
    lows, highs = zip(
        *((each.minimum, each.maximum) for each in map(observer(gru), ("input.x", "output.h"))),
        strict=True,
    )
    q = quantizers(gru)[0]
    assert q.scale * (q.lo - q.zero_point - 0.5) <= min(lows)
    assert q.scale * (q.hi - q.zero_point + 0.5) >= max(highs)
    assert q.scale * 128 < max(highs) - min(lows)  # not wider than needed


def observer(gru):
    return lambda name: gru._state._collector.observers[0][0][name]


def test_it_is_the_quantizer_of_the_values_together():
    """One observer that sees the input and the states finds the same scale."""
    gru = calibrated(tied(QuantConfig.int8().replace_globals(scale_kind="free")))
    both = observer(gru)("input.x")
    both.merge(observer(gru)("output.h"))
    kind = {"bits": 8, "signed": True, "symmetric": False, "scale_kind": "free"}
    expected = choose_quantizer(both, operator="input.x", **kind)
    assert set(quantizers(calibrated(gru.config))) == {expected}


@pytest.mark.parametrize(
    "change", [{"bitwidth": 16}, {"is_symmetric": True}, {"is_unsigned": True}]
)
def test_different_widths_and_kinds_are_refused(change):
    gru = calibrated(tied(QuantConfig.int8().replace("x", **change)))
    with pytest.raises(ConfigError, match=r"Expected input\.x and output\.h to have the same"):
        gru.finalize_calibration()
    gru.load_bitwidth_config(tied(QuantConfig.int8()))  # the statistics are still there
    assert len(set(quantizers(gru))) == 1
