"""CustomGRU: QuantGRU with calibration data given at construction."""

import copy
import math
import pickle

import pytest
import torch
from gru_helpers import C, H, same, seeded
from torch import nn

from quant_gru import (
    CalibrationError,
    ConfigError,
    CustomGRU,
    QuantConfig,
    QuantGRU,
    QuantGRUWarning,
)

DATA = seeded(6, 4, C, seed=8)


def made(**options):
    torch.manual_seed(3)
    options = {"use_quantization": True, "calibration_data": DATA} | options
    return CustomGRU(C, H, **options).eval()


def by_hand(gru, data=DATA, config=None):
    """A QuantGRU with the same weights, calibrated in the plain way."""
    other = QuantGRU(C, H, gru.num_layers, config=config or QuantConfig.int8()).eval()
    other.batch_first = gru.batch_first
    other.load_state_dict({n: p.detach() for n, p in gru.named_parameters()})
    other.calibrate(data)
    other.finalize_calibration()
    other.use_quantization = True
    return other


def test_import_as_the_document_has_it():
    from custom_gru import CustomGRU as imported

    assert imported is CustomGRU
    assert issubclass(CustomGRU, QuantGRU)


@pytest.mark.parametrize(
    ("quant_type", "config"), [("int8", QuantConfig.int8()), ("int16", QuantConfig.int16())]
)
def test_quant_types(quant_type, config):
    gru = made(quant_type=quant_type)
    assert gru.config == config
    assert gru.quant_type == quant_type
    x = seeded(5, 3, C)
    same(gru(x)[0], by_hand(gru, config=config)(x)[0])


@pytest.mark.parametrize("quant_type", ["int4", "INT8", 8, None])
def test_other_quant_types_are_an_error(quant_type):
    with pytest.raises(ConfigError, match="Expected quant_type to be"):
        made(quant_type=quant_type)


def test_defaults_are_a_float_gru():
    gru = CustomGRU(C, H)
    plain = nn.GRU(C, H)
    plain.load_state_dict(gru.state_dict(), strict=True)
    assert gru.quant_type == "int8"
    assert gru.calibration_data is None
    x = seeded(5, 3, C)
    same(gru(x)[0], plain(x)[0])


def test_data_are_consumed_at_the_first_quantized_forward():
    gru = made(use_quantization=False)
    x = seeded(5, 3, C)
    gru(x)
    assert not gru.is_calibrated()
    gru.use_quantization = True
    assert not gru.is_calibrated()
    gru(x)
    assert gru.is_calibrated()
    assert gru.calibration_data is DATA


def test_data_are_consumed_with_the_weights_then_present():
    gru = made()
    with torch.no_grad():
        gru.weight_ih_l0.mul_(5)
        gru.bias_hh_l0.add_(1)
    x = seeded(5, 3, C)
    same(gru(x)[0], by_hand(gru)(x)[0])


def test_data_are_consumed_in_the_module_s_dtype_and_device():
    gru = made(calibration_data=DATA.double())
    with pytest.raises((RuntimeError, ValueError)):
        gru(seeded(5, 3, C))
    gru = made().double()
    gru.calibration_data = DATA.double()
    assert gru(seeded(5, 3, C).double())[0].dtype == torch.float64


def test_loading_a_float_checkpoint_calibrates_again():
    gru = made()
    x = seeded(5, 3, C)
    gru(x)
    before = gru.get_quant_config("z_pre")
    torch.manual_seed(77)
    source = nn.GRU(C, H)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(6)
    gru.load_state_dict(source.state_dict(), strict=True)
    assert gru.use_quantization
    same(gru(x)[0], by_hand(gru)(x)[0])
    assert gru.get_quant_config("z_pre") != before


def test_loading_a_float_checkpoint_of_a_model_calibrates_again():
    model = nn.ModuleDict({"gru": made(), "head": nn.Linear(H, 2)})
    plain = nn.ModuleDict({"gru": nn.GRU(C, H), "head": nn.Linear(H, 2)})
    x = seeded(5, 3, C)
    model["gru"](x)
    model.load_state_dict(plain.state_dict())
    same(model["gru"](x)[0], by_hand(model["gru"])(x)[0])


def test_a_quantized_checkpoint_brings_its_own_scales():
    source = made(calibration_data=3 * DATA)
    x = seeded(5, 3, C)
    expected = source(x)[0]
    gru = made()
    gru(x)
    gru.load_state_dict(source.state_dict())
    same(gru(x)[0], expected)
    plain = QuantGRU(C, H)
    plain.load_state_dict(source.state_dict())
    same(plain(x)[0], expected)


def test_weights_are_quantized_anew_as_they_change():
    gru = made()
    x = seeded(5, 3, C)
    y = gru(x)[0]
    scales = gru.get_quant_config("h")
    with torch.no_grad():
        gru.weight_ih_l0.mul_(0.3)
    changed = gru(x)[0]
    assert not torch.equal(changed, y)
    assert gru.get_quant_config("h") == scales  # activations keep their scales
    with torch.no_grad():
        gru.weight_ih_l0.copy_(made().weight_ih_l0)
    same(gru(x)[0], y)


def test_data_are_not_in_the_state_dict():
    gru = made()
    assert list(gru.state_dict()) == list(nn.GRU(C, H).state_dict())
    gru(seeded(5, 3, C))
    assert len(gru.state_dict()) == 5


def test_copies_keep_the_data():
    x = seeded(5, 3, C)
    gru = made()
    for new in (copy.deepcopy(gru), pickle.loads(pickle.dumps(gru))):
        assert type(new) is CustomGRU
        same(new.calibration_data, DATA)
        same(new(x)[0], made()(x)[0])


def test_without_data_calibrate_works():
    gru = made(calibration_data=None)
    x = seeded(5, 3, C)
    with pytest.raises(CalibrationError, match="calibrate"):
        gru(x)
    gru.calibrate(DATA)
    gru.finalize_calibration()
    same(gru(x)[0], by_hand(gru)(x)[0])


def test_calibrate_goes_before_the_data():
    gru = made(calibration_data=50 * DATA)
    gru.calibrate(DATA)
    x = seeded(5, 3, C)
    with pytest.warns(UserWarning, match="finalize"):
        y = gru(x)[0]
    same(y, by_hand(gru)(x)[0])


def test_statistics_survive_a_float_checkpoint():
    """Loading a float checkpoint warns and leaves collected statistics, as for QuantGRU."""
    gru = made(calibration_data=None)
    gru.calibrate(DATA)
    with pytest.warns(QuantGRUWarning, match="with statistics"):
        gru.load_state_dict(nn.GRU(C, H).state_dict())
    gru.finalize_calibration()
    gru(seeded(5, 3, C))


def test_reset_calibrates_again_with_other_data():
    gru = made()
    x = seeded(5, 3, C)
    gru(x)
    gru.reset_calibration()
    gru.calibration_data = 3 * DATA
    same(gru(x)[0], by_hand(gru, 3 * DATA)(x)[0])


def test_data_of_every_layout():
    x = seeded(5, 3, C)
    same(made(calibration_data=DATA[:, 0])(x)[0], made(calibration_data=DATA[:, :1])(x)[0])
    rows = [DATA[:, i] for i in range(4)]
    pack = nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
    same(made(calibration_data=pack)(x)[0], made()(x)[0])
    first = made(batch_first=True, calibration_data=DATA.transpose(0, 1))
    same(first(x.transpose(0, 1))[0].transpose(0, 1), made()(x)[0])


def test_data_that_do_not_fit_are_an_error_at_the_first_forward():
    gru = made(calibration_data=torch.zeros(6, 4, C + 1))
    with pytest.raises(ValueError, match="features"):
        gru(seeded(5, 3, C))
    gru = made(calibration_data=DATA * float("nan"))
    for _ in range(2):
        with pytest.raises(CalibrationError, match=r"input\.x"):
            gru(seeded(5, 3, C))


def test_the_calibrating_flag_wins():
    gru = made()
    plain = nn.GRU(C, H)
    plain.load_state_dict(gru.state_dict())
    gru.calibrating = True
    same(gru(3 * DATA)[0], plain(3 * DATA)[0])
    gru.calibrating = False
    gru.finalize_calibration()
    assert gru.get_quant_config() == by_hand(gru, 3 * DATA).get_quant_config()


@pytest.mark.parametrize("use", ["trace_codes", "freeze", "export", "forward_integer"])
def test_other_quantized_uses_consume_the_data_too(use, tmp_path):
    gru = made()
    x = seeded(5, 3, C)
    if use == "trace_codes":
        gru.trace_codes(x)
    elif use == "freeze":
        same(gru.freeze()(x)[0], by_hand(gru)(x)[0])
    elif use == "export":
        gru.export_quant_params(tmp_path / "p.json")
    else:
        gru.forward_integer(torch.zeros(2, 1, C, dtype=torch.int8))
    assert gru.is_calibrated()


def test_several_layers_and_directions():
    gru = made(num_layers=2, bidirectional=True, dropout=0.5)
    y, h_n = gru(seeded(5, 3, C))
    assert y.shape == (5, 3, 2 * H)
    assert h_n.shape == (4, 3, H)


def test_calibration_data_of_another_kind():
    gru = made()
    gru.calibration_data = [seeded(5, 3, C)]
    with pytest.raises(
        CalibrationError, match="calibration_data to be a tensor or a PackedSequence, got list"
    ):
        gru(seeded(5, 3, C))
    gru.calibration_data = seeded(5, 3, C)
    gru(seeded(5, 3, C))


def test_parameter_files():
    gru = made()
    gru.adjust_quant_config("z_out", bitwidth=12)  # before calibration: of the configuration
    gru(seeded(5, 3, C))
    assert gru.get_quant_config("z_out")["exp2_inv"] == 12


def test_scales_can_be_learned():
    gru, plain = made(), made()
    gru.learn_scales = True
    x = seeded(5, 3, C)
    same(gru(x)[0], plain(x)[0])
    assert gru.log2_scale_l0[0] == math.log2(gru.get_quant_config("x")["scale"])
    gru.learn_scales = False
    same(gru(x)[0], plain(x)[0])
