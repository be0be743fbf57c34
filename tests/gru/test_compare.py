"""compare: a float model beside its quantized versions."""

import json

import pytest
import torch
from torch import nn

from quant_gru import (
    CalibrationError,
    QuantConfig,
    QuantGRUError,
    QuantGRUWarning,
    calibrate_model,
    compare,
    convert_model,
    freeze_model,
)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(40, 64, batch_first=True)
        self.cell = nn.GRUCell(64, 5)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        y, h_n = self.gru(x)
        return {"scores": self.head(y), "states": (h_n, self.cell(y[:, -1])), "steps": y.shape[1]}


BATCHES = list(torch.randn(3, 4, 7, 40, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    model = Tagger()
    presets = {"int8": QuantConfig.int8(), "int16": QuantConfig.int16()}
    quantized = {
        name: calibrate_model(convert_model(model, config), BATCHES, progress=False)
        for name, config in presets.items()
    }
    return model, quantized


def test_the_figures(models, tmp_path):
    model, quantized = models
    model.train()
    found = compare(model, quantized, BATCHES, metric=lambda m: float(m.head.bias.sum()))
    assert model.training
    assert [row.name for row in found.rows] == ["float", "int8", "int16"]
    own, int8, int16 = found.rows
    floats = 4 * sum(p.numel() for p in (*model.gru.parameters(), *model.cell.parameters()))
    assert own.bytes.weights == own.bytes.files == own.bytes.flash == floats
    assert own.bytes.tables == own.sqnr.get("scores", 0) == 0
    assert own.bytes.others == int8.bytes.others == 4 * (64 * 4 + 4)
    written = constants = 0
    for name in ("gru", "cell"):
        module = quantized["int8"].get_submodule(name)
        path = tmp_path / name
        module.freeze().save(path)
        written += path.stat().st_size
        constants += module.export_c(tmp_path, "c").flash_bytes
    assert (int8.bytes.files, int8.bytes.flash) == (written, constants)
    assert 0 < int8.bytes.weights < floats
    assert set(int8.sqnr) == {"scores", "states[0]", "states[1]"}
    with torch.no_grad():
        pairs = [(model.eval()(x)["scores"], quantized["int8"](x)["scores"]) for x in BATCHES]
    signal = sum(float(a.double().square().sum()) for a, _ in pairs)
    noise = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    assert int8.sqnr["scores"] == pytest.approx(
        10 * torch.log10(torch.tensor(signal / noise)).item(), abs=1e-3
    )
    same = torch.cat([(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in pairs])
    assert int8.agreement["scores"] == pytest.approx(float(same.double().mean()))
    assert int16.sqnr["scores"] > int8.sqnr["scores"] + 20
    assert own.metric == int8.metric
    assert all(row.seconds > 0 for row in found.rows)


def test_frozen_models_are_the_same(models):
    model, quantized = models
    frozen = {name: freeze_model(each) for name, each in quantized.items()}
    for a, b in zip(
        compare(model, quantized, BATCHES).rows, compare(model, frozen, BATCHES).rows, strict=True
    ):
        assert (a.sqnr, a.agreement, a.bytes) == (b.sqnr, b.agreement, b.bytes)


def test_what_people_see(models):
    model, quantized = models
    found = compare(model, quantized, BATCHES)
    text = str(found)
    titles, first, *_ = text.splitlines()
    for title in (
        "agreement of scores",
        "dB of states[0]",
        "weights",
        "GRUs in files",
        "of float",
        "flash",
    ):
        assert title in titles
    assert "100.0 %" in first
    assert "metric" not in titles
    assert found._repr_html_() == found.to_html()
    assert found.to_html().count("<tr>") == 4
    assert json.loads(found.to_json())[1]["name"] == "int8"
    single = compare(model.gru, quantized["int8"].gru, BATCHES, forward_fn=lambda m, x: m(x)[0])
    assert str(single).splitlines()[2].startswith("quantized")
    same = compare(model, {"<b>": model}, BATCHES)
    assert "equal" in str(same)
    assert "&lt;b&gt;" in same.to_html()
    assert json.loads(same.to_json())[1]["sqnr"]["scores"] == "inf"


def test_a_tensor_is_one_batch(models):
    model, quantized = (each.gru for each in (models[0], models[1]["int8"]))
    one, listed = (compare(model, quantized, data) for data in (BATCHES[0], BATCHES[:1]))
    assert [row.sqnr for row in one.rows] == [row.sqnr for row in listed.rows]


def test_what_is_refused(models):
    model, quantized = models
    with pytest.raises(CalibrationError, match="at least one batch"):
        compare(model, quantized, [])
    with pytest.raises(QuantGRUError, match="other names than 'float'"):
        compare(model, {"float": model}, BATCHES)
    with pytest.raises(QuantGRUError, match=r"the outputs of float.*model 'quantized'"):
        compare(model, quantized["int8"].gru, BATCHES)
    with pytest.raises(QuantGRUError, match="a tensor of floating point, got none"):
        compare(model, quantized, BATCHES, forward_fn=lambda m, x: len(x))


def test_models_in_the_wrong_order_are_named(models):
    model, quantized = models
    expected = r"computes in integers in 'gru', 'cell'; pass the float model first"
    with pytest.warns(QuantGRUWarning, match=expected):
        compare(quantized["int8"], model, BATCHES)
    with pytest.warns(QuantGRUWarning, match=expected):
        compare(freeze_model(quantized["int8"]), model, BATCHES)
