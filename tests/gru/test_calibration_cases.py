"""GRUs whose gates leave the range in which sigmoid and tanh change, on data not seen before."""

import pytest
import torch

from quant_gru import CalibrationError, QuantConfig, QuantGRU, QuantGRUWarning

C, H = 16, 64


def db(found, expected):
    """Signal over error in dB."""
    return float(10 * torch.log10(expected.square().mean() / (found - expected).square().mean()))


def open_gates(bias):
    """Four of 64 update gates that stay open."""

    def change(gru):
        gru.bias_ih_l0[H : H + 4] += bias

    return change


def row(index, factor):
    """One row of both weights, multiplied: 3 of the reset, 67 of the update gate, 130 of g."""

    def change(gru):
        gru.weight_ih_l0[index] *= factor
        gru.weight_hh_l0[index] *= factor

    return change


def quality(preset, change, method="histogram", scale_kind="pot", refine=False):
    """dB of the output against the float GRU."""
    torch.manual_seed(0)
    gru = torch.nn.GRU(C, H)
    with torch.no_grad():
        change(gru)
        x, unseen = torch.randn(100, 8, C), torch.randn(100, 8, C)
        config = getattr(QuantConfig, preset)()
        if scale_kind == "free":
            config = config.replace_globals(scale_kind="free")
        quantized = QuantGRU(C, H, config=config).eval()
        quantized.load_state_dict(gru.state_dict())
        quantized.calibration_method = method
        quantized.calibrate(x)
        quantized.finalize_calibration(refine=refine)
        quantized.use_quantization = True
        return db(quantized(unseen)[0], gru(unseen)[0])


@pytest.mark.parametrize(
    ("preset", "change", "least"),
    [
        ("int8", open_gates(0), 30.9),
        ("int8", open_gates(20), 27),
        ("int8", open_gates(40), 27),
        ("int8", open_gates(80), 27),
        ("int8", row(3, 20), 29),
        ("int8", row(130, 30), 22.5),
        ("int8", row(3, 256), 28),
        ("int8", row(67, 256), 14),
        ("int8_wide", open_gates(0), 34.4),
        ("int8_wide", open_gates(80), 34.4),
        ("int8_wide", row(3, 256), 32.5),
        ("int8_wide", row(67, 256), 31),
        ("int8_wide", row(130, 256), 28),
        ("int16", open_gates(0), 46.5),
        ("int16", open_gates(80), 45.7),
        ("int16", row(3, 20), 46.5),
        ("int16", row(130, 30), 46.8),
        ("int16", row(3, 256), 40.9),
        ("int16", row(67, 256), 40.7),
        ("int16", row(130, 256), 38.7),
    ],
)
def test_flat_gates_do_not_cost_the_others_their_codes(preset, change, least):
    assert quality(preset, change) >= least


@pytest.mark.parametrize("change", [open_gates(40), row(3, 20)], ids=["open", "reset"])
def test_free_scales_see_through_the_cell(change):
    assert quality("int8", change, scale_kind="free") >= 27


@pytest.mark.parametrize("method", ["minmax", "percentile", "ema"])
def test_other_methods_do_not(method):
    """They keep their meaning: the range decides."""
    assert quality("int8", open_gates(80), method) < 10


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
def test_silence_is_no_calibration_data(method):
    """A single value gives a scale that means nothing; the warning names the operator."""
    gru = QuantGRU(C, H, config=QuantConfig.int8())
    gru.calibration_method = method
    gru.calibrate(torch.zeros(5, 2, C))
    with pytest.warns(QuantGRUWarning, match=r"single one for 'input.x_l0' \(0\)"):
        gru.finalize_calibration()


def calibrated(change, refine=False, method="histogram", **shape):
    """A GRU calibrated on random data, and its float copy."""
    torch.manual_seed(0)
    gru = torch.nn.GRU(C, 24, **shape)
    with torch.no_grad():
        change(gru)
    quantized = QuantGRU(C, 24, config=QuantConfig.int8(), **shape).eval()
    quantized.load_state_dict(gru.state_dict())
    quantized.calibration_method = method
    quantized.calibrate(torch.randn(40, 4, C))
    quantized.finalize_calibration(refine=refine)
    quantized.use_quantization = True
    return quantized, gru


def test_values_too_small_for_a_scale():
    """Gates so shut that what stays of the state is beyond the smallest scale."""

    def shut(gru):
        gru.bias_ih_l0[24:48] -= 95

    quantized, _ = calibrated(shut)
    scales = {name: each["scale"] for name, each in quantized.get_quant_config().items()}
    assert scales["op.old_contrib"] == 2.0**-126


@pytest.mark.slow
def test_refining_finds_better_scales():
    assert quality("int8", row(67, 256), refine=True) >= 18


@pytest.mark.slow
def test_refining_takes_all_layers_and_directions():
    shape = {"num_layers": 2, "bidirectional": True}

    def large_row(gru):
        gru.weight_ih_l0[30] *= 256
        gru.weight_hh_l0[30] *= 256

    results = []
    for refine in (False, True):
        quantized, gru = calibrated(large_row, refine, **shape)
        unseen = torch.randn(60, 8, C, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            results.append(db(quantized(unseen)[0], gru(unseen)[0]))
    assert results[1] > results[0] + 1


def test_refining_needs_the_data():
    with pytest.raises(CalibrationError, match="Expected the method 'histogram'"):
        calibrated(lambda gru: None, refine=True, method="minmax")
