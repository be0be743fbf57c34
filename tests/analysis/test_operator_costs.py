"""What each operator costs at each width: one of them at a time, at the output of the model."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from quant_gru import (
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    QuantGRUWarning,
    convert_model,
    sensitivity,
)
from quant_gru.analysis import sensitivity as measuring
from quant_gru.analysis.trials import Place, Trials
from quant_gru.config import OPERATORS
from two_processes import NEEDS_GLOO, joined, run_two


class Tagger(torch.nn.Module):
    """Two GRUs of different shapes between other layers."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.GRU(6, 10, bidirectional=True, batch_first=True)
        self.last = torch.nn.GRU(20, 8, 2, bias=False)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.last(self.first(x)[0].transpose(0, 1))[0])


BATCHES = list(torch.randn(3, 4, 40, 6, generator=torch.Generator().manual_seed(1)))


def tagger():
    torch.manual_seed(0)
    return Tagger()


def noise_of(model, quantized):
    with torch.no_grad():
        pairs = [(model(x).double(), quantized(x).double()) for x in BATCHES]
    return sum(float((a - b).square().sum()) for a, b in pairs)


def assert_same(found, expected):
    """Sums of floats differ in their last digits between calls and numbers of threads."""
    assert [(c.place, c.bits) for c in found] == [(c.place, c.bits) for c in expected]
    assert [c.noise for c in found] == pytest.approx([c.noise for c in expected], rel=1e-4)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """All costs of two widths, and the file that has them."""
    path = tmp_path_factory.mktemp("costs") / "costs.jsonl"
    return sensitivity(tagger(), BATCHES, widths=(8, 4), file=path, progress=False), path


@pytest.fixture
def costs_file(measured, tmp_path):
    return shutil.copy(measured[1], tmp_path)


def test_every_operator_of_every_cell_is_measured(measured):
    found, _ = measured
    assert found.widths == (4, 8)
    places = {str(each.place) for each in found.costs}
    with_biases = {f"first.{name}_l0{way}" for name in OPERATORS for way in ("", "_reverse")}
    without = {name for name in OPERATORS if not name.startswith("weight.b")}
    assert places == with_biases | {f"last.{name}_l{layer}" for name in without for layer in (0, 1)}
    worst = found.worst(4)
    assert [each.noise for each in worst] == sorted((e.noise for e in worst), reverse=True)


def test_a_cost_is_what_a_model_with_this_width_measures(measured):
    model = tagger()
    found = {(c.place, c.bits): c for c in measured[0].costs}
    trials = Trials(model, BATCHES, (4, 8), progress=False)
    for place in (Place("last", 1, False, "output.h"), Place("first", 0, True, "weight.W")):
        trials.set({})
        base = noise_of(model, trials.model)
        trials.set({place: 4})
        noise = noise_of(model, trials.model)
        assert found[place, 4].noise == pytest.approx(noise - base, rel=1e-4)
        gru = trials.grus[place.module]
        bits = {
            (layer, direction, name): cell.config[name].bitwidth
            for layer, cells in enumerate(gru._state.scales)
            for direction, cell in enumerate(cells)
            for name in OPERATORS
        }
        narrow = {key for key, each in bits.items() if each != 16}
        assert narrow == {(place.layer, int(place.reverse), place.operator)}


@pytest.mark.slow
def test_a_width_near_that_of_the_others_is_measured_against_finer_ones():
    costs = {c.bits: c for c in sensitivity(tagger(), BATCHES[:1], widths=(8, 16)).costs}
    assert 40 < costs[16].sqnr - costs[8].sqnr < 56  # 8 bits are 48 dB


def test_parts_that_do_not_change_are_computed_once():
    trials = Trials(tagger(), BATCHES, (8,), progress=False)
    gru = trials.grus["last"]
    trials.noise()
    plan = gru._state.plan(gru._weights(), live=False)
    trials.set({Place("last", 1, False, "gate.z_out"): 8})
    trials.noise()
    changed = gru._state.plan(gru._weights(), live=False)
    assert changed.cells[0][0].frozen is plan.cells[0][0].frozen
    assert changed.cells[0][0].weights is plan.cells[0][0].weights
    assert changed.cells[1][0].frozen is not plan.cells[1][0].frozen


def test_the_model_does_not_change():
    model = convert_model(tagger(), "int8").train()
    before = {
        name: value.clone()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    sensitivity(model, BATCHES[:1], widths=(8,), progress=False)
    assert model.training
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in before)
    for gru in model.modules():
        if isinstance(gru, QuantGRU):
            assert not gru.is_calibrated()
            assert gru.config == QuantConfig.int8()


@pytest.mark.slow
def test_the_kinds_of_a_quantized_model_are_kept():
    config = QuantConfig.int8_wide().replace_globals(scale_kind="free")
    found = sensitivity(convert_model(tagger(), config), BATCHES[:1], widths=(8,), progress=False)
    assert not any(each.place.operator.startswith("op.") for each in found.costs)  # fused
    trials = Trials(convert_model(tagger(), config), BATCHES[:1], (8,), progress=False)
    assert trials.grus["first"].config.scale_kind == "free"
    with pytest.raises(QuantGRUError, match="Expected config only for a model without QuantGRUs"):
        sensitivity(convert_model(tagger(), config), BATCHES, config="int8")


def test_a_cell_and_a_tensor_and_a_function():
    cell = torch.nn.GRUCell(3, 5)
    x, h = torch.randn(40, 3), torch.rand(40, 5) - 0.5
    found = sensitivity(cell, [(x, h)], widths=(8,), forward_fn=lambda m, b: m(*b), progress=False)
    assert len(found.costs) == len(OPERATORS)
    assert len(sensitivity(torch.nn.GRU(3, 5), x[:, None], widths=(4,)).costs) == len(OPERATORS)


def share_right(model):
    return torch.cat([model(x).argmax(-1).flatten() for x in BATCHES])


@pytest.mark.slow
def test_a_metric_of_samples_says_which_changes_are_clear():
    model = tagger()
    with torch.no_grad():
        right = share_right(model)

    def metric(quantized):
        return (share_right(quantized) == right).float()

    found = sensitivity(model, BATCHES, metric, widths=(1, 12), progress=False)
    assert found.float_metric == 1.0
    by_width = {bits: found.worst(bits) for bits in (1, 12)}
    assert all(each.is_clear for each in by_width[1][:5])
    assert not any(each.is_clear for each in by_width[12])
    assert all(each.metric <= 0 for each in found.costs)
    assert "change of the metric" in str(found)


def test_a_metric_of_few_samples_warns():
    model = tagger()

    def metric(quantized):
        return float(quantized(BATCHES[0])[0, 0, 0] > 1e9)

    with pytest.warns(QuantGRUWarning, match="tells 0 of 64 changes to 4 bits from chance"):
        found = sensitivity(model, BATCHES[:1], metric, widths=(4,), progress=False)
    assert found.warning in str(found)
    assert not any(each.is_clear for each in found.costs)


def test_a_continuous_metric_does_not_warn():
    model = tagger()
    with torch.no_grad():
        real = model(BATCHES[0])

    def metric(quantized):
        return -float((real - quantized(BATCHES[0])).square().mean())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sensitivity(model, BATCHES[:1], metric, widths=(4,), progress=False)
    assert found.warning == ""


def test_it_goes_on_from_a_file(measured, costs_file, monkeypatch):
    path, model = Path(costs_file), tagger()
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:-20]) + '\n["first.x', encoding="utf-8")  # ended while writing
    runs = []
    noise = Trials.noise
    monkeypatch.setattr(Trials, "noise", lambda self: runs.append(1) or noise(self))
    again = sensitivity(model, BATCHES, widths=(4, 8), file=path, progress=False)
    assert_same(again.costs, measured[0].costs)
    assert len(runs) == 20
    runs.clear()
    assert sensitivity(model, BATCHES, widths=(8,), file=path, progress=False).widths == (8,)
    assert not runs


@pytest.mark.parametrize("change", ["weights", "data", "config"])
def test_a_file_of_another_model_is_refused(costs_file, change):
    model, batches, config = tagger(), BATCHES, None
    if change == "weights":
        with torch.no_grad():
            model.head.weight[0, 0] += 1
    elif change == "data":
        batches = BATCHES[:2]
    else:
        config = QuantConfig.int16().replace_globals(scale_kind="free")
    with pytest.raises(QuantGRUError, match="Expected file to be of this model"):
        sensitivity(model, batches, widths=(8,), file=costs_file, config=config, progress=False)


def _process(rank, folder, expected):
    measured = []
    noise = Trials.noise
    Trials.noise = lambda self: measured.append(1) or noise(self)
    try:
        with joined(rank, folder):
            costs = f"{folder}/costs"
            found = sensitivity(tagger(), BATCHES, widths=(8,), file=costs, progress=False)
            torch.distributed.barrier()  # gloo aborts a process whose peer has left
    finally:
        Trials.noise = noise
    assert_same(found.costs, expected)
    assert len(measured) in (32, 33)  # of 64 operators and one base


@pytest.mark.slow
@NEEDS_GLOO
def test_processes_share_the_work(measured, tmp_path):
    expected = [cost for cost in measured[0].costs if cost.bits == 8]
    run_two(_process, tmp_path, expected)
    assert {path.name for path in tmp_path.iterdir()} >= {"costs", "costs.1"}


@pytest.mark.parametrize("width", [0, 33, 8.0, True])
def test_a_width_is_an_integer(width):
    with pytest.raises(QuantGRUError, match="Expected widths to be integers from 1 to 32"):
        sensitivity(tagger(), BATCHES, widths=(width,), progress=False)


def test_there_must_be_data_and_tensors():
    with pytest.raises(QuantGRUError, match="Expected at least one batch"):
        sensitivity(tagger(), [])
    with pytest.raises(QuantGRUError, match="give a tensor of floating point"):
        sensitivity(tagger(), BATCHES, forward_fn=lambda m, x: m(x).argmax(-1), progress=False)


def test_forms(measured):
    found, _ = measured
    assert len(str(found).splitlines()) == 2 + 64
    assert found._repr_html_().count("<tr>") == 1 + 64
    document = json.loads(found.to_json())
    assert len(document["costs"]) == 2 * 64
    assert document["costs"][0]["place"] == "first.input.x_l0"


def test_changes_of_up_to_two_steps_are_not_clear():
    """Of a share of ten samples: the metric moves in tenths."""
    place = Place("", 0, False, "output.h")
    changes = (-0.5, -0.2, -0.1, 0.0)
    costs = [measuring.Cost(place, 4, 1.0, 10.0, each) for each in changes]
    values = [[1.0], *([1.0 + each] for each in changes)]
    judged, warning = measuring._judged(costs, values)
    assert [each.is_clear for each in judged] == [True, False, False, False]
    assert "moves in steps of 0.1" in warning
