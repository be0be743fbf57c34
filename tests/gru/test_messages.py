"""Messages that name the way out."""

import re

import numpy as np
import pytest
import torch
from gru_helpers import C, H, quantized

from kept import kept
from quant_gru import (
    CalibrationError,
    ConfigError,
    CustomGRU,
    FrozenQuantGRU,
    ParameterError,
    QuantConfig,
    QuantGRU,
    QuantGRUCell,
    QuantGRUError,
    QuantGRUWarning,
    calibrate_model,
    compare,
    convert_model,
    freeze_model,
    load_frozen,
    operator_gain,
    report,
)


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


# --- configurations


GIVEN = ["preset", "path", "text", "dict", "object"]


@pytest.fixture
def configs(tmp_path):
    """w8a16 in all forms that users have."""
    path = tmp_path / "widths.json"
    config = QuantConfig.w8a16()
    config.to_json(path)
    found = ["w8a16", path, str(path), config.to_dict(), config]
    return dict(zip(GIVEN, found, strict=True))


@pytest.mark.parametrize("form", GIVEN)
def test_a_configuration_in_any_form(form, configs):
    given, expected = configs[form], QuantConfig.w8a16()
    cell = torch.nn.GRUCell(C, H)
    haste = QuantGRU(C, H).to_haste()
    loaded = QuantGRU(C, H)
    loaded.load_bitwidth_config(given)
    for gru in (
        QuantGRU(C, H, config=given),
        QuantGRUCell(C, H, config=given),
        QuantGRUCell.of(cell, given),
        CustomGRU(C, H, quant_type=given),
        QuantGRU.from_haste(haste, config=given),
        convert_model(torch.nn.GRU(C, H), given),
        loaded,
    ):
        assert gru.config == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("int8_wid", r"a preset \(int8_wide, int8, w8a16, int16\) or a file.*mean 'int8_wide'"),
        ("none/x.json", "Expected a file to exist"),
        (3, "a QuantConfig, a preset's name, a path or a dict with GRU_config, got int"),
        ({"bits": 8}, "GRU_config to be present"),
    ],
)
def test_what_is_no_configuration(given, message):
    for use in (
        lambda: QuantGRU(C, H, config=given),
        lambda: CustomGRU(C, H, quant_type=given),
        lambda: QuantGRU(C, H).load_bitwidth_config(given),
    ):
        with pytest.raises(ConfigError, match=message):
            use()


def test_files_of_the_other_kind_name_the_function(tmp_path):
    gru = quantized()
    gru.export_quant_params(tmp_path / "p.json")
    gru.config.to_json(tmp_path / "c.json")
    with pytest.raises(ConfigError, match=r"got a parameter file; use load_quant_params \(file"):
        QuantGRU(C, H).load_bitwidth_config(tmp_path / "p.json")
    with pytest.raises(ParameterError, match=r"configuration; use load_bitwidth_config"):
        gru.load_quant_params(tmp_path / "c.json")


def test_the_configuration_is_not_assigned():
    with pytest.raises(ConfigError, match=r"load_bitwidth_config\(config\)"):
        QuantGRU(C, H).config = QuantConfig.int16()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("use_quantisation", "use_quantization"),
        ("use_quantizaton", "use_quantization"),
        ("calibration_methd", "calibration_method"),
        ("zone_out", "zoneout"),
        ("percentile_val", "percentile_value"),
    ],
)
@pytest.mark.parametrize("make", [QuantGRU, QuantGRUCell])
def test_settings_of_nearly_the_name(make, name, nearest):
    gru = make(C, H)
    with pytest.warns(QuantGRUWarning, match=rf"no setting '{name}'; did you mean '{nearest}'"):
        setattr(gru, name, True)
    setattr(gru, name, False)  # said once


def test_other_attributes_are_free():
    gru = QuantGRU(C, H)
    gru.use_attention = gru.quantized = gru.calibration_data = True


# --- a calibrated GRU in float mode


@kept
def calibrated(**options):
    gru = QuantGRU(C, H, **options)
    gru.calibrate(torch.randn(9, 4, C))
    gru.finalize_calibration()
    return gru


@pytest.mark.parametrize("training", [True, False])
def test_a_calibrated_gru_that_runs_in_float_says_so(training):
    gru = calibrated().train(training)
    with pytest.warns(
        QuantGRUWarning, match=r"the GRU was calibrated, but use_quantization is False: .*set"
    ):
        gru(torch.randn(9, 4, C))
    gru(torch.randn(9, 4, C))


def test_a_calibrated_cell_that_runs_in_float_says_so():
    cell = QuantGRUCell(C, H)
    cell.calibrate(torch.randn(4, C))
    cell.finalize_calibration()
    with pytest.warns(QuantGRUWarning, match=r"the GRU was calibrated"):
        cell(torch.randn(4, C))


@pytest.mark.parametrize(
    "settle",
    [
        lambda gru: setattr(gru, "use_quantization", False),
        lambda gru: setattr(gru, "use_quantization", True),
        lambda gru: gru.freeze(),
        lambda gru: gru.reset_calibration() or setattr(gru, "calibrating", True),
        lambda gru: gru.load_state_dict(gru.state_dict()),
    ],
    ids=["off", "on", "used", "calibrating", "loaded"],
)
def test_what_is_meant_is_not_warned_of(settle):
    gru = calibrated()
    settle(gru)
    gru(torch.randn(9, 4, C))


def test_float_mode_that_was_chosen_before():
    gru = QuantGRU(C, H)
    gru.use_quantization = False
    gru.calibrate(torch.randn(9, 4, C))
    gru(torch.randn(9, 4, C))
    gru.finalize_calibration()
    gru(torch.randn(9, 4, C))


# --- the rest


def test_a_class_in_place_of_a_module():
    class Tagger(torch.nn.Module):
        pass

    for function in (convert_model, freeze_model):
        with pytest.raises(QuantGRUError, match=r"a module, got the class Tagger; pass Tagger\("):
            function(Tagger)
    with pytest.raises(QuantGRUError, match=r"a module, got the class Tagger"):
        calibrate_model(Tagger, [torch.zeros(1)])
    with pytest.raises(QuantGRUError, match="a module, got int"):
        convert_model(3)


def test_states_of_another_batch_name_the_layout():
    gru = quantized()
    with pytest.raises(QuantGRUError, match=r"\(batch_first=False: inputs are \(T, N, C\)\)"):
        gru(torch.zeros(3, 10, C), torch.zeros(1, 3, H))


def test_numpy_arrays_name_the_conversion():
    x = np.zeros((9, 4, C), np.float32)
    for call in (quantized(), QuantGRU(C, H).calibrate):
        with pytest.raises(QuantGRUError, match=r"ndarray; pass torch.from_numpy\("):
            call(x)


def test_words_for_gates():
    with pytest.raises(ConfigError, match=r"'update'; operators of this gate: gate.z_pre, gate.z"):
        QuantConfig().replace("update", bitwidth=8)


def test_a_file_of_torch_save_names_the_way(tmp_path):
    torch.save(quantized().freeze().state_dict(), tmp_path / "a.pt")
    with pytest.raises(ParameterError, match=r"from_state_dict\(torch.load\("):
        FrozenQuantGRU.load(tmp_path / "a.pt")


def test_arguments_of_nearly_the_name():
    with pytest.raises(TypeError, match=r"^adjust_quant_config\(\) got .*'bits'; .*'bitwidth'"):
        quantized().adjust_quant_config("z_pre", bits=12)


@pytest.mark.parametrize(
    ("make", "given", "meant"),
    [
        (QuantGRU, "quant_config", "config"),
        (QuantGRU, "qconfig", "config"),
        (QuantGRU, "quant_type", "config"),
        (QuantGRU, "bits", "config"),
        (QuantGRU, "batchfirst", "batch_first"),
        (QuantGRU, "num_layer", "num_layers"),
        (QuantGRUCell, "quant_config", "config"),
        (CustomGRU, "config", "quant_type"),
        (convert_model, "quant_config", "config"),
        (convert_model, "in_place", "inplace"),
    ],
)
def test_unknown_arguments_name_the_nearest(make, given, meant):
    sizes = (torch.nn.GRU(C, H),) if make is convert_model else (C, H)
    wanted = rf"^{make.__name__}\(\) got .* '{given}'; did you mean '{meant}'\?$"
    with pytest.raises(TypeError, match=wanted):
        make(*sizes, **{given: QuantConfig.int8()})


@pytest.mark.parametrize("config", [QuantConfig.int8(), "int8_wide"], ids=["object", "name"])
def test_a_configuration_in_the_place_of_num_layers(config):
    with pytest.raises(ConfigError, match=r"Expected num_layers to be an integer, .*config="):
        QuantGRU(C, H, config)


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"in a folder that exists, got folder '.*no/such'"):
        quantized().export_quant_params(tmp_path / "no" / "such" / "p.json")


@pytest.mark.parametrize(
    "use", [lambda gru: gru(torch.zeros(2, 1, C)), QuantGRU.freeze, QuantGRU.get_quant_config]
)
def test_a_missing_weight_is_named(use):
    gru = quantized()
    del gru.weight_hh_l0
    with pytest.raises(QuantGRUError, match="Expected weight_hh_l0 to be a tensor, got none"):
        use(gru)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", ["int{}", "w{}"])
def test_presets_of_few_bits_name_the_way(name, bits):
    with pytest.raises(ConfigError, match=rf"replace\('W', bitwidth={bits}\)"):
        QuantGRU(C, H, config=name.format(bits))


def test_state_dicts_of_the_other_form_name_the_way(tmp_path):
    gru = quantized()
    frozen = gru.freeze()
    with pytest.raises(RuntimeError, match=r"that of a frozen GRU; call quant_gru.load_frozen"):
        quantized().load_state_dict(frozen.state_dict())
    with pytest.raises(RuntimeError, match=r"floating point; load it .* before freeze_model"):
        frozen.load_state_dict(gru.state_dict())
    with pytest.raises(ParameterError, match=r"got str; pass torch.load\(file\)"):
        load_frozen(torch.nn.GRU(C, H), str(tmp_path / "frozen.pt"))


def test_arguments_in_another_order():
    with pytest.raises(QuantGRUError, match=r"Expected the float model first, got dict"):
        compare({"int8": quantized()}, torch.nn.GRU(C, H), [])


def test_tools_of_calibrated_models_name_the_way():
    model = torch.nn.Sequential(torch.nn.GRU(C, H))
    for tool in (operator_gain, report):
        with pytest.raises(QuantGRUError, match=r"none in Sequential; call convert_model and"):
            tool(model, [torch.zeros(3, 1, C)])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_export_of_torch_names_our_own(tmp_path):
    model = quantized().eval()
    with pytest.warns(QuantGRUWarning, match=r"call quant_gru.export_onnx"):
        with pytest.raises(torch.onnx.OnnxExporterError):
            torch.onnx.export(model, (torch.zeros(3, 1, C),), tmp_path / "x.onnx", verbose=False)


def test_attributes_of_torch_quantization_are_free():
    gru = QuantGRU(C, H)
    gru.qconfig = None
