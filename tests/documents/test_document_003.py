"""The snippets of the document on the bit-width file, and its examples (config_examples.py)."""

import json

import pytest
import torch
from config_examples import EXAMPLES

from quant_gru import QuantConfig, QuantGRU, default_config_path
from quant_gru.config import OPERATORS

UNSIGNED = ("gate.z_out", "gate.r_out")

# those of the document, in its order
EXAMPLE_1, EXAMPLE_2, EXAMPLE_3 = map(json.dumps, EXAMPLES.values())


@pytest.fixture
def calibration_loader():
    return [torch.randn(10, 8, 64) for _ in range(3)]


@pytest.fixture
def input_data():
    return torch.randn(10, 4, 64)


@pytest.fixture
def example(tmp_path):
    def write(text):
        path = tmp_path / "gru_quant_bitwidth_config.json"
        path.write_text(text)
        return path

    return write


def run_flow(gru, calibration_loader, input_data):
    """Calibration and inference, as both flows of the document have them."""
    gru.calibrating = True
    for batch in calibration_loader:
        gru(batch)
    gru.calibrating = False
    gru.finalize_calibration()

    gru.use_quantization = True
    output, h_n = gru(input_data)

    assert output.shape == (10, 4, 128)
    assert torch.equal(h_n[0], output[-1])
    gru.use_quantization = False
    real = gru(input_data)[0]
    assert not torch.equal(output, real)
    return torch.cosine_similarity(real.flatten(), output.flatten(), dim=0)


def test_flow_with_a_file(calibration_loader, input_data, tmp_path):
    path = tmp_path / "config" / "gru_quant_bitwidth_config.json"
    path.parent.mkdir()
    path.write_bytes(default_config_path().read_bytes())
    gru = QuantGRU(input_size=64, hidden_size=128)
    gru.load_bitwidth_config(str(path))
    assert run_flow(gru, calibration_loader, input_data) > 0.999


@pytest.mark.parametrize(
    ("arguments", "least"), [((8,), 0.99), ((16, False), 0.99999)], ids=["8", "16 asymmetric"]
)
def test_flow_without_a_file(arguments, least, calibration_loader, input_data):
    gru = QuantGRU(input_size=64, hidden_size=128)
    gru.set_all_bitwidth(*arguments)
    assert run_flow(gru, calibration_loader, input_data) > least


def test_without_setting_anything_all_is_8_bits_symmetric():
    expected = {"bitwidth": 8, "is_symmetric": True, "scale": None, "zero_point": None}
    for name, found in QuantGRU(64, 128).get_quant_config().items():
        assert found == {**expected, "is_unsigned": name in UNSIGNED, "exp2_inv": None}


def test_export_import_adjust_get(tmp_path, calibration_loader, input_data, capsys):
    gru = QuantGRU(input_size=64, hidden_size=128)
    gru.load_bitwidth_config(default_config_path())
    for batch in calibration_loader:
        gru.calibrate(batch)
    gru.finalize_calibration()
    path = str(tmp_path / "quant_params.json")

    gru.export_quant_params(path)

    gru2 = QuantGRU(input_size=64, hidden_size=128)
    gru2.load_state_dict(gru.state_dict(), strict=False)
    gru2.load_quant_params(path)

    gru2.use_quantization = True
    expected = gru.trace_codes(input_data)
    assert all(torch.equal(expected[k], v) for k, v in gru2.trace_codes(input_data).items())
    assert torch.equal(gru2(input_data)[0], gru(input_data)[0])

    before = gru.get_quant_config("z_out")
    gru.adjust_quant_config("z_out", bitwidth=14)

    config = gru.get_quant_config("z_out")
    print(config)
    assert "'bitwidth': 14, 'is_symmetric': False, " in capsys.readouterr().out
    assert before["exp2_inv"] == 8
    assert config["exp2_inv"] == 14
    assert config["scale"] == 2.0**-14
    finer = gru(input_data)[0]
    assert not torch.equal(finer, gru2(input_data)[0])


def test_float_weights_and_the_file_are_enough(tmp_path, calibration_loader, input_data):
    """The file holds no weights, and needs no quantization in the checkpoint."""
    gru = QuantGRU(input_size=64, hidden_size=128, config=QuantConfig.int8())
    gru.calibrate(calibration_loader[0])
    gru.finalize_calibration()
    gru.use_quantization = True
    path = tmp_path / "quant_params.json"
    gru.export_quant_params(path)
    gru2 = QuantGRU(input_size=64, hidden_size=128)
    weights = {name: p.detach() for name, p in gru.named_parameters()}
    gru2.load_state_dict(weights, strict=False)
    assert not gru2.is_calibrated()
    gru2.load_quant_params(path)
    assert gru2.is_calibrated()
    assert gru2.config == gru.config
    gru2.use_quantization = True
    assert torch.equal(gru2(input_data)[0], gru(input_data)[0])


def test_example_1_all_operators(example):
    gru = QuantGRU(64, 128)
    gru.load_bitwidth_config(example(EXAMPLE_1))
    assert gru.use_quantization
    found = gru.get_quant_config()
    assert tuple(found) == OPERATORS
    for name, operator in json.loads(EXAMPLE_1)["GRU_config"]["operator_config"].items():
        assert {field: found[name][field] for field in operator} == operator


@pytest.mark.parametrize("text", [EXAMPLE_2, EXAMPLE_3], ids=["example 2", "example 3"])
def test_examples_that_name_exceptions(example, text, calibration_loader, input_data, capsys):
    gru = QuantGRU(64, 128)
    gru.load_bitwidth_config(example(text), verbose=True)
    told = capsys.readouterr().out
    assert told.count("input.x") == 1  # takes its default, reported once
    named = json.loads(text)["GRU_config"]["operator_config"]
    for name, found in gru.get_quant_config().items():
        default = {"bitwidth": 8, "is_symmetric": True, "is_unsigned": name in UNSIGNED}
        expected = named.get(name, default)
        assert {field: found[field] for field in expected} == expected
    run_flow(gru, calibration_loader, input_data)
    assert gru._plan().cells[0][0].weights.W.dtype is (
        torch.int16 if "weight.W" in named else torch.int8
    )


@pytest.mark.parametrize(
    ("is_symmetric", "is_unsigned", "limits", "zero_is_0"),
    [
        (True, False, (-128, 127), True),
        (False, False, (-128, 127), False),
        (False, True, (0, 255), False),
        (True, True, (0, 255), True),
    ],
    ids=["int8 symmetric", "int8", "uint8", "uint8 symmetric"],
)
def test_table_of_symmetry_and_signedness(is_symmetric, is_unsigned, limits, zero_is_0):
    fields = {"is_symmetric": is_symmetric, "is_unsigned": is_unsigned}
    gru = QuantGRU(4, 3, config=QuantConfig().replace("x", **fields))
    x = torch.randn(50, 2, 4) + 0.7
    gru.calibrate(x)
    gru.finalize_calibration()
    found = gru.get_quant_config("x")
    assert (found["zero_point"] == 0) is zero_is_0
    assert found["scale"] == 2.0 ** -found["exp2_inv"]
    far = torch.tensor([-1e6, 1e6])[:, None, None].expand(2, 1, 4)
    codes = gru.trace_codes(far)["input.x_l0"]
    assert (codes.min().item(), codes.max().item()) == limits
    # int_value = round(float_value / scale) + zero_point
    inside = gru.trace_codes(x)["input.x_l0"].long()
    formula = torch.round(x / found["scale"]).long() + found["zero_point"]
    assert torch.equal(inside, formula.clamp(*limits))
