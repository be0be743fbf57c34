"""freeze_model, load_frozen, export_model_params and load_model_params."""

import json

import pytest
import torch
from gru_helpers import C, H, same, seeded
from torch import nn

from quant_gru import (
    CalibrationError,
    ConfigError,
    FrozenQuantGRU,
    FrozenQuantGRUCell,
    ParameterError,
    QuantGRU,
    QuantGRUError,
    QuantGRUWarning,
    calibrate_model,
    convert_model,
    export_model_params,
    freeze_model,
    load_frozen,
    load_model_params,
)


class Model(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.lower = nn.GRU(C, H, layers, bidirectional=True, batch_first=True)
        self.norm = nn.BatchNorm1d(2 * H)
        self.cells = nn.ModuleList([nn.GRUCell(2 * H, H)])
        self.again = self.lower

    def forward(self, x):
        y = self.again(x)[0]
        return self.cells[0](self.norm(y.mean(1)))


X = seeded(4, 7, C)


def model(seed=0, layers=1):
    torch.manual_seed(seed)
    return calibrate_model(convert_model(Model(layers), "int8").eval(), [X])


# --- freezing


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
def test_a_frozen_model_gives_the_same_codes(inplace):
    source = model()
    seen = []
    source.lower.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    with torch.no_grad():
        expected = source(X)
        frozen = freeze_model(source, inplace=inplace)
        same(frozen(X), expected)
        assert (frozen is source) is inplace
        if not inplace:
            same(source(X), expected)
    assert type(frozen.lower) is FrozenQuantGRU
    assert frozen.lower is frozen.again
    assert type(frozen.cells[0]) is FrozenQuantGRUCell
    assert FrozenQuantGRU in seen
    assert not frozen.lower.training
    assert {p.data_ptr() for p in frozen.norm.parameters()}.isdisjoint(
        p.data_ptr() for p in source.norm.parameters()
    ) is not inplace


def test_the_root_may_be_a_gru():
    gru = model().lower
    with torch.no_grad():
        same(freeze_model(gru)(X)[0], gru(X)[0])


def test_grus_in_float_mode_stay_and_are_named():
    source = model()
    source.cells[0].use_quantization = False
    with pytest.warns(QuantGRUWarning, match=r"floating point: 'cells.0'") as caught:
        frozen = freeze_model(source)
    assert caught[0].filename == __file__
    with torch.no_grad():
        same(frozen(X), source(X))


def test_nothing_to_freeze():
    for each in (nn.Linear(2, 2), convert_model(Model())):
        with pytest.raises(QuantGRUError, match=r"calibrate_model"):
            freeze_model(each)
    gru = nn.Sequential(QuantGRU(C, H, use_quantization=True))
    with pytest.raises(CalibrationError, match=r"calibrated.*'0'"):
        freeze_model(gru)


# --- loading


SKELETONS = {
    "float": Model,
    "converted": lambda: convert_model(Model(), "int16"),
    "calibrated": lambda: model(seed=9),
    "frozen": lambda: freeze_model(model(seed=9)),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("kind", SKELETONS)
def test_a_frozen_state_dict_needs_the_structure_alone(tmp_path, kind, inplace):
    source = model()
    frozen = freeze_model(source)
    torch.save(frozen.state_dict(), tmp_path / "frozen.pt")
    skeleton = SKELETONS[kind]().eval()
    before = [type(m) for m in skeleton.modules()]
    loaded = load_frozen(skeleton, torch.load(tmp_path / "frozen.pt"), inplace=inplace)
    assert (loaded is skeleton) is inplace
    assert loaded.lower is loaded.again
    assert [type(m) for m in loaded.modules()] == [type(m) for m in frozen.modules()]
    if not inplace:
        assert [type(m) for m in skeleton.modules()] == before
    with torch.no_grad():
        same(loaded(X), source(X))


def test_a_frozen_state_dict_loads_into_a_frozen_model():
    source, other = model(), freeze_model(model(seed=9))
    other.load_state_dict(freeze_model(source).state_dict())
    with torch.no_grad():
        same(other(X), source(X))


def test_a_model_without_memory():
    source = model()
    with torch.device("meta"):
        skeleton = Model().eval()
    loaded = load_frozen(skeleton, freeze_model(source).state_dict())
    with torch.no_grad():
        same(loaded(X), source(X))


def test_the_root_is_loaded():
    gru = model().lower
    loaded = load_frozen(nn.GRU(C, H, bidirectional=True), freeze_model(gru).state_dict())
    with torch.no_grad():
        same(loaded(X)[0], gru(X)[0])


def test_state_dicts_that_do_not_fit():
    state = freeze_model(model()).state_dict()
    with pytest.raises(ParameterError, match=r"frozen.*'plan'.*freeze_model"):
        load_frozen(Model(), Model().state_dict())
    with pytest.raises(ParameterError, match=r"'lower'.*num_layers=2.*num_layers=1"):
        load_frozen(Model(layers=2), state)
    with pytest.raises(RuntimeError, match=r"norm.weight"):
        load_frozen(Model(), {k: v for k, v in state.items() if k != "norm.weight"})
    with pytest.raises(ParameterError, match=r"'lower'"):
        load_frozen(Model(), {k: v for k, v in state.items() if k != "lower.W_l0"})
    with pytest.raises(ParameterError, match=r"'lower' is a Linear"):
        load_frozen(nn.ModuleDict({"lower": nn.Linear(2, 2)}), state)


# --- parameter files


def floats(source):
    """A converted model with the weights of `source` and no scales."""
    other = convert_model(Model(), "int16").eval()
    other.load_state_dict({k: v for k, v in source.state_dict().items() if "quantiz" not in k})
    return other


def test_all_parameter_files_of_a_model(tmp_path):
    source = model()
    paths = export_model_params(source, tmp_path / "new" / "params")
    assert {name: path.name for name, path in paths.items()} == {
        "lower": "lower.json",
        "cells.0": "cells.0.json",
    }
    other = floats(source)
    assert load_model_params(other, tmp_path / "new" / "params") is other
    assert other.lower.use_quantization
    with torch.no_grad():
        same(other(X), source(X))
    single = QuantGRU(C, H, bidirectional=True)
    single.load_quant_params(paths["lower"])  # each is a parameter file


def test_the_root_has_a_file(tmp_path):
    gru = model().lower
    assert export_model_params(gru, tmp_path)[""] == tmp_path / "model.json"
    other = QuantGRU(C, H, bidirectional=True)
    load_model_params(other, tmp_path)
    assert other.get_quant_config("x") == gru.get_quant_config("x")


def test_names_of_modules_stay_in_the_folder(tmp_path):
    source = nn.ModuleDict({"/a b": model().lower})
    (path,) = export_model_params(source, tmp_path).values()
    assert path.parent == tmp_path
    assert load_model_params(source, tmp_path)["/a b"].is_calibrated()


def test_a_gru_without_scales_is_named_and_nothing_is_written(tmp_path):
    source = model()
    source.cells[0].reset_calibration()
    with pytest.raises(CalibrationError, match=r"calibrated.*'cells.0'"):
        export_model_params(source, tmp_path / "params")
    assert not (tmp_path / "params").exists()


@pytest.mark.parametrize("broken", ["missing", "unknown", "invalid"])
def test_an_error_changes_nothing(tmp_path, broken):
    source = model()
    export_model_params(source, tmp_path)
    path = tmp_path / "cells.0.json"
    text = {"missing": r"'cells.0'", "unknown": r"'extra.json'", "invalid": r"cells.0.json"}
    if broken == "missing":
        path.unlink()
    elif broken == "unknown":
        (tmp_path / "extra.json").write_bytes(path.read_bytes())
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": 9}))
    other = floats(source)
    with pytest.raises(ParameterError, match=text[broken]):
        load_model_params(other, tmp_path)
    for gru in (other.lower, other.cells[0]):
        assert not gru.is_calibrated()
        assert not gru.use_quantization


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        export_model_params(model(), tmp_path / "file" / "params")


def test_models_without_grus(tmp_path):
    with pytest.raises(CalibrationError, match="convert_model"):
        export_model_params(Model(), tmp_path)
    with pytest.raises(CalibrationError, match="convert_model"):
        load_model_params(Model(), tmp_path)
