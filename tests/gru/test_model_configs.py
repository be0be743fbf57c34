"""convert_model: configurations by name, subclasses, what stays in floating point."""

import copy

import pytest
import torch
from gru_helpers import C, H, Reaching, calibrated_alike, same, seeded
from torch import nn

from kept import kept
from quant_gru import (
    CalibrationError,
    ConfigError,
    QuantConfig,
    QuantGRU,
    QuantGRUCell,
    QuantGRUError,
    QuantGRUWarning,
    calibrate_model,
    convert_model,
)

INT8, INT16 = QuantConfig.int8(), QuantConfig.int16()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"low": nn.GRU(C, H), "high": nn.GRU(H, H)})
        self.head = nn.ModuleDict({"gru": nn.GRU(H, H)})

    def forward(self, x):
        low = self.encoder["low"](x)[0]
        return self.head["gru"](self.encoder["high"](low)[0])[0]


@pytest.mark.parametrize("name", ["int8", "int8_wide", "int16", "w8a16"])
def test_a_preset_by_name(name):
    assert convert_model(nn.GRU(C, H), name).config == getattr(QuantConfig, name)()


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_a_file(tmp_path, kind):
    path = tmp_path / "widths.json"
    QuantConfig.w8a16().to_json(path)
    model = convert_model(nn.GRU(C, H), kind(path))
    assert model.config.without_comments() == QuantConfig.w8a16().without_comments()


def test_the_contents_of_a_file():
    assert convert_model(nn.GRU(C, H), INT16.to_dict()).config == INT16


def test_names_and_patterns():
    model = convert_model(Model(), {"encoder.*": "int16", "head.gru": None})
    assert [model.encoder[name].config for name in ("low", "high")] == [INT16, INT16]
    assert type(model.head["gru"]) is nn.GRU


def test_a_name_comes_before_a_pattern_and_the_first_pattern_decides():
    chosen = {"*.l*": INT8, "encoder.*": INT16, "encoder.low": "w8a16", "*": "int8_wide"}
    model = convert_model(Model(), chosen)
    assert model.encoder["low"].config == QuantConfig.w8a16()
    assert model.encoder["high"].config == INT16
    assert model.head["gru"].config == QuantConfig.int8_wide()


def test_a_function():
    model = convert_model(Model(), lambda name: INT16 if name.endswith("low") else None)
    assert model.encoder["low"].config == INT16
    assert type(model.encoder["high"]) is nn.GRU


def test_the_root_by_name():
    assert convert_model(nn.GRU(C, H), {"": "int16"}).config == INT16
    assert convert_model(nn.GRU(C, H), {"*": "int16"}).config == INT16


def test_a_gru_of_two_names_is_found_by_either():
    model = nn.ModuleDict({"a": nn.GRU(C, H)})
    model["b"] = model["a"]
    assert convert_model(model, {"b": INT16})["a"].config == INT16


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("int9", "preset.*'int9'.*did you mean"),
        ("absent.json", "absent.json"),
        (8, "int"),
        ({"*": 8}, "int"),
        ({3: "int8"}, "3"),
        ({"encoder.*": "int8"}, r"none for 'head.gru'.*\"\*\": None"),
        ({"*": "int8", "decoder": None}, "'decoder'.*'encoder.low'"),
        (lambda name: 8, "int"),
        ({"GRU_config": {"widths": 3}}, "widths"),
    ],
)
def test_errors_change_nothing(config, text):
    model = Model()
    with pytest.raises(ConfigError, match=f"(?i){text}"):
        convert_model(model, config, inplace=True)
    assert not [m for m in model.modules() if isinstance(m, QuantGRU)]


# --- converted models


def test_another_configuration_is_applied_to_a_converted_model():
    model = convert_model(Model(), "int8")
    again = convert_model(model, {"encoder.*": "int16", "*": None})
    assert again.encoder["low"].config == INT16
    assert again.head["gru"].config == INT8
    assert model.encoder["low"].config == INT8
    convert_model(model, "int16", inplace=True)
    assert model.head["gru"].config == INT16


def test_a_calibrated_gru_keeps_its_configuration_and_is_named():
    model = calibrate_model(convert_model(Model(), "int8"), [seeded(5, 3, C)])
    model.head["gru"].reset_calibration()
    with pytest.warns(QuantGRUWarning, match="is calibrated and keeps") as caught:
        convert_model(model, "int16", inplace=True)
    assert ["encoder.low", "encoder.high"] == [str(w.message).split()[0] for w in caught]
    assert caught[0].filename == __file__
    assert model.encoder["low"].config == INT8
    assert model.head["gru"].config == INT16
    convert_model(model, {"head.*": "int16", "*": "int8"})  # nothing differs: no warning


# --- subclasses


class Plain(nn.GRU):
    """A name of one's own."""


class Fixed(Plain):
    size: int

    def __init__(self, size):
        super().__init__(size, H, batch_first=True)
        self.size = size


class Helper(nn.GRU):
    def state_size(self):
        return self.hidden_size


class OwnCell(nn.GRUCell):
    pass


@pytest.mark.parametrize("make", [lambda: Plain(C, H), lambda: Fixed(C)], ids=["plain", "fixed"])
def test_trivial_subclasses_are_converted(make):
    model = nn.ModuleDict({"gru": make()}).eval()
    x = seeded(4, 3, C)
    expected = model["gru"](x)[0]
    converted = convert_model(model, "int8")
    assert type(converted["gru"]) is QuantGRU
    same(converted["gru"](x)[0], expected)


def test_a_trivial_cell_is_converted():
    assert type(convert_model(OwnCell(C, H))) is QuantGRUCell


def test_a_subclass_with_methods_stays():
    with pytest.warns(QuantGRUWarning, match="Helper"):
        assert type(convert_model(Helper(C, H))) is Helper


# --- what is no GRU


def test_other_recurrent_modules_are_named():
    model = nn.ModuleDict({"gru": nn.GRU(C, H), "lstm": nn.LSTM(C, H), "cell": nn.RNNCell(C, H)})
    named = r"point: 'lstm' \(LSTM\), 'cell' \(RNNCell\);"
    with pytest.warns(QuantGRUWarning, match=named) as caught:
        convert_model(model)
    assert caught[0].filename == __file__
    convert_model(model, {"gru": "int8", "lstm": None, "cell": None})  # named: no warning
    with pytest.warns(QuantGRUWarning, match=r"point: 'lstm' \(LSTM\);"):
        convert_model(model, {"cell": None, "*": "int8"})


def test_alone_the_error_names_them():
    with pytest.raises(QuantGRUError, match=r"'0' \(LSTM\)"):
        convert_model(nn.Sequential(nn.LSTM(C, H)))


# --- calibrate_model


def test_a_second_call_calibrates_what_the_first_one_did_not_reach():
    model = Reaching()
    with pytest.warns(QuantGRUWarning, match="forward never reached 'idle'") as caught:
        calibrate_model(model, [seeded(5, 3, C)])
    assert caught[0].filename == __file__
    assert not (model.idle.use_quantization)
    assert not (model.idle.is_calibrated())
    assert not model.idle.calibrating
    before = model.used.get_quant_config()
    model.reach = True
    calibrate_model(model, [9 * seeded(5, 3, C)])
    assert model.used.get_quant_config() == before
    assert model.used.use_quantization
    assert model.idle.use_quantization


def test_no_gru_reached_is_an_error():
    model = Reaching()
    with pytest.raises(CalibrationError, match="forward never reached 'used', 'idle'"):
        calibrate_model(model, [seeded(5, 3, C)], forward_fn=lambda model, x: x)
    assert not model.used.calibrating


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = QuantGRU(C, H)

    def forward(self, first, second, *, gain=1.0):
        return self.gru(gain * (first + second))[0]


@pytest.mark.parametrize("batch", [(1, 2), [1, 2], 1], ids=str)
def test_a_model_of_two_inputs(batch):
    x = seeded(5, 3, C)
    batch = x if batch == 1 else type(batch)(x for _ in batch)
    model = Pair()
    with pytest.raises(CalibrationError, match=r"requires first, second; pass forward_fn"):
        calibrate_model(model, [batch])
    if batch is not x:
        calibrate_model(model, [batch], lambda model, batch: model(*batch))
        assert model.gru.use_quantization


class Rows(torch.utils.data.Dataset):
    def __init__(self, **names):
        self.names = names

    def __len__(self):
        return 6

    def __getitem__(self, i):
        row = {name: seeded(5, C, seed=i) for name in self.names}
        return {**row, "label": i} if row else (seeded(5, C, seed=i), i)


def test_a_loader_of_dicts():
    loader = torch.utils.data.DataLoader(Rows(first=1, second=1), 3)
    assert calibrate_model(Pair(), loader).gru.use_quantization
    loader = torch.utils.data.DataLoader(Rows(first=1), 3)
    with pytest.raises(CalibrationError, match=r"'second'.*got one with 'first', 'label'.*forward"):
        calibrate_model(Pair(), loader)


def test_a_copy_of_a_converted_model_is_independent():
    model = convert_model(Model(), "int8")
    other = copy.deepcopy(model)
    convert_model(other, "int16", inplace=True)
    assert model.head["gru"].config == INT8


# --- fusing after calibration, batches of a GRU


@kept
def calibrated(**options):
    gru = QuantGRU(C, H, config=INT8, **options)
    gru.calibrate(seeded(5, 3, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


@pytest.mark.parametrize("where", [{}, {"layer": 1}], ids=["all", "one layer"])
@pytest.mark.parametrize("name", ["op.rRh", "op.old_contrib", "op.new_contrib"])
def test_a_width_of_none_fuses_after_calibration(name, where):
    gru = calibrated(num_layers=2)
    other = copy.deepcopy(gru)
    gru.adjust_quant_config(name, bitwidth=None, **where)
    other.adjust_quant_config(name, fused=True, **where)
    assert gru.get_quant_config(name, 1)["bitwidth"] is None
    assert gru.get_quant_config(name, 1)["scale"] is None
    x = seeded(5, 3, C, seed=3)
    same(gru(x), other(x))


def test_a_width_of_none_elsewhere_is_an_error():
    gru = calibrated()
    with pytest.raises(ConfigError, match=r"to be fused, got 'input.x'"):
        gru.adjust_quant_config("x", bitwidth=None)
    with pytest.raises(ConfigError, match=r"fused to be the only change"):
        gru.adjust_quant_config("rRh", bitwidth=None, exp2_inv=3)
    with pytest.raises(ConfigError, match=r"something to change"):
        gru.adjust_quant_config("rRh")


X = [seeded(5, 3, C, seed=i) for i in range(3)]


def packed(x):
    return nn.utils.rnn.pack_sequence(list(x.unbind(1)))


@pytest.mark.parametrize(
    "data",
    [
        torch.utils.data.DataLoader(X, batch_size=None),
        ((x, 3) for x in X),
        [(x, 3) for x in X],
        [[x, x] for x in X],
        [{"input": x, "label": 3} for x in X],
        [packed(x) for x in X],
        [(packed(x), 3) for x in X],
    ],
    ids=["loader", "generator", "pairs", "lists", "dicts", "packed", "packed pairs"],
)
def test_a_gru_is_calibrated_from_a_loader(data):
    gru = QuantGRU(C, H)
    gru.calibrate(data)
    gru.finalize_calibration()
    assert gru.get_quant_config() == calibrated_alike(gru, *X)


def test_a_dict_may_have_a_state():
    gru, hx = QuantGRU(C, H), seeded(1, 3, H)
    gru.calibrate([{"input": X[0], "hx": hx}])
    gru.finalize_calibration()
    assert gru.get_quant_config() == calibrated_alike(gru, (X[0], hx))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((X[0], X[1]), r"one batch.*got a tuple of tensors.*data\[0\]"),
        ([X[0], X[1]], r"one batch.*got a list of tensors.*data\[0\]"),
        ({"features": X[0]}, r"'input'.*got one with 'features'"),
        ([{"features": X[0]}], r"'input'.*got one with 'features'"),
        ([], "at least one batch"),
        ([3], "int"),
        (3, "int"),
        ("words", "str"),
    ],
    ids=str,
)
def test_other_data_is_an_error(data, text):
    gru = QuantGRU(C, H)
    with pytest.raises(QuantGRUError, match=text):
        gru.calibrate(data)
    assert not gru._state.has_statistics
