"""Which operator to widen: each is changed for itself, and the whole model is measured."""

import copy
import math

import pytest
import torch

from quant_gru import (
    CalibrationError,
    ConfigError,
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    calibrate_model,
    convert_model,
    operator_gain,
    operator_sqnr,
)
from quant_gru.config import FUSIBLE, OPERATORS


class Tagger(torch.nn.Module):
    """Two GRUs of different shapes between other layers."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.GRU(6, 10, bidirectional=True, batch_first=True)
        self.drop = torch.nn.Dropout(0.5)
        self.last = torch.nn.ModuleDict({"gru": torch.nn.GRU(20, 8, 2, bias=False)})
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        y = self.drop(self.first(x)[0]).transpose(0, 1)
        return {"scores": self.head(self.last["gru"](y, None)[0]), "steps": len(y)}


BATCHES = list(torch.randn(3, 4, 7, 6, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    converted = convert_model(Tagger(), QuantConfig.int8())
    calibrate_model(converted, BATCHES, progress=False)
    return converted.train()


def state_of(model):
    model = copy.deepcopy(model)
    return [
        (name, gru.training, gru.use_quantization, gru._state.document(), gru._log2_scales)
        for name, gru in model.named_modules()
        if isinstance(gru, QuantGRU)
    ]


def output_sqnr(model):
    """Of the whole model, in words of its own."""
    model = copy.deepcopy(model).eval()
    grus = [m for m in model.modules() if isinstance(m, QuantGRU)]
    signal = noise = 0.0
    with torch.no_grad():
        for x in BATCHES:
            quantized = model(x)["scores"]
            for gru in grus:
                gru.use_quantization = False
            real = model(x)["scores"]
            for gru in grus:
                gru.use_quantization = True
            signal += float(real.double().square().sum())
            noise += float((real.double() - quantized.double()).square().sum())
    return 10 * math.log10(signal / noise)


def test_every_change_is_what_it_says(model):
    before = state_of(model)
    gain = operator_gain(model, BATCHES, progress=False)
    assert state_of(model) == before
    assert model.training
    assert gain.base == pytest.approx(output_sqnr(model))
    for module in ("first", "last.gru"):
        rows = {(row.operator, row.change): row.value for row in gain.rows if row.module == module}
        wide = {name for name, change in rows if change == "8 -> 16 bits"}
        assert wide == {n for n in OPERATORS if module == "first" or not n.startswith("weight.b")}
        assert {name for name, change in rows if change == "fused"} == set(FUSIBLE)
        for (name, change), value in [*rows.items()][:4]:
            changed = copy.deepcopy(model)
            fields = {"fused": True} if change == "fused" else {"bitwidth": 16}
            changed.get_submodule(module).adjust_quant_config(name, **fields)
            assert value == pytest.approx(output_sqnr(changed) - gain.base, abs=1e-6)
    values = [row.value for row in gain.rows]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.1
    lines = str(gain).splitlines()
    assert lines[0].startswith("as it is: SQNR of the output ")
    assert gain.rows[0].operator in lines[2]
    assert lines[-1].endswith(" below")


def test_narrowing_and_a_metric(model):
    seen = []

    def metric(given):
        assert given is model
        assert not given.training
        seen.append(given.first.config)
        return -sum(float(given(x)["scores"].abs().sum()) for x in BATCHES)

    gain = operator_gain(model, bits=4, metric=metric, progress=False)
    assert gain.unit == "metric"
    assert len(seen) == 1 + len(gain.rows)
    assert any(config["weight.W"].bitwidth == 4 for config in seen)
    assert {row.change for row in gain.rows} == {"8 -> 4 bits", "fused"}
    assert "dB" not in str(gain)
    narrowed = operator_gain(model, BATCHES, bits=4, progress=False)
    assert min(row.value for row in narrowed.rows) < -1


def test_a_single_gru_with_learned_scales():
    torch.manual_seed(0)
    gru = QuantGRU(6, 10, config=QuantConfig.int8_wide()).eval()
    x = BATCHES[0].transpose(0, 1).contiguous()
    gru.calibrate(x)
    gru.finalize_calibration()
    gru.use_quantization = True
    gru.learn_scales = True
    before, y = gru._state.document(), gru(x)[0].detach()
    gain = operator_gain(gru, x, progress=False)
    assert {row.module for row in gain.rows} == {""}
    assert not {row.operator for row in gain.rows} & set(FUSIBLE)
    assert gru.learn_scales
    assert gru._state.document() == before
    assert torch.equal(gru(x)[0], y)


def test_an_exception_leaves_the_model_as_it_was(model):
    before, count = state_of(model), iter(range(9))

    def metric(given):
        return 1 / (5 - next(count))

    with pytest.raises(ZeroDivisionError):
        operator_gain(model, metric=metric, progress=False)
    assert state_of(model) == before
    assert model.training


def test_what_is_wrong_is_said(model):
    with pytest.raises(CalibrationError, match="data or a metric"):
        operator_gain(model)
    for analyse in (operator_gain, operator_sqnr):
        with pytest.raises(CalibrationError, match="at least one batch"):
            analyse(model, [])
    with pytest.raises(CalibrationError, match="calibrated QuantGRU whose use_quantization is"):
        operator_gain(torch.nn.Linear(2, 2), BATCHES)
    with pytest.raises(ConfigError):
        operator_gain(model, BATCHES, bits=33, progress=False)
    with pytest.raises(ConfigError, match=r"to be fused, got 'input\.x'"):
        model.first.adjust_quant_config("input.x", fused=True)
    with pytest.raises(ConfigError, match="the only change"):
        model.first.adjust_quant_config("op.rRh", bitwidth=8, fused=True)


def test_sqnr_of_a_whole_model(model):
    before = state_of(model)
    found = operator_sqnr(model, BATCHES)
    assert state_of(model) == before
    assert model.training
    assert {name.split(".")[0] for name in found} == {"first", "last"}
    # the first GRU is given the same by the float and by the quantized model
    alone = operator_sqnr(model.first, torch.cat(BATCHES))
    assert {name: found[f"first.{name}"] for name in alone} == pytest.approx(alone)
    assert "last.gru.gate.z_out_l1" in found
    one = operator_sqnr(model, BATCHES[0])
    assert one.keys() == found.keys()
    with pytest.raises(CalibrationError, match="at least one QuantGRU"):
        operator_sqnr(torch.nn.Linear(2, 2), BATCHES)


def test_forward_fn_of_operator_sqnr(model):
    """In the place that it has in calibrate_model, or by name."""

    def run(model, batch):
        return model(batch)

    found = operator_sqnr(model, BATCHES, run)
    assert str(found) == str(operator_sqnr(model, BATCHES, forward_fn=run))
    with pytest.raises(QuantGRUError, match=r"hx only for a QuantGRU.*pass forward_fn=lambda"):
        operator_sqnr(model, BATCHES, torch.zeros(1, 4, 3))
    with pytest.raises(QuantGRUError, match="forward_fn only for a model"):
        operator_sqnr(model.first, BATCHES[0], run)


class Loop(torch.nn.Module):
    """A cell that is called for each step, with and without a batch."""

    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRUCell(6, 4)

    def forward(self, x):
        h = None
        for step in x:
            h = self.cell(step, h)
        return self.cell(step[0], h[0])


def test_calls_of_a_cell_are_summed(monkeypatch):
    """However many of them are measured together."""
    model = convert_model(Loop().eval(), "int8")
    calibrate_model(model, BATCHES, progress=False)
    found = operator_sqnr(model, BATCHES)
    monkeypatch.setattr("quant_gru.analysis.operator_sqnr._ROWS_AT_ONCE", 1)
    one_by_one = operator_sqnr(model, BATCHES)
    assert list(found) == list(one_by_one)
    assert found == pytest.approx(one_by_one, rel=1e-9)


def test_changes_without_an_effect_say_so():
    """A metric of a few decisions, such as an error rate, shows small effects as none."""
    gru = QuantGRU(5, 6, config=QuantConfig.int8())
    gru.calibrate(torch.randn(12, 4, 5, generator=torch.Generator().manual_seed(0)))
    gru.finalize_calibration()
    gru.use_quantization = True
    lines = str(operator_gain(gru, metric=lambda _: -0.0)).splitlines()
    assert all(line.endswith(" none") for line in lines[2:-2])
    assert lines[-2] == "none: no effect on the metric with this data"
    assert not any("-0" in line or "+0" in line for line in lines[2:])
