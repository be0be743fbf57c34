"""Every exporter and reader keeps the rule of rounding, or refuses a rule that it cannot say."""

import json

import pytest
import torch

from kept import kept
from quant_gru import (
    FrozenQuantGRU,
    ParameterError,
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    export_onnx,
)
from quant_gru.config.fields import ROUNDINGS

RULES = [rule for rule in ROUNDINGS if rule != "half_even"]


@kept
def calibrated(**fields):
    torch.manual_seed(1)
    config = QuantConfig.int8().replace_globals(tie_x_and_h=True, **fields)
    gru = QuantGRU(4, 6, num_layers=2, config=config, use_quantization=True)
    gru.calibrate(torch.randn(12, 5, 4))
    gru.finalize_calibration()
    return gru.eval()


def rules_of(gru):
    cells = [cell for layer in gru._plan().cells for cell in layer]
    return {(cell.frozen.rounding, cell.border.rounding, cell.h.rounding) for cell in cells}


def inputs(gru):
    """Values of which half are ties."""
    scale = gru.get_quant_config("x")["scale"] / 2
    return torch.randint(-80, 80, (9, 3, 4)) * scale


@pytest.mark.parametrize("profile", ["qdq", "node"])
@pytest.mark.parametrize("fields", [*({"rounding": r} for r in RULES), {"rounding_input": "floor"}])
def test_quantize_linear_has_one_rule(fields, profile, tmp_path):
    pytest.importorskip("onnx_ir")
    gru = calibrated(**fields)
    with pytest.raises(QuantGRUError, match=r"to be 'half_even' for profile .* use profile 'integ"):
        export_onnx(gru, tmp_path / "gru.onnx", inputs(gru), profile=profile)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fields", [*({"rounding": r} for r in RULES), {"rounding_input": "floor"}])
def test_encodings_have_no_rule(fields, frozen, tmp_path):
    gru = calibrated(**fields)
    export = gru.freeze().export_encodings if frozen else gru.export_encodings
    with pytest.raises(QuantGRUError, match=r"Expected rounding and rounding_input to be 'half_ev"):
        export(tmp_path / "gru.encodings")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("inner", [None, "floor", "half_even"])
@pytest.mark.parametrize("rule", RULES)
def test_onnx_integer(rule, inner, tmp_path):
    pytest.importorskip("onnx_ir")
    pytest.importorskip("onnxruntime")
    gru = calibrated(rounding=rule, rounding_input=inner)
    report = export_onnx(gru, tmp_path / "gru.onnx", inputs(gru), profile="integer")
    assert all(each.values and not each.differing for each in report.values())


@pytest.mark.parametrize("rule", RULES)
def test_files_keep_the_rule(rule, tmp_path):
    gru = calibrated(rounding=rule, rounding_input="floor")
    x = inputs(gru)
    wanted = gru(x)[0]
    gru.export_quant_params(tmp_path / "p.json")
    other = QuantGRU(4, 6, num_layers=2, use_quantization=True).eval()
    other.load_state_dict(gru.state_dict())
    assert rules_of(other) == rules_of(gru) == {(rule, "floor", "floor")}
    assert torch.equal(other(x)[0], wanted)
    again = calibrated()
    again.load_quant_params(tmp_path / "p.json")
    assert rules_of(again) == rules_of(gru)
    frozen = gru.freeze()
    frozen.save(tmp_path / "gru.safetensors")
    loaded = FrozenQuantGRU.load(tmp_path / "gru.safetensors")
    assert rules_of(loaded) == rules_of(gru)
    assert torch.equal(loaded(x)[0], wanted)
    restored = FrozenQuantGRU.from_state_dict(frozen.state_dict())
    assert torch.equal(restored(x)[0], wanted)
    codes = gru.trace_codes(x)["output.h_l1"]
    scale = gru.get_quant_config("h", 1)
    real = (codes - scale["zero_point"]) * scale["scale"]
    assert torch.equal(real.to(torch.float32), wanted)


@pytest.mark.parametrize("rule", RULES)
def test_frozen_files_say_the_rule_in_their_document(rule, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    calibrated(rounding=rule).freeze().save(tmp_path / "gru.safetensors")
    with safetensors.safe_open(tmp_path / "gru.safetensors", framework="pt") as file:
        document = json.loads(file.metadata()["document"])
    assert document["config"]["GRU_config"]["default_config"]["rounding"] == rule


def test_a_file_with_an_unknown_rule_is_refused(tmp_path):
    calibrated().export_quant_params(tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    document["config"]["GRU_config"]["default_config"]["rounding"] = "nearest"
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(ParameterError, match=r"Expected rounding to be 'half_even'"):
        calibrated().load_quant_params(tmp_path / "p.json")


@pytest.mark.parametrize("rule", RULES)
def test_streams_and_live_weights(rule):
    gru = calibrated(rounding=rule)
    x = inputs(gru)
    y = gru(x)[0]
    stream = gru.stream(batch_size=3)
    assert torch.equal(torch.stack([stream(row) for row in x]), y)
    optimizer = torch.optim.SGD(gru.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        gru.train()(x)[0].square().mean().backward()
        optimizer.step()
        gru.eval()
        found = gru(x)[0]
        fresh = QuantGRU(4, 6, num_layers=2, use_quantization=True).eval()
        fresh.load_state_dict(gru.state_dict())
        assert torch.equal(found, fresh(x)[0])
    assert not torch.equal(found, y)
