"""Every way to scales, weights or integers warns of biases that values or weights cut off."""

import pytest
import torch

from quant_gru import (
    FrozenQuantGRU,
    QuantConfig,
    QuantGRU,
    QuantGRUCell,
    QuantGRUWarning,
    load_frozen,
)
from sweeps import first_of

CUT = r"got 48 of 48 in weight\.bw of layer 0 that are too large, .* values of input\.x"


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
@pytest.mark.parametrize("config", first_of(["int8", "w8a16", "int16"], 1))
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


@pytest.fixture
def cut():
    with pytest.warns(QuantGRUWarning, match=CUT):
        return calibrated(1e-8).eval()


def test_loaded_parameters(cut, tmp_path):
    cut.export_quant_params(tmp_path / "gru.json")
    other = QuantGRU(8, 16)
    other.load_state_dict({name: p.detach() for name, p in cut.named_parameters()})
    with pytest.warns(QuantGRUWarning, match=CUT) as record:
        other.load_quant_params(tmp_path / "gru.json")
    assert len(record) == 1
    assert record[0].filename == __file__


def test_a_checkpoint(cut):
    with pytest.warns(QuantGRUWarning, match=CUT):
        QuantGRU(8, 16).load_state_dict(cut.state_dict())


def test_weights_without_values_are_not_read(cut, tmp_path):
    cut.export_quant_params(tmp_path / "gru.json")
    QuantGRU(8, 16, device="meta").load_quant_params(tmp_path / "gru.json")
    broken = QuantGRU(8, 16)
    with torch.no_grad():
        broken.weight_ih_l0.fill_(float("nan"))
    broken.load_quant_params(tmp_path / "gru.json")


def forward(gru, amplitude=1.0):
    with torch.no_grad():
        gru(torch.randn(20, 4, 8) * amplitude)


def shrink(gru):
    with torch.no_grad():
        gru.weight_hh_l0.mul_(1e-12)


def test_a_forward_after_training_tells_once():
    gru = calibrated().eval()
    gru.use_quantization = True
    forward(gru)
    gru.train()(torch.randn(20, 4, 8))
    shrink(gru)
    gru(torch.randn(20, 4, 8))  # training says nothing
    gru.eval()
    with pytest.warns(QuantGRUWarning, match=r"weight\.br of layer 0 that are too large") as record:
        forward(gru)
    assert len(record) == 1
    assert record[0].filename == __file__
    forward(gru)
    with torch.no_grad():
        gru.bias_hh_l0.mul_(0.5)  # the plan is built again
    forward(gru)


def test_a_forward_after_calibration_does_not_repeat_it(cut):
    cut.use_quantization = True
    forward(cut, 1e-8)


def test_a_changed_scale(tmp_path):
    gru = calibrated().eval()
    gru.use_quantization = True
    gru.adjust_quant_config("input.x", scale=2.0**-40)
    with pytest.warns(QuantGRUWarning, match=CUT):
        forward(gru)
    gru.adjust_quant_config("input.x", scale=2.0**-5)
    forward(gru)
    gru.adjust_quant_config("input.x", scale=2.0**-40)
    with pytest.warns(QuantGRUWarning, match=CUT):
        gru.stream()
    gru.stream()


def test_freezing_reads_the_weights_of_that_moment():
    gru = calibrated().eval()
    gru.freeze()
    with torch.no_grad():
        gru.weight_hh_l0.mul_(1e-12)
    with pytest.warns(QuantGRUWarning, match=r"weight\.br of layer 0 that are too large"):
        gru.freeze()


def test_a_frozen_gru(cut, tmp_path):
    with pytest.warns(QuantGRUWarning, match=CUT):
        frozen = cut.freeze()
    frozen.save(tmp_path / "gru.safetensors")  # says nothing again
    with pytest.warns(QuantGRUWarning, match=CUT):
        FrozenQuantGRU.load(tmp_path / "gru.safetensors")
    with pytest.warns(QuantGRUWarning, match=CUT):
        FrozenQuantGRU.from_state_dict(frozen.state_dict())
    with pytest.warns(QuantGRUWarning, match=CUT):
        calibrated().freeze().load_state_dict(frozen.state_dict())
    model = torch.nn.ModuleDict({"gru": torch.nn.GRU(8, 16)})
    with pytest.warns(QuantGRUWarning, match=CUT):
        load_frozen(model, torch.nn.ModuleDict({"gru": frozen}).state_dict())


def test_a_cell():
    torch.manual_seed(0)
    cell = QuantGRUCell(8, 16)
    cell.calibrate(torch.randn(20, 4, 8)[0] * 1e-8)
    with pytest.warns(QuantGRUWarning, match=CUT):
        cell.finalize_calibration()
    with pytest.warns(QuantGRUWarning, match=CUT):
        cell.freeze()
