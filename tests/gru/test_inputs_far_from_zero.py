"""Inputs far from 0: the corrected input bias, and ranges of input.x that exclude 0."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from kept import kept
from quant_gru import (
    FrozenQuantGRU,
    ParameterError,
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    QuantGRUWarning,
    export_onnx,
    operator_sqnr,
)
from quant_gru.kernels.cpu import executor as cpu
from sweeps import first_of

VARIANTS = cpu.choices()


def decibels(real, ours):
    return float(10 * torch.log10(real.square().mean() / (real - ours).square().mean()))


@kept
def offset_gru(config, offset, seed=0, C=8, H=32, **options):
    """A GRU whose inputs lie in [offset, offset + 1], calibrated, and its float model."""
    torch.manual_seed(seed)
    model = torch.nn.GRU(C, H, **options)
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.startswith("bias_ih_l0"):
                bias -= getattr(model, name.replace("bias", "weight")).sum(1) * offset
    x = torch.rand(40, 16, C) + offset
    gru = QuantGRU(C, H, config=config, **options).eval()
    gru.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantGRUWarning)
        gru.calibrate(x)
        gru.finalize_calibration()
    gru.use_quantization = True
    return gru, model, x


def excluding(config, **changes):
    return config.replace_globals(input_excludes_zero=True, **changes)


@pytest.mark.parametrize(
    ("config", "offset", "least"),
    [
        (QuantConfig.w8a16(), 100, 45),
        (QuantConfig.w8a16(), 10, 50),
        (QuantConfig.int16(), 100, 50),
        (excluding(QuantConfig.int8_wide()), 100, 37),
        (excluding(QuantConfig.int8_wide()), -100, 37),
        (excluding(QuantConfig.int8(), scale_kind="free"), 1000, 35),
    ],
)
def test_accuracy(config, offset, least):
    gru, model, x = offset_gru(config, offset)
    with torch.no_grad():
        assert decibels(model(x)[0], gru(x)[0]) > least


def test_the_correction_is_what_makes_the_difference():
    for correct_bias in (False, True):
        config = QuantConfig.w8a16().replace_globals(correct_bias=correct_bias)
        gru, model, x = offset_gru(config, 100)
        with torch.no_grad():
            assert (decibels(model(x)[0], gru(x)[0]) > 40) is correct_bias
        assert (gru._state.scales[0][0].input_mean is not None) is correct_bias


CONFIGS = {
    "int8": excluding(QuantConfig.int8()),
    "free": excluding(QuantConfig.int8_wide(), scale_kind="free", correct_bias=False),
    "unsigned": excluding(QuantConfig.int8().replace("x", bitwidth=5, is_unsigned=True)),
    "w8a16": excluding(QuantConfig.w8a16()),
    "wide": excluding(QuantConfig.int8().replace("W", bitwidth=20).replace("Wx", bitwidth=24)),
}


@pytest.mark.parametrize("name", first_of(CONFIGS, 3))
@pytest.mark.parametrize(
    "options", first_of([{}, {"num_layers": 2, "bidirectional": True, "bias": False}], 1)
)
def test_every_executor_gives_the_same(monkeypatch, name, options):
    gru, _, x = offset_gru(CONFIGS[name], 50, C=5, H=9, **options)
    assert gru._plan().is_far
    x[3, 2] = torch.nan
    x[4, 5, 1] = -torch.inf
    x[:, 7] = 0  # below all codes
    packed = pack_padded_sequence(x[:6, :4], torch.tensor([6, 5, 2, 1]))
    found = []
    for variant in VARIANTS:
        monkeypatch.setenv(cpu.VARIABLE, variant)
        with torch.no_grad():
            codes = gru.trace_codes(x[:, 6:])
            found.append([*gru(x), gru(packed)[0].data, *codes.values()])
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    monkeypatch.undo()
    inputs = gru._plan().cells[0][0]
    assert inputs.border.is_outside
    real = torch.round(x[:, 8:] / inputs.border.scale) + inputs.border.zero_point
    expected = real.clamp(inputs.border.lo, inputs.border.hi).to(torch.int64)
    assert torch.equal(gru.trace_codes(x[:, 8:])["input.x_l0"].to(torch.int64), expected)


def test_bias_and_codes_by_hand():
    """b' = b + s_W o sum_k W[c,k]; the cell's zero point is the code nearest to 0."""
    gru, _, _ = offset_gru(excluding(QuantConfig.int8(), correct_bias=False), 100)
    cell = gru._plan().cells[0][0]
    assert cell.x.zero_point == -128
    offset = cell.border.scale * (-128 - cell.border.zero_point)
    assert 99.9 < offset < 100.1
    b = gru.bias_ih_l0.detach()
    W = torch.cat((cell.weights.W[32:64], cell.weights.W[:32], cell.weights.W[64:])).long()
    s_W = torch.tensor(gru.get_quant_config("W")["scale"])
    s_b = torch.tensor(gru.get_quant_config("bw")["scale"])
    moved = b.double() + s_W.double() * offset * W.sum(1)
    expected = torch.round(moved.float() / s_b).clamp(-128, 127)
    bw = torch.cat((cell.weights.bw[32:64], cell.weights.bw[:32], cell.weights.bw[64:]))
    assert torch.equal(bw.float(), expected)


@pytest.mark.parametrize("config", [QuantConfig.w8a16(), excluding(QuantConfig.int8_wide())])
@pytest.mark.parametrize("bias", [True, False])
def test_training_follows_the_weights(config, bias):
    gru, _, x = offset_gru(config, 30, C=5, H=8, bias=bias)
    gru.train()
    for _ in range(3):
        with torch.no_grad():
            for weight in gru.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
        fresh = QuantGRU(5, 8, config=config, bias=bias, use_quantization=True).eval()
        fresh.load_state_dict(gru.state_dict())
        with torch.no_grad():
            expected = fresh(x)[0]
            assert torch.equal(fresh.freeze()(x)[0], expected)
        y = gru(x)[0]
        assert torch.equal(y.detach(), expected)
        y.sum().backward()


def test_gradients_are_those_of_the_real_input():
    gru, model, x = offset_gru(excluding(QuantConfig.int16()), 40, C=4, H=6)
    gru.train()
    inputs = [x[:8].clone().requires_grad_() for _ in range(2)]
    for each, given in ((gru, inputs[0]), (model, inputs[1])):
        each(given)[0].square().sum().backward()
    pairs = [(inputs[0].grad, inputs[1].grad)]
    pairs += [(p.grad, dict(model.named_parameters())[n].grad) for n, p in gru.named_parameters()]
    for ours, theirs in pairs:
        assert torch.allclose(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))


def test_learned_scales_leave_the_input_alone():
    gru, _, x = offset_gru(excluding(QuantConfig.int8_wide()), 100, C=4, H=6)
    gru.learn_scales = True
    gru.train()
    before = gru.get_quant_config("x")
    optimizer = torch.optim.SGD(gru.parameters(), lr=0.1)
    gru(x[:8])[0].square().sum().backward()
    optimizer.step()
    assert gru.get_quant_config("x") == before
    with torch.no_grad():
        assert gru(x)[0].isfinite().all()


def test_streams_and_files(tmp_path):
    gru, _, x = offset_gru(excluding(QuantConfig.int8_wide()), 100, C=4, H=6)
    with torch.no_grad():
        expected = gru(x)[0]
    stream = gru.stream(16)
    assert torch.equal(torch.stack([stream(step) for step in x]), expected)
    gru.freeze().save(tmp_path / "gru.safetensors")
    assert torch.equal(FrozenQuantGRU.load(tmp_path / "gru.safetensors")(x)[0], expected)
    gru.export_quant_params(tmp_path / "params.json")
    other = QuantGRU(4, 6, use_quantization=True).eval()
    other.load_state_dict({k: v for k, v in gru.state_dict().items() if k != "quantization"}, False)
    other.load_quant_params(tmp_path / "params.json")
    with torch.no_grad():
        assert torch.equal(other(x)[0], expected)
    document = json.loads((tmp_path / "params.json").read_text())
    document["config"]["GRU_config"]["default_config"]["input_excludes_zero"] = False
    (tmp_path / "params.json").write_text(json.dumps(document))
    with pytest.raises(ParameterError, match=r"zero_point.*input\.x"):
        other.load_quant_params(tmp_path / "params.json")


def test_files_of_version_1_have_no_correction(tmp_path):
    """Parameters of earlier versions give the codes that they gave."""
    plain, _, x = offset_gru(QuantConfig.w8a16().replace_globals(correct_bias=False), 10)
    path: Path = tmp_path / "params.json"
    plain.export_quant_params(path)
    document = json.loads(path.read_text())
    document["version"] = 1
    for cell in document["cells"]:
        assert cell.pop("input_mean") is None
    for field in ("correct_bias", "input_excludes_zero"):
        del document["config"]["GRU_config"]["default_config"][field]
    path.write_text(json.dumps(document))
    other, _, _ = offset_gru(QuantConfig.w8a16(), 10)
    other.load_quant_params(path)
    assert other.config == plain.config
    with torch.no_grad():
        assert torch.equal(other(x)[0], plain(x)[0])
    document["cells"][0]["input_mean"] = {"exp2_inv": 0, "values": [1] * 8}
    path.write_text(json.dumps(document))
    with pytest.raises(ParameterError, match="version to be 2"):
        other.load_quant_params(path)


def test_a_range_around_0_is_as_without_the_option():
    torch.manual_seed(0)
    x = torch.randn(20, 4, 8)
    found = []
    for config in (QuantConfig.int8(), excluding(QuantConfig.int8())):
        torch.manual_seed(1)
        gru = QuantGRU(8, 4, config=config)
        gru.calibrate(x)
        gru.finalize_calibration()
        found.append(gru.get_quant_config())
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
@pytest.mark.parametrize("kind", ["pot", "free"])
def test_every_method_covers_the_band(method, kind):
    gru = QuantGRU(3, 4, config=excluding(QuantConfig.int8(), scale_kind=kind))
    gru.calibration_method = method
    x = torch.rand(500, 4, 3) * 2 - 37
    gru.calibrate(x)
    gru.finalize_calibration()
    border = gru._plan().cells[0][0].border
    back = border.dequantize(border.quantize(x))
    assert float((back - x).abs().max()) <= (0.02 if method == "percentile" else 2.0**-6)


def test_a_wasted_range_warns():
    x = torch.linspace(100, 101, 120).reshape(10, 4, 3)
    said = r"'input\.x'.*\[100, 101\].*of 256 codes.*input_excludes_zero"
    gru = QuantGRU(3, 4, config=QuantConfig.int8())
    gru.calibrate(x)
    with pytest.warns(QuantGRUWarning, match=said):
        gru.finalize_calibration()
    for config in (QuantConfig.int16(), excluding(QuantConfig.int8())):
        gru = QuantGRU(3, 4, config=config)
        gru.calibrate(x)
        gru.finalize_calibration()


@pytest.mark.parametrize("changes", [{"bitwidth": 16}, {"bitwidth": 6}, {"is_unsigned": True}])
def test_adjusted_inputs_keep_their_range(changes):
    gru, _, x = offset_gru(excluding(QuantConfig.int8()), 100, C=3, H=4)
    gru.adjust_quant_config("x", **changes)
    border = gru._plan().cells[0][0].border
    assert border.is_outside
    assert float((border.dequantize(border.quantize(x)) - x).abs().max()) <= 2.0**-6
    gru.adjust_quant_config("x", is_symmetric=True, is_unsigned=False)
    assert not gru._plan().is_far


def test_operators_report_the_real_input():
    gru, _, x = offset_gru(excluding(QuantConfig.int8_wide()), 100)
    sqnr = operator_sqnr(gru, x)
    assert sqnr["input.x_l0"] > 80  # a hundred, within 1/512
    assert sqnr["weight.bw_l0"] > 20


def test_too_narrow_and_too_far_falls_back():
    x = 1e6 + torch.rand(10, 4, 3)
    gru = QuantGRU(3, 4, config=excluding(QuantConfig.int8()))
    gru.calibrate(x)
    with pytest.warns(QuantGRUWarning, match=r"input\.x"):
        gru.finalize_calibration()
    assert not gru._plan().is_far


def test_exports_of_integers_and_those_that_cannot_say_so(tmp_path):
    gru, _, x = offset_gru(excluding(QuantConfig.int8()), 100, C=3, H=4, num_layers=2)
    x[2, 2] = 0
    x[3, 1] = torch.inf
    export_onnx(gru, tmp_path / "gru.onnx", x)  # compares the codes of ONNX Runtime
    for profile in ("qdq", "node"):
        with pytest.raises(QuantGRUError, match=r"zero point of input\.x.*'integer'"):
            export_onnx(gru, tmp_path / "gru.onnx", x[:2], profile=profile)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        gru.export_encodings(tmp_path / "gru.encodings")
    assert any(
        "input_l0" in str(each.message) and "is no code" in str(each.message) for each in found
    )
