"""Calibration and configuration of a QuantGRU: what a user sets, reads, exports and breaks."""

import copy
import json
import math

import pytest
import torch
from gru_helpers import C, H, finalizing, free, fused, packed, quantized, same, seeded, states
from torch import nn

from quant_gru import (
    CalibrationError,
    ConfigError,
    FrozenQuantGRU,
    ParameterError,
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    QuantGRUWarning,
    default_config_path,
    float_state_dict,
)
from two_processes import NEEDS_GLOO, joined, run_two

nan = float("nan")
DEEP = {"num_layers": 2, "bidirectional": True}
METHODS = ["histogram", "minmax", "percentile", "ema"]


def fresh(config="int8", **options):
    torch.manual_seed(2)
    made = getattr(QuantConfig, config)() if isinstance(config, str) else config
    return QuantGRU(C, H, config=made, **options).eval()


def everything(gru):
    """All quantizers of all layers and directions."""
    directions = (False, True) if gru.bidirectional else (False,)
    return [gru.get_quant_config(None, n, d) for n in range(gru.num_layers) for d in directions]


def finalized(gru):
    gru.finalize_calibration()
    return everything(gru)


# --- the flag and the method


@pytest.mark.parametrize("use_quantization", [False, True])
def test_calibrating_forward_is_float_and_never_finalizes(use_quantization):
    gru = fresh(**DEEP, use_quantization=use_quantization)
    plain = nn.GRU(C, H, **DEEP).eval()
    plain.load_state_dict(gru.state_dict())
    x, hx = seeded(6, 3, C), states(gru, 3)
    assert gru.calibrating is False
    gru.calibrating = True
    for _ in range(3):
        for a, b in zip(plain(x, hx), gru(x, hx), strict=True):
            same(a, b)
        assert not gru.is_calibrated()
    gru.calibrating = False
    assert not gru.is_calibrated()
    assert gru.use_quantization is use_quantization
    gru.finalize_calibration()
    assert gru.is_calibrated()


def test_calibrating_forward_has_gradients_and_dropout():
    gru = fresh(num_layers=2, dropout=0.5).train()
    plain = nn.GRU(C, H, 2, dropout=0.5)
    plain.load_state_dict(gru.state_dict())
    gru.calibrating = True
    x = seeded(6, 3, C).requires_grad_()
    torch.manual_seed(0)
    expected = plain(x)[0]
    torch.manual_seed(0)
    found = gru(x)[0]
    same(found, expected)
    found.sum().backward()
    assert x.grad is not None


def test_three_ways_to_collect_give_the_same_scales():
    data = [seeded(6, 3, C, seed=i) for i in range(3)]
    by_call, by_flag, by_forward = fresh(**DEEP), fresh(**DEEP), fresh(**DEEP)
    by_flag.calibrating = True
    by_forward.use_quantization = True
    for batch in data:
        by_call.calibrate(batch)
        by_flag(batch)
        by_forward.calibrate(batch)
    by_flag.calibrating = False
    with finalizing():
        by_forward(data[0])
    assert finalized(by_call) == finalized(by_flag) == everything(by_forward)


@pytest.mark.parametrize("method", METHODS)
def test_layouts_give_the_same_scales(method):
    """Statistics depend on the values, not on how they were handed over."""
    x, hx = seeded(6, 3, C), states(fresh(**DEEP), 3)
    rows = [x[:, i] for i in range(3)]
    results = {}
    for layout in ("batched", "batch_first", "packed", "calibrating"):
        gru = fresh(**DEEP, batch_first=layout == "batch_first")
        gru.calibration_method = method
        if layout == "packed":
            gru.calibrate(nn.utils.rnn.pack_sequence(rows, enforce_sorted=False), hx)
        elif layout == "calibrating":
            gru.calibrating = True
            gru(x, hx)
        else:
            gru.calibrate(x.transpose(0, 1) if gru.batch_first else x, hx)
        results[layout] = finalized(gru)
    for layout, found in results.items():
        assert found == results["batched"], layout


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile"])
def test_one_batch_or_several_give_the_same_scales(method):
    """Rows one at a time, unbatched, of different lengths; any order."""
    x, rows = packed(4, 7, 2)
    hx = states(fresh(**DEEP), 3)
    whole, parts = fresh(**DEEP), fresh(**DEEP)
    whole.calibration_method = parts.calibration_method = method
    whole.calibrate(x, hx)
    for i in (2, 0, 1):
        parts.calibrate(rows[i], hx[:, i])
    assert finalized(whole) == finalized(parts)


def test_padding_does_not_count():
    """Values of a padded batch's padding would widen the range."""
    gru = fresh(bidirectional=True)
    gru.calibration_method = "minmax"
    rows = [5 + seeded(4, C), 5 + seeded(2, C)]
    gru.calibrate(nn.utils.rnn.pack_sequence(rows))
    other = fresh(bidirectional=True)
    other.calibration_method = "minmax"
    for row in rows:
        other.calibrate(row)
    assert finalized(gru) == finalized(other)


def test_initial_states_count():
    wide, narrow = fresh(), fresh()
    for gru in (wide, narrow):
        gru.calibration_method = "minmax"
        hx = torch.full((1, 3, H), 40.0 if gru is wide else 0.1)
        gru.calibrate(0.01 * seeded(1, 3, C), hx)
        gru.finalize_calibration()
    assert wide.get_quant_config("h")["scale"] > 10 * narrow.get_quant_config("h")["scale"]


def test_calibrate_needs_no_gradient_and_keeps_none():
    gru = fresh()
    x = seeded(4, 2, C).requires_grad_()
    assert gru.calibrate(x) is None
    assert gru.calibrate(x, states(gru, 2).requires_grad_()) is None
    gru.finalize_calibration()
    assert all(p.grad is None for p in gru.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_method_cannot_change_once_statistics_are_collected(method):
    gru = fresh()
    gru.calibration_method = method
    gru.calibrate(seeded(4, 2, C))
    gru.calibration_method = method  # the same is no change
    other = "minmax" if method != "minmax" else "ema"
    for _ in range(2):
        with pytest.raises(CalibrationError, match="reset_calibration"):
            gru.calibration_method = other
        assert gru.calibration_method == method
    gru.finalize_calibration()
    with pytest.raises(CalibrationError, match="reset_calibration"):
        gru.calibration_method = other
    gru.reset_calibration()
    gru.calibration_method = other
    assert gru.calibration_method == other


def test_sqnr_is_the_other_name_of_histogram():
    a, b = fresh(), fresh()
    b.calibration_method = "sqnr"
    for gru in (a, b):
        gru.calibrate(seeded(6, 3, C))
    b.calibration_method = "histogram"
    assert finalized(a) == finalized(b)


def test_an_unknown_method_is_an_error_that_suggests():
    gru = fresh()
    with pytest.raises(CalibrationError, match="did you mean 'histogram'"):
        gru.calibration_method = "histgram"
    with pytest.raises(CalibrationError):
        gru.calibration_method = None
    assert gru.calibration_method == "histogram"


def test_percentile_value():
    x = seeded(40, 8, C)
    x[0, 0, 0] = 1000.0
    scales = []
    for value in (98.0, 99.0, 100.0):
        gru = fresh()
        gru.calibration_method = "percentile"
        gru.percentile_value = value
        assert gru.percentile_value == value
        gru.calibrate(x)
        with pytest.raises(CalibrationError, match="reset_calibration"):
            gru.percentile_value = 97.0
        gru.finalize_calibration()
        scales.append(gru.get_quant_config("x")["scale"])
    assert scales[0] <= scales[1] < scales[2]
    minmax = fresh()
    minmax.calibration_method = "minmax"
    minmax.calibrate(x)
    minmax.finalize_calibration()
    assert minmax.get_quant_config("x")["scale"] == scales[2]


@pytest.mark.parametrize("value", [50, 100.1, -1, nan, "99", None])
def test_percentile_value_out_of_range(value):
    gru = fresh()
    with pytest.raises((CalibrationError, TypeError)):
        gru.percentile_value = value
    assert gru.percentile_value == 99.99


# --- finalizing and resetting


def test_first_quantized_forward_finalizes_and_says_so_once():
    gru = fresh(use_quantization=True)
    gru.calibrate(seeded(6, 3, C))
    with finalizing():
        gru(seeded(6, 3, C))
        gru(seeded(6, 3, C))
    gru(seeded(6, 3, C))
    gru.reset_calibration()
    gru.calibrate(seeded(6, 3, C))
    with finalizing():
        gru(seeded(6, 3, C))


@pytest.mark.parametrize("use", ["trace_codes", "export", "freeze", "forward_integer"])
def test_other_uses_finalize_as_well(use, tmp_path):
    gru = fresh()
    gru.calibrate(seeded(6, 3, C))
    call = {
        "trace_codes": lambda: gru.trace_codes(seeded(6, 3, C)),
        "export": lambda: gru.export_quant_params(tmp_path / "p.json"),
        "freeze": gru.freeze,
        "forward_integer": lambda: gru.forward_integer(torch.zeros(2, 1, C, dtype=torch.int8)),
    }[use]
    with finalizing():
        call()
    assert gru.is_calibrated()


@pytest.mark.parametrize("use", ["forward", "trace_codes", "export", "freeze", "finalize"])
def test_without_statistics_every_use_is_a_clear_error(use, tmp_path):
    gru = fresh(use_quantization=True)
    call = {
        "forward": lambda: gru(seeded(6, 3, C)),
        "trace_codes": lambda: gru.trace_codes(seeded(6, 3, C)),
        "export": lambda: gru.export_quant_params(tmp_path / "p.json"),
        "freeze": gru.freeze,
        "finalize": gru.finalize_calibration,
    }[use]
    with pytest.raises(CalibrationError, match="calibrate"):
        call()
    assert not (tmp_path / "p.json").exists()


def test_finalize_twice_and_collect_after_it():
    gru = fresh()
    gru.calibrate(seeded(6, 3, C))
    before = finalized(gru)
    assert finalized(gru) == before
    with pytest.raises(CalibrationError, match="reset_calibration"):
        gru.calibrate(9 * seeded(6, 3, C))
    gru.calibrating = True
    with pytest.raises(CalibrationError, match="reset_calibration"):
        gru(seeded(6, 3, C))
    gru.calibrating = False
    assert everything(gru) == before


def test_reset():
    gru = fresh(**DEEP)
    gru.calibrate(9 * seeded(6, 3, C))
    gru.reset_calibration()  # statistics
    gru.calibrate(seeded(6, 3, C))
    expected = finalized(gru)
    other = fresh(**DEEP)
    other.calibrate(seeded(6, 3, C))
    assert finalized(other) == expected
    gru.adjust_quant_config("x", bitwidth=4, layer=1)
    gru.reset_calibration()  # scales, and what was adjusted of one layer
    assert not gru.is_calibrated()
    assert gru.config == other.config
    assert list(gru.state_dict()) == list(nn.GRU(C, H, **DEEP).state_dict())
    gru.calibrate(seeded(6, 3, C))
    assert finalized(gru) == expected
    gru.reset_calibration()
    gru.reset_calibration()


def test_verbose_finalize(capsys):
    gru = fresh(fused(QuantConfig.int8()), **DEEP)
    gru.calibrate(seeded(6, 3, C))
    gru.finalize_calibration(verbose=True)
    lines = capsys.readouterr().out.splitlines()
    for name in gru.config.operators:
        assert sum(name in line for line in lines) == 4, name
    for words in ("layer 0", "layer 0 reverse", "layer 1", "layer 1 reverse"):
        assert words in lines
    gru.reset_calibration()
    gru.calibrate(seeded(6, 3, C))
    gru.finalize_calibration()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [nan, math.inf, -math.inf])
def test_values_that_are_not_finite(value):
    gru = fresh(use_quantization=True)
    x = seeded(6, 3, C)
    gru.calibrate(x)
    bad = x.clone()
    bad[2, 1, 0] = value
    gru.calibrate(bad)
    for call in (gru.finalize_calibration, lambda: gru(x)):
        with pytest.raises(CalibrationError, match=r"finite.*input\.x"):
            call()
        assert not gru.is_calibrated()
    # the statistics are not lost: they are still reported, and can still be continued or reset
    gru.calibrate(x)
    with pytest.raises(CalibrationError, match="finite"):
        gru.finalize_calibration()
    gru.reset_calibration()
    gru.calibrate(x)
    gru.finalize_calibration()


def test_weights_that_are_not_finite():
    gru = fresh()
    with torch.no_grad():
        gru.weight_hh_l0[0, 0] = nan
    gru.calibrate(seeded(6, 3, C))
    with pytest.raises(CalibrationError, match=r"operator 'output\.h'"):
        gru.finalize_calibration()


def test_batches_without_rows():
    gru = fresh()
    gru.calibrate(torch.zeros(6, 0, C))
    with pytest.raises(CalibrationError, match="at least one value"):
        gru.finalize_calibration()
    gru.calibrate(seeded(6, 3, C))
    expected = fresh()
    expected.calibrate(seeded(6, 3, C))
    assert finalized(gru) == finalized(expected)


def test_data_that_do_not_fit_leave_the_statistics_alone():
    gru, other = fresh(num_layers=2), fresh(num_layers=2)
    for each in (gru, other):
        each.calibrate(seeded(6, 3, C))
    for bad in (
        torch.zeros(6, 3, C + 1),
        torch.zeros(3),
        torch.zeros(6, 3, C, dtype=torch.int64),
        torch.zeros(6, 3, C, dtype=torch.float64),
        None,
    ):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            gru.calibrate(bad)
    with pytest.raises(QuantGRUError):
        gru.calibrate(seeded(6, 3, C), torch.zeros(1, 3, H))
    assert finalized(gru) == finalized(other)


@pytest.mark.filterwarnings("ignore:Expected calibration data with more than one value")
def test_all_zero_data():
    gru = fresh()
    gru.calibrate(torch.zeros(6, 3, C))
    gru.finalize_calibration()
    assert gru.get_quant_config("x")["scale"] == 1.0
    gru.use_quantization = True
    assert gru(torch.zeros(2, 1, C))[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:Expected calibration data with more than one value")
def test_all_zero_weights():
    gru = fresh()
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.zero_()
    gru.calibrate(seeded(6, 3, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    assert not gru(seeded(6, 3, C))[0].any()
    assert set(gru.get_quant_config("W")["scale"]) == {1.0}


@pytest.mark.filterwarnings("ignore:Expected biases")
@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e-44])
@pytest.mark.parametrize("kind", ["pot", "free"])
def test_extreme_data(scale, kind):
    gru = fresh(QuantConfig.int8().replace_globals(scale_kind=kind))
    gru.calibrate(scale * seeded(6, 3, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    assert gru(scale * seeded(6, 3, C))[0].isfinite().all()
    gru.freeze()(scale * seeded(6, 3, C))


# --- configuration


def test_configuration_cannot_change_after_calibration():
    gru = fresh()
    gru.calibrate(seeded(6, 3, C))
    gru.set_all_bitwidth(16, False)  # statistics serve any configuration
    gru.finalize_calibration()
    before = everything(gru)
    gru.use_quantization = False
    for call in (
        lambda: gru.load_bitwidth_config(default_config_path()),
        lambda: gru.set_all_bitwidth(8),
    ):
        with pytest.raises(ConfigError, match="reset_calibration"):
            call()
    assert everything(gru) == before
    assert gru.config == QuantConfig.int16()
    assert gru.use_quantization is False
    gru.reset_calibration()
    gru.load_bitwidth_config(default_config_path())
    assert gru.config.without_comments() == QuantConfig.int8()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"GRU_config": {"operator_config": {"gate.zout": {}}}}', None]
)
def test_a_file_that_cannot_be_used_changes_nothing(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    gru = fresh()
    before = gru.config
    with pytest.raises(ConfigError, match=r"config\.json"):
        gru.load_bitwidth_config(path)
    assert gru.config is before
    assert gru.use_quantization is False


@pytest.mark.parametrize("width", [0, 33, -1, 8.0, "8", True, None])
def test_widths_out_of_range(width):
    gru = fresh()
    before = gru.config
    with pytest.raises(ConfigError):
        gru.set_all_bitwidth(width)
    assert gru.config == before


def test_get_quant_config_before_calibration():
    gru = fresh(fused(QuantConfig.int8()))
    found = gru.get_quant_config()
    assert list(found) == list(gru.config.operators)
    for name, entry in found.items():
        assert set(entry) == {
            "bitwidth",
            "is_symmetric",
            "is_unsigned",
            "scale",
            "zero_point",
            "exp2_inv",
        }
        assert entry["scale"] is entry["zero_point"] is entry["exp2_inv"] is None
        assert (entry["bitwidth"] is None) is name.startswith("op.")


def test_get_quant_config_after_calibration():
    gru = quantized("pot8-fused", **DEEP)
    for name, entry in gru.get_quant_config(layer=1, reverse=True).items():
        if name.startswith("weight"):
            assert len(entry["scale"]) == 3 * H
            assert entry["scale"] == [2.0**-e for e in entry["exp2_inv"]]
            assert entry["zero_point"] == 0
        elif name.startswith("op."):
            assert entry["scale"] is None
        else:
            assert entry["scale"] == 2.0 ** -entry["exp2_inv"]
            assert -128 <= entry["zero_point"] <= 255
    x = [gru.get_quant_config("x", layer)["scale"] for layer in (0, 1)]
    assert x[0] != x[1]


@pytest.mark.parametrize(("granularity", "count"), [("tensor", 1), ("gate", 3), ("channel", 18)])
def test_scales_of_a_weight(granularity, count):
    gru = quantized(QuantConfig.int8().replace("R", granularity=granularity))
    assert len(gru.get_quant_config("R")["scale"]) == count


def test_free_scales_have_no_exponent():
    gru = quantized("free8")
    assert all(entry["exp2_inv"] is None for entry in gru.get_quant_config().values())
    assert gru.get_quant_config("z_out")["scale"] == pytest.approx(1 / 255)


SHORT = {
    "input.x": "x",
    "output.h": "h",
    "weight.W": "W",
    "weight.R": "R",
    "weight.bw": "bw",
    "weight.br": "br",
    "matmul.Wx": "Wx",
    "matmul.Rh": "Rh",
    "gate.z_pre": "z_pre",
    "gate.g_out": "g_out",
    "op.rRh": "rRh",
    "op.old_contrib": "old_contrib",
}


@pytest.mark.parametrize("name", SHORT)
def test_short_and_full_names(name):
    gru = quantized()
    assert gru.get_quant_config(name) == gru.get_quant_config(SHORT[name])
    gru.adjust_quant_config(SHORT[name], bitwidth=11)
    assert gru.get_quant_config(name)["bitwidth"] == 11


@pytest.mark.parametrize("old", ["input.h", "weight.bx", "bx"])
def test_older_names(old):
    gru = quantized()
    new = "output.h" if "h" in old.partition(".")[2] else "weight.bw"
    assert gru.get_quant_config(old) == gru.get_quant_config(new)


def test_unknown_names_layers_and_directions():
    gru = quantized(num_layers=2)

    def adjust(name, **where):
        gru.adjust_quant_config(name, bitwidth=4, **where)

    for call in (gru.get_quant_config, adjust):
        with pytest.raises(ConfigError, match=r"did you mean 'gate\.z_out'"):
            call("gate.zout")
        with pytest.raises(QuantGRUError, match=r"0\.\.1.*2"):
            call("x", layer=2)
        with pytest.raises(QuantGRUError, match="layer"):
            call("x", layer=-1)
        with pytest.raises(QuantGRUError, match="bidirectional"):
            call("x", reverse=True)
        with pytest.raises(ConfigError, match=r"matmul\.Rh"):
            call("op.Rh_add_br")


# --- adjusting


@pytest.mark.parametrize("name", ["x", "h", "z_pre", "z_out", "g_out"])
@pytest.mark.parametrize("width", [1, 5, 14, 32])
@pytest.mark.parametrize("config", ["pot8", "pot8-symmetric"])
def test_a_width_keeps_the_real_range(config, width, name):
    gru = quantized(config)
    before = gru.get_quant_config(name)
    gru.adjust_quant_config(name, bitwidth=width)
    after = gru.get_quant_config(name)
    assert after["bitwidth"] == width
    assert after["exp2_inv"] == before["exp2_inv"] + width - 8
    assert after["scale"] == 2.0 ** -after["exp2_inv"]
    lo, hi = (
        (0, 2**width - 1) if after["is_unsigned"] else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    )
    assert after["zero_point"] == min(max(round(before["zero_point"] * 2.0 ** (width - 8)), lo), hi)
    for field in ("is_symmetric", "is_unsigned"):
        assert after[field] == before[field]
    assert gru.config[name].bitwidth == width
    assert gru(seeded(3, 2, C))[0].isfinite().all()


def test_a_width_of_free_scales_keeps_the_real_range():
    gru = quantized("free8")
    for name in ("x", "h", "z_pre", "g_out", "z_out", "new_contrib"):
        before = gru.get_quant_config(name)
        gru.adjust_quant_config(name, bitwidth=16)
        after = gru.get_quant_config(name)
        for codes in ((-128, -32768), (127, 32767)):
            if before["is_unsigned"]:
                codes = (codes[0] + 128, codes[1] + 32768)
            old, new = (
                entry["scale"] * (code - entry["zero_point"])
                for code, entry in zip(codes, (before, after), strict=True)
            )
            assert new == pytest.approx(old, abs=1.01 * before["scale"]), name


def test_more_bits_are_closer_to_float():
    x = seeded(8, 4, C)
    gru = quantized(method="minmax")
    gru.use_quantization = False
    real = gru(x)[0]
    gru.use_quantization = True
    errors = []
    for width in (6, 8, 12, 16):
        for name in gru.config.operators:
            gru.adjust_quant_config(name, bitwidth=width)
        errors.append((gru(x)[0] - real).square().mean().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[1]


def test_a_weight_s_width_follows_the_weight():
    gru = quantized()
    before = gru.get_quant_config("W")
    gru.adjust_quant_config("W", bitwidth=4)
    after = gru.get_quant_config("W")
    assert all(0 < b - a <= 6 for a, b in zip(after["exp2_inv"], before["exp2_inv"], strict=True))
    codes = gru.trace_codes(seeded(2, 1, C))["weight.W_l0"]
    assert -8 <= codes.min()
    assert codes.max() <= 7


def test_symmetry_and_signedness():
    gru = quantized()
    gru.adjust_quant_config("x", is_symmetric=True)
    found = gru.get_quant_config("x")
    assert (found["zero_point"], found["is_symmetric"]) == (0, True)
    gru.adjust_quant_config("x", is_symmetric=False)
    assert gru.get_quant_config("x")["is_symmetric"] is False
    gru.adjust_quant_config("x", is_unsigned=True)
    found = gru.get_quant_config("x")
    assert found["is_unsigned"] is True
    assert 0 < found["zero_point"] < 255
    assert gru.trace_codes(seeded(2, 2, C))["input.x_l0"].dtype == torch.uint8
    gru.adjust_quant_config("z_out", is_unsigned=False)
    assert gru.get_quant_config("z_out")["zero_point"] == -128
    gru.adjust_quant_config("z_out", is_symmetric=True)
    found = gru.get_quant_config("z_out")
    assert (found["zero_point"], found["exp2_inv"]) == (0, 7)
    assert gru(seeded(3, 2, C))[0].isfinite().all()


@pytest.mark.parametrize("config", ["pot8", "free8"])
def test_switching_symmetry_covers_the_old_range(config):
    gru = quantized(config)
    before = gru.get_quant_config("Wx")
    low = before["scale"] * (-128 - before["zero_point"])
    high = before["scale"] * (127 - before["zero_point"])
    gru.adjust_quant_config("Wx", is_symmetric=True)
    after = gru.get_quant_config("Wx")
    assert after["scale"] * -128.5 <= low
    assert after["scale"] * 127.5 >= high
    if config == "pot8":
        assert after["exp2_inv"] in (before["exp2_inv"], before["exp2_inv"] - 1)


def test_scales_and_zero_points_by_hand():
    gru = quantized()
    x = seeded(3, 2, C)
    gru.adjust_quant_config("x", scale=0.0625)
    assert gru.get_quant_config("x")["exp2_inv"] == 4
    gru.adjust_quant_config("x", exp2_inv=3)
    assert gru.get_quant_config("x")["scale"] == 0.125
    gru.adjust_quant_config("x", zero_point=17)
    codes = gru.trace_codes(x)["input.x_l0"]
    same(codes, (torch.round(x / 0.125) + 17).clamp(-128, 127).to(torch.int8))
    gru.adjust_quant_config("x", exp2_inv=-2)
    assert gru.get_quant_config("x")["scale"] == 4.0
    gru.adjust_quant_config("x", bitwidth=10, exp2_inv=6, zero_point=-300)
    found = gru.get_quant_config("x")
    assert (found["bitwidth"], found["exp2_inv"], found["zero_point"]) == (10, 6, -300)
    gru.adjust_quant_config("x", scale=2.0**-7, exp2_inv=7)
    free = quantized("free8")
    free.adjust_quant_config("z_pre", scale=0.03)
    assert free.get_quant_config("z_pre")["scale"] == pytest.approx(0.03)


@pytest.mark.filterwarnings("ignore:the scale of")
def test_scale_of_a_sigmoid_is_one_over_an_integer():
    gru = quantized("free8")
    gru.adjust_quant_config("z_out", scale=0.0031)
    assert gru.get_quant_config("z_out")["scale"] == pytest.approx(1 / 323, rel=1e-6)
    gru.adjust_quant_config("r_out", scale=5.0)
    assert gru.get_quant_config("r_out")["scale"] == 1.0


def test_weight_scales_by_hand_are_pinned():
    gru = quantized()
    gru.adjust_quant_config("W", scale=2.0**-5)
    assert gru.get_quant_config("W")["exp2_inv"] == [5] * 3 * H
    with torch.no_grad():
        gru.weight_ih_l0.mul_(8)
    assert gru.get_quant_config("W")["exp2_inv"] == [5] * 3 * H
    gru.adjust_quant_config("W", bitwidth=10)
    assert gru.get_quant_config("W")["exp2_inv"] == [7] * 3 * H
    each = [2.0**-i for i in range(3 * H)]
    gru.adjust_quant_config("R", scale=each)
    assert gru.get_quant_config("R")["scale"] == each
    # in the order of nn.GRU's rows; the codes have the update gate first
    codes = gru.trace_codes(seeded(1, 1, C))["weight.R_l0"]
    expected = torch.round(gru.weight_hh_l0.detach() / torch.tensor(each)[:, None])
    reset, update, candidate = expected.clamp(-128, 127).chunk(3)
    same(codes, torch.cat((update, reset, candidate)).to(torch.int8))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("x", {"bitwidth": 0}, "1 to 32"),
        ("x", {"bitwidth": 33}, "1 to 32"),
        ("x", {"bitwidth": 8.5}, "integer"),
        ("x", {"scale": 0.3}, "power of two"),
        ("x", {"scale": 0.0}, "positive"),
        ("x", {"scale": nan}, "positive"),
        ("x", {"scale": "small"}, "number"),
        ("x", {"scale": [0.5, 0.5]}, "number"),
        ("x", {"scale": 0.5, "exp2_inv": 3}, "agree"),
        ("x", {"exp2_inv": 2.0}, "integer"),
        ("x", {"exp2_inv": 1000}, r"-127\.\.126"),
        ("x", {"zero_point": 128}, r"\[-128, 127\]"),
        ("x", {"zero_point": 1.5}, "integer"),
        ("x", {"is_symmetric": "yes"}, "is_symmetric"),
        ("x", {"is_symmetric": True, "zero_point": 3}, "symmetric"),
        ("z_out", {"zero_point": -1}, r"\[0, 255\]"),
        ("W", {"is_symmetric": False}, "symmetric"),
        ("W", {"is_unsigned": True}, "unsigned"),
        ("W", {"zero_point": 1}, "symmetric"),
        ("W", {"scale": [0.5] * 4}, "18 scales"),
        ("W", {"scale": 0.3}, "power of two"),
        ("W", {"scale": -1.0}, "positive"),
    ],
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, dict) else None,
)
def test_adjustments_that_break_a_rule_change_nothing(name, change, words):
    gru = quantized(**DEEP)
    x = seeded(3, 2, C)
    before, config, expected = everything(gru), gru.config, gru(x)[0]
    with pytest.raises(ConfigError, match=words) as error:
        gru.adjust_quant_config(name, **change)
    full = {"x": "input.x", "z_out": "gate.z_out", "W": "weight.W"}[name]
    assert full in str(error.value)
    assert everything(gru) == before
    assert gru.config == config
    same(gru(x)[0], expected)


def test_adjusting_is_all_or_nothing_across_layers():
    """A zero point that fits one layer's width and not the other's."""
    gru = quantized(num_layers=2)
    gru.adjust_quant_config("x", bitwidth=12, layer=0)
    before = everything(gru)
    with pytest.raises(ConfigError):
        gru.adjust_quant_config("x", zero_point=1000)
    assert everything(gru) == before


@pytest.mark.parametrize(
    ("layer", "reverse", "expected"),
    [
        (None, None, {(0, False), (0, True), (1, False), (1, True)}),
        (1, None, {(1, False), (1, True)}),
        (None, True, {(0, True), (1, True)}),
        (0, False, {(0, False)}),
    ],
)
def test_adjusting_some_layers_and_directions(layer, reverse, expected):
    gru = quantized(**DEEP)
    gru.adjust_quant_config("z_pre", bitwidth=5, layer=layer, reverse=reverse)
    found = {
        (n, d)
        for n in (0, 1)
        for d in (False, True)
        if gru.get_quant_config("z_pre", n, d)["bitwidth"] == 5
    }
    assert found == expected
    new = QuantGRU(C, H, **DEEP)
    new.load_state_dict(gru.state_dict())
    assert everything(new) == everything(gru)
    x = seeded(3, 2, C)
    same(new(x)[0], gru(x)[0])
    same(gru.freeze()(x)[0], gru(x)[0])


def test_adjusting_before_calibration():
    gru, other = fresh(), fresh(QuantConfig.int8().replace("z_out", bitwidth=14))
    gru.adjust_quant_config("z_out", bitwidth=14)
    assert gru.get_quant_config("z_out")["bitwidth"] == 14
    for change in ({"scale": 0.5}, {"exp2_inv": 1}, {"zero_point": 0}):
        with pytest.raises(ConfigError, match="calibrate"):
            gru.adjust_quant_config("z_out", **change)
    with pytest.raises(ConfigError):
        gru.adjust_quant_config("z_out", bitwidth=40)
    for each in (gru, other):
        each.calibrate(seeded(6, 3, C))
    assert finalized(gru) == finalized(other)


def test_adjusting_one_layer_before_calibration_is_an_error():
    gru = fresh(num_layers=2)
    with pytest.raises(ConfigError, match="calibrate"):
        gru.adjust_quant_config("x", bitwidth=4, layer=1)


def test_adjusting_a_fused_product():
    gru = quantized("pot8-fused")
    for change in ({"bitwidth": 8}, {"scale": 0.5}, {"is_symmetric": True}):
        with pytest.raises(ConfigError, match=r"op\.rRh"):
            gru.adjust_quant_config("rRh", **change)
    assert gru.get_quant_config("rRh")["bitwidth"] is None


def test_adjusting_keeps_tables_of_other_operators_and_rebuilds_its_own():
    gru = quantized("pot8")
    x = seeded(6, 3, C)
    before = gru.trace_codes(x)
    gru.adjust_quant_config("g_pre", bitwidth=10)
    after = gru.trace_codes(x)
    same(after["gate.z_out_l0"][0], before["gate.z_out_l0"][0])
    q = gru.get_quant_config("g_pre")
    out = gru.get_quant_config("g_out")
    real = torch.tanh((after["gate.g_pre_l0"].double() - q["zero_point"]) * q["scale"])
    codes = torch.round(real / out["scale"]) + out["zero_point"]
    assert torch.equal(codes.clamp(-128, 127), after["gate.g_out_l0"].double())


# --- the parameter file


def adjusted(**options):
    gru = quantized(**options)
    gru.adjust_quant_config("z_out", bitwidth=14)
    gru.adjust_quant_config("W", exp2_inv=6)
    if gru.num_layers > 1:
        gru.adjust_quant_config("g_pre", bitwidth=10, layer=1)
        gru.adjust_quant_config("R", bitwidth=5, layer=0)
    return gru


@pytest.mark.parametrize("options", [{}, DEEP, {"bias": False}], ids=str)
def test_export_and_load(options, tmp_path):
    gru = adjusted(**options)
    path = tmp_path / "quant_params.json"
    gru.export_quant_params(path)
    new = QuantGRU(C, H, **options)
    new.load_state_dict(float_state_dict(gru))
    new.calibrate(seeded(2, 2, C))  # statistics are replaced
    new.load_quant_params(str(path))
    assert new.is_calibrated()
    assert new.use_quantization is False
    assert new.config == gru.config
    assert everything(new) == everything(gru)
    x = seeded(4, 2, C)
    expected = gru.trace_codes(x)
    for name, codes in new.trace_codes(x).items():
        same(codes, expected[name])
    again = tmp_path / "again.json"
    new.export_quant_params(again)
    assert again.read_bytes() == path.read_bytes()


def test_loading_replaces_everything(tmp_path):
    gru, new = quantized(), quantized("free8-fused")
    gru.export_quant_params(tmp_path / "p.json")
    new(seeded(3, 2, C))
    new.load_quant_params(tmp_path / "p.json")
    same(new(seeded(3, 2, C))[0], gru(seeded(3, 2, C))[0])


def test_the_file_holds_no_weights_and_is_versioned_json(tmp_path):
    gru = quantized()
    gru.export_quant_params(tmp_path / "p.json")
    with torch.no_grad():
        gru.weight_ih_l0.neg_()
    gru.export_quant_params(tmp_path / "q.json")
    assert (tmp_path / "p.json").read_bytes() == (tmp_path / "q.json").read_bytes()
    document = json.loads((tmp_path / "p.json").read_text())
    assert document["format"] == "quant-gru-params"
    assert document["version"] == 2
    assert QuantConfig.from_dict(document["config"]) == gru.config


def test_export_to_a_place_that_does_not_exist(tmp_path):
    with pytest.raises(QuantGRUError, match="nowhere"):
        quantized().export_quant_params(tmp_path / "nowhere" / "p.json")


def operator(name, **fields):
    return lambda d: d["cells"][0]["operators"][name].update(fields)


def table(**fields):
    return lambda d: d["cells"][0]["tables"]["gate.z_out"].update(fields)


def cut_table(d):
    for field in ("bounds", "coefficients"):
        del d["cells"][0]["tables"]["gate.z_out"][field][-30:]


def without(*path):
    def remove(d):
        for key in path[:-1]:
            d = d[key]
        del d[path[-1]]

    return remove


def add(*path):
    def insert(d):
        for key in path[:-1]:
            d = d[key]
        d[path[-1]] = {"bitwidth": 8}

    return insert


OPS = ("cells", 0, "operators")
CORRUPTIONS = {
    "unknown version": (lambda d: d.update(version=3), "version.*3"),
    "version text": (lambda d: d.update(version="1"), "version"),
    "no version": (without("version"), "version"),
    "other format": (lambda d: d.update(format="onnx"), "format.*onnx"),
    "unknown key": (lambda d: d.update(colour="red"), "colour"),
    "unknown key of an operator": (operator("input.x", colour="red"), "colour"),
    "unknown key of a cell": (add("cells", 0, "weights"), "weights"),
    "no gru": (without("gru"), "gru"),
    "no config": (without("config"), "config"),
    "no cells": (lambda d: d.update(cells=[]), "cells"),
    "config unknown field": (add("config", "GRU_config", "operator_config", "foo"), "foo"),
    "missing operator": (without(*OPS, "gate.r_pre"), r"gate\.r_pre"),
    "unknown operator": (add(*OPS, "gate.q_pre"), r"gate\.q_pre"),
    "missing table": (without("cells", 0, "tables", "gate.r_out"), r"gate\.r_out"),
    "unknown table": (
        lambda d: d["cells"][0]["tables"].update(foo=d["cells"][0]["tables"]["gate.z_out"]),
        "foo",
    ),
    "wrong hidden size": (lambda d: d["gru"].update(hidden_size=7), "hidden_size=7"),
    "wrong input size": (lambda d: d["gru"].update(input_size=4), "input_mean of 4 features"),
    "no bias": (lambda d: d["gru"].update(bias=False), "bias"),
    "other layers": (lambda d: d["gru"].update(num_layers=2), "cells"),
    "scale NaN": (operator("input.x", scale=nan), "finite|NaN"),
    "scale 0": (operator("input.x", scale=0.0), r"input\.x"),
    "scale negative": (operator("input.x", scale=-0.5), r"input\.x"),
    "scale no power of two": (operator("input.x", scale=0.75, exp2_inv=None), "power of two"),
    "scale no float32": (operator("input.x", scale=0.3, exp2_inv=None), "float32"),
    "scale text": (operator("input.x", scale="0.5"), "scale"),
    "scale null": (operator("input.x", scale=None), r"input\.x"),
    "scale list": (operator("input.x", scale=[0.5]), r"input\.x"),
    "scale and exponent disagree": (operator("gate.z_pre", exp2_inv=30), r"gate\.z_pre"),
    "zero point outside": (operator("input.x", zero_point=300), r"input\.x"),
    "zero point 1.5": (operator("input.x", zero_point=1.5), "zero_point"),
    "zero point null": (operator("input.x", zero_point=None), r"input\.x"),
    "zero point of a symmetric one": (operator("input.x", is_symmetric=True), "symmetric"),
    "width 40": (operator("input.x", bitwidth=40), "bitwidth"),
    "width true": (operator("input.x", bitwidth=True), "bitwidth"),
    "width null": (operator("input.x", bitwidth=None), r"input\.x"),
    "weight width null": (operator("weight.R", bitwidth=None), r"\(operator 'weight\.R', "),
    "weight asymmetric": (operator("weight.W", is_symmetric=False), r"weight\.W"),
    "weight zero point": (operator("weight.W", zero_point=5), r"weight\.W"),
    "weight scales too few": (operator("weight.W", scale=[0.5, 0.5]), r"weight\.W"),
    "weight scale NaN": (operator("weight.W", scale=[nan] * 18), "finite|NaN"),
    "weight granularity": (operator("weight.W", granularity="row"), "granularity"),
    "table of nothing": (table(bounds=[], coefficients=[]), r"gate\.z_out"),
    "table of words": (table(bounds=["a"]), "bounds"),
    "table of reals": (table(coefficients=[[0.5]] * 256), "coefficients"),
    "table descending": (table(bounds=list(range(127, -129, -1))), r"gate\.z_out"),
    "table too short": (cut_table, r"gate\.z_out"),
    "table of one segment": (
        table(bounds=[-128], coefficients=[[1, 2]], segment_shift=0),
        r"gate\.z_out",
    ),
    "table of huge coefficients": (table(coefficients=[[10**30]] * 256), r"gate\.z_out"),
    "table of huge bounds": (table(bounds=[10**30 + i for i in range(256)]), r"gate\.z_out"),
    "table with a huge end": (table(last=10**30), r"gate\.z_out"),
    "table with a zero point": (table(zero_point=3), r"gate\.z_out"),
    "table of other codes": (table(hi=300), r"gate\.z_out"),
    "table that overflows": (
        table(coefficients=[[2**61, 2**61, 2**61]] * 256, shift=62),
        r"gate\.z_out",
    ),
    "table null": (lambda d: d["cells"][0]["tables"].update({"gate.z_out": None}), "z_out"),
    "cells no list": (lambda d: d.update(cells={}), "cells"),
    "not an object": (lambda d: [d], "format|list"),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_corruptions_are_named_and_change_nothing(corruption, tmp_path):
    corrupt, words = CORRUPTIONS[corruption]
    gru = quantized()
    path = tmp_path / "p.json"
    gru.export_quant_params(path)
    document = json.loads(path.read_text())
    replaced = corrupt(document)
    path.write_text(json.dumps(replaced if isinstance(replaced, list) else document))
    target = quantized("free8")
    before, config, x = everything(target), target.config, seeded(3, 2, C)
    expected = target(x)[0]
    with pytest.raises(ParameterError, match=rf"(?s){words}") as error:
        target.load_quant_params(path)
    assert "p.json" in str(error.value)
    assert str(error.value).count("(operator ") <= 1
    assert everything(target) == before
    assert target.config == config
    assert target.use_quantization
    same(target(x)[0], expected)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"null", b'{"format": "quant-gru-params", "format": "a"}'],
    ids=["empty", "brace", "not UTF-8", "null", "a key twice"],
)
def test_files_that_are_no_parameter_file(data, tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(data)
    with pytest.raises(ParameterError, match=r"p\.json"):
        quantized().load_quant_params(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_truncated_files(share, tmp_path):
    path = tmp_path / "p.json"
    gru = quantized()
    gru.export_quant_params(path)
    data = path.read_bytes().rstrip()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ParameterError, match=r"p\.json"):
        gru.load_quant_params(path)


def test_missing_file_and_directory(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ParameterError, match=path.name):
            quantized().load_quant_params(path)


def test_parameters_of_another_gru_are_refused_with_both_shapes(tmp_path):
    quantized(num_layers=2).export_quant_params(tmp_path / "p.json")
    with pytest.raises(ParameterError, match=r"num_layers=1.*num_layers=2"):
        quantized().load_quant_params(tmp_path / "p.json")


@pytest.mark.filterwarnings("ignore:the scale of")
def test_imported_sigmoid_scales_become_one_over_an_integer(tmp_path):
    gru = quantized("free8")
    path = tmp_path / "p.json"
    gru.export_quant_params(path)
    document = json.loads(path.read_text())
    scale = float(torch.tensor(0.0031))
    document["cells"][0]["operators"]["gate.z_out"].update(scale=scale)
    path.write_text(json.dumps(document))
    gru.load_quant_params(path)
    assert gru.get_quant_config("z_out")["scale"] == float(torch.tensor(1 / 323))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("g_out", {"exp2_inv": 126}, r"64 bits.*'gate\.g_out'"),
        ("z_out", {"exp2_inv": 46}, r"at least 2\^-40.*gate\.z_out"),
        ("x", {"scale": 10**400}, "scale to be a number"),
    ],
)
def test_scales_that_no_table_has_are_refused(name, change, words):
    gru = quantized(QuantConfig.int16())
    before = everything(gru)
    with pytest.raises(ConfigError, match=words):
        gru.adjust_quant_config(name, **change)
    assert everything(gru) == before


def test_what_is_no_path():
    for path in ("a\0b", None, 0, b"p.json"):
        with pytest.raises(ParameterError, match="Expected the path of a file"):
            quantized().load_quant_params(path)


# --- checkpoints


def bytes_of(text):
    return torch.frombuffer(
        bytearray(text if isinstance(text, bytes) else text.encode()), dtype=torch.uint8
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "[" * 100_000, "moderate size"),
        (lambda text: text.encode("utf-16"), "UTF-8"),
        (lambda text: text[:-1] + ', "use_quantization": false}', "'use_quantization' twice"),
        (lambda text: text.replace('"use_quantization":true', '"use_quantization":NaN'), "finite"),
        (
            lambda text: text.replace('"use_quantization":true', '"use_quantization":"false"'),
            "true or false, got 'false'",
        ),
        (lambda text: "[1]", "Expected an object"),
        (lambda text: text[:-20], "'quantization'"),
    ],
)
def test_documents_of_checkpoints_are_as_strict_as_files(change, words):
    state = quantized().state_dict()
    text = bytes(state["quantization"].numpy()).decode()
    assert '"use_quantization":true' in text
    gru = quantized("free8")
    config, scale = gru.config, gru.get_quant_config("x")["scale"]
    with pytest.raises(RuntimeError, match=words):
        gru.load_state_dict({**state, "quantization": bytes_of(change(text))})
    assert gru.config == config
    assert gru.use_quantization
    assert gru.get_quant_config("x")["scale"] == scale


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, lambda v: v.to("meta"), lambda v: [1]])
def test_documents_of_other_kinds_are_refused(change):
    state = quantized().state_dict()
    with pytest.raises(RuntimeError, match="1-D uint8 tensor"):
        fresh().load_state_dict({**state, "quantization": change(state["quantization"])})


@pytest.mark.parametrize(
    "change",
    [
        lambda v: [1],
        lambda v: v.to(torch.complex64),
        lambda v: v.abs().to(torch.uint64),
        torch.Tensor.to_sparse,
        lambda v: v.to("meta"),
        lambda v: v > 0,
    ],
)
def test_frozen_weights_of_other_kinds_are_refused(change):
    state = quantized().freeze().state_dict()
    with pytest.raises(ParameterError, match=r"Expected integers of shape .* at key 'W_l0', got"):
        FrozenQuantGRU.from_state_dict({**state, "W_l0": change(state["W_l0"])})


@pytest.mark.parametrize("count", [1 << 32, 1 << 45])
def test_small_checkpoints_cannot_claim_gigabytes(count):
    """An expanded tensor takes a few bytes in a file, and any number once it is copied."""
    claimed = torch.zeros(1, dtype=torch.uint8).expand(count)
    with pytest.raises(RuntimeError, match=r"1-D uint8 tensor.*'quantization'"):
        fresh().load_state_dict({**quantized().state_dict(), "quantization": claimed})
    state = quantized().freeze().state_dict()
    with pytest.raises(ParameterError, match=r"1-D uint8 tensor.*'plan'"):
        FrozenQuantGRU.from_state_dict({**state, "plan": claimed})
    for name in ("W_l0", "R_l0", "Bw_l0"):
        expanded = state[name].view(-1)[:1].clone().expand(state[name].shape)
        with pytest.raises(ParameterError, match=rf"Expected integers of shape .* at key '{name}'"):
            FrozenQuantGRU.from_state_dict({**state, name: expanded})


def test_a_frozen_document_tells_of_batch_first_with_true_or_false():
    state = quantized().freeze().state_dict()
    raw = bytes(state["plan"].numpy())
    assert raw.count(b'"batch_first":false') == 1
    raw = raw.replace(b'"batch_first":false', b'"batch_first":1')
    changed = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    with pytest.raises(ParameterError, match="'batch_first' to be true or false, got 1"):
        FrozenQuantGRU.from_state_dict({**state, "plan": changed})


def test_a_checkpoint_without_scales_leaves_quantization_alone():
    x, larger = seeded(4, 2, C), fresh()
    with torch.no_grad():
        larger.weight_hh_l0.mul_(3)
    for source in (nn.GRU(C, H), larger):
        # configuration, switch and scales
        gru = quantized("free8-fused")
        with pytest.warns(QuantGRUWarning, match="other weights were loaded.* with scales"):
            gru.load_state_dict(source.state_dict(), strict=True)
        assert gru.use_quantization
        assert gru.config == free(fused(QuantConfig.int8()))
        assert gru.is_calibrated()
        gru(x)
        # collected statistics
        gru = fresh("int16", use_quantization=True)
        gru.calibration_method = "minmax"
        other = copy.deepcopy(gru)
        gru.calibrate(x)
        other.calibrate(x)
        with pytest.warns(QuantGRUWarning, match="into a QuantGRU with statistics"):
            gru.load_state_dict(source.state_dict(), strict=True)
        assert gru.use_quantization
        with pytest.warns(QuantGRUWarning, match="into a QuantGRU with statistics"):
            other.load_state_dict(source.state_dict(), strict=True)
        assert finalized(gru) == finalized(other)
        assert gru.calibration_method == "minmax"
        assert gru.config == QuantConfig.int16()


def test_state_dict_of_an_uncalibrated_module_has_the_keys_of_nn_gru():
    gru = fresh(**DEEP, use_quantization=True)
    plain = nn.GRU(C, H, **DEEP)
    assert list(gru.state_dict()) == list(plain.state_dict())
    gru.calibrate(seeded(4, 2, C))
    assert list(gru.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(gru.state_dict(), strict=True)


# --- several processes

BATCHES = [3.0 * seeded(6, 4, C, seed=i) for i in range(2)]


def worker(rank, folder):
    with joined(rank, folder):
        result = {}
        for method in METHODS:
            gru = fresh(bidirectional=True)
            gru.calibration_method = method
            for batch in BATCHES:
                gru.calibrate(batch.chunk(2, dim=1)[rank])
            result[method] = finalized(gru)
        # a rank that saw nothing takes part
        gru = fresh(bidirectional=True)
        if rank == 1:
            gru.calibrate(BATCHES[0])
        result["one rank"] = finalized(gru)
        # without `sync` each is on its own
        gru = fresh(bidirectional=True)
        gru.calibration_method = "minmax"
        gru.calibrate((1 + 9 * rank) * BATCHES[0])
        gru.finalize_calibration(sync=False)
        result["alone"] = everything(gru)
        # a NaN on one rank is an error on both
        gru = fresh()
        x = BATCHES[0].clone()
        x[0, 0, 0] = nan if rank else 0.0
        gru.calibrate(x)
        with pytest.raises(CalibrationError, match="finite"):
            gru.finalize_calibration()
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(result, file)


@pytest.mark.slow
@NEEDS_GLOO
def test_two_processes_have_the_scales_of_one(tmp_path):
    run_two(worker, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for method in METHODS:
        gru = fresh(bidirectional=True)
        gru.calibration_method = method
        for batch in BATCHES:
            gru.calibrate(batch)
        expected = json.loads(json.dumps(finalized(gru)))
        for rank in ranks:
            assert rank[method] == expected, method
    gru = fresh(bidirectional=True)
    gru.calibrate(BATCHES[0])
    expected = json.loads(json.dumps(finalized(gru)))
    assert ranks[0]["one rank"] == ranks[1]["one rank"] == expected
    scales = [rank["alone"][0]["input.x"]["scale"] for rank in ranks]
    assert scales[1] > 4 * scales[0]
