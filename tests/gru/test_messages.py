"""Messages that name the way out."""

import re

import pytest
import torch
from gru_helpers import C, H, quantized

from quant_gru import CalibrationError, ConfigError, CustomGRU, QuantConfig, QuantGRU, QuantGRUError


@pytest.mark.parametrize(
    "mean",
    [lambda a, b: (a + b) / 2, lambda a, b: a // 2 + b // 2],
    ids=["cast", "uint8"],
)
def test_averaged_state_dicts_name_float_state_dict(mean):
    first, second = quantized(), quantized()
    averaged = {
        name: mean(a, b) if name == "quantization" else (a + b) / 2
        for (name, a), b in zip(
            first.state_dict().items(), second.state_dict().values(), strict=True
        )
    }
    with pytest.raises(RuntimeError, match=r"'quantization'.*float_state_dict"):
        first.load_state_dict(averaged)


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("use", ["stream", "freeze", "forward_integer", "forward"])
def test_an_uncalibrated_gru_is_told_what_helps(use, on):
    gru = QuantGRU(C, H, use_quantization=on or use == "forward")
    call = getattr(gru, use)
    with pytest.raises(CalibrationError, match=r"call calibrate\(data\) first") as error:
        call(*([torch.zeros(3, 1, C)] if use.startswith("forward") else []))
    assert ("use_quantization = False" in str(error.value)) is (use == "forward")


# --- configuration files


@pytest.mark.parametrize(
    "text",
    [
        '{\n  // all of it\n  "GRU_config": {}\n}',
        '{\n  "GRU_config": {} // all of it\n}',
        '// all of it\n{"GRU_config": {}}',
        '{"GRU_config": {"default_config": {}, // none\n "operator_config": {}}}',
        '{"GRU_config": /* none */ {}}',
        '{"GRU_config": {}} # none',
    ],
    ids=range(6),
)
def test_comments_in_a_file(tmp_path, text):
    path = tmp_path / "widths.json"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=r"line \d.*JSON has no comments.*\"comment\".*quant-gru config --write"
    ):
        QuantConfig.from_json(path)


def test_other_errors_do_not_speak_of_comments(tmp_path):
    path = tmp_path / "widths.json"
    path.write_text('{"comment": "http://example.org" "GRU_config": {}}')
    with pytest.raises(ConfigError, match=r"line 1") as error:
        QuantConfig.from_json(path)
    assert "no comments" not in str(error.value)


def test_a_missing_file_names_the_command():
    path = "pytorch/config/gru_quant_bitwidth_config.json"
    text = rf"{re.escape(path)}.*quant-gru config --write.*default_config_path\(\)"
    with pytest.raises(ConfigError, match=text):
        QuantGRU(C, H).load_bitwidth_config(path)


# --- the constructor


def test_proj_size():
    assert QuantGRU(C, H, proj_size=0)(torch.zeros(3, 1, C))[0].shape == (3, 1, H)
    with pytest.raises(QuantGRUError, match=r"proj_size to be 0, got 3: .*only LSTM.*Linear"):
        QuantGRU(C, H, proj_size=3)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("make", [QuantGRU, CustomGRU])
def test_bidirectional_in_the_place_of_dropout(make, bidirectional):
    with pytest.raises(
        QuantGRUError,
        match=rf"dropout to be a number in \[0, 1\], got {bidirectional}.*batch_first, dropout, "
        r"bidirectional.*bidirectional=",
    ):
        make(C, H, 1, True, True, bidirectional)


@pytest.mark.parametrize("dropout", [-0.1, 1.5, "0.1", None])
def test_other_values_of_dropout(dropout):
    with pytest.raises(QuantGRUError, match=r"dropout to be a number in \[0, 1\]"):
        QuantGRU(C, H, 2, dropout=dropout)
