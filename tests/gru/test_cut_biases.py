"""Biases that values or weights are too small for are said at the end of a calibration."""

import pytest
import torch

from quant_gru import QuantConfig, QuantGRU, QuantGRUWarning


def calibrated(amplitude=1.0, config=None, change=None, **options):
    torch.manual_seed(0)
    gru = QuantGRU(8, 16, config=config or QuantConfig.int8(), **options)
    if change is not None:
        with torch.no_grad():
            change(gru)
    gru.calibrate(torch.randn(20, 4, 8) * amplitude)
    gru.finalize_calibration()
    return gru


@pytest.mark.filterwarnings("ignore:Expected calibration data with more than one value")
@pytest.mark.parametrize("amplitude", [1e6, 1.0, 1e-5, 0.0])
@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
def test_values_of_usual_size_are_no_matter(amplitude, config):
    calibrated(amplitude, getattr(QuantConfig, config)(), num_layers=2, bidirectional=True)


@pytest.mark.parametrize(("amplitude", "config"), [(1e-8, "int8"), (1e-9, "int16")])
def test_small_inputs(amplitude, config):
    with pytest.warns(
        QuantGRUWarning,
        match=r"48 of 48 in weight\.bw of layer 0 that are too large, .* values of input\.x",
    ):
        calibrated(amplitude, getattr(QuantConfig, config)())


def test_small_weights_of_a_direction():
    with pytest.warns(
        QuantGRUWarning,
        match=r"weight\.br of layer 1 reverse that are too large, .* values of output\.h",
    ):
        calibrated(
            change=lambda gru: gru.weight_hh_l1_reverse.mul_(1e-12),
            num_layers=2,
            bidirectional=True,
        )


def test_without_biases_there_is_nothing_to_cut():
    calibrated(1e-8, bias=False)


def test_a_larger_scale_keeps_them():
    with pytest.warns(QuantGRUWarning, match="adjust_quant_config"):
        gru = calibrated(1e-8).eval()
    x = torch.randn(20, 4, 8) * 1e-8
    gru.adjust_quant_config("input.x", scale=2.0**-10)
    gru.use_quantization = False
    with torch.no_grad():
        expected = gru(x)[0]
        gru.use_quantization = True
        assert (gru(x)[0] - expected).abs().max() < 0.03
