"""operator_sqnr and operator_gain point at the operator whose scale is bad, and at no other."""

import copy

import pytest
import torch

from kept import shared
from quant_gru import QuantConfig, QuantGRU, convert_model, operator_gain, operator_sqnr
from sweeps import first_of

C, H = 16, 64
GATES = ("gate.z_pre", "gate.r_pre", "gate.g_pre")
COARSER = ("input.x", "matmul.Wx", "matmul.Rh", *GATES, "gate.z_out", "gate.g_out", "output.h")
COARSER += ("op.rRh", "op.old_contrib", "op.new_contrib")
OTHERS = ("matmul.Wx", "gate.z_pre", "gate.g_pre", "op.old_contrib", "output.h")


def calibrated(change=lambda gru: None, method="histogram", config=None, seed=0, **shape):
    """A quantized GRU, and data that calibration did not see."""
    torch.manual_seed(seed)
    gru = torch.nn.GRU(C, shape.pop("hidden", H), **shape)
    with torch.no_grad():
        change(gru)
    quantized = convert_model(gru, config or QuantConfig.int8()).eval()
    quantized.calibration_method = method
    quantized.calibrate(torch.randn(80, 8, C))
    quantized.finalize_calibration()
    quantized.use_quantization = True
    return quantized, torch.randn(40, 8, C)


@pytest.fixture(scope="module")
def good():
    return calibrated(hidden=24)


def rescaled(good, name, octaves):
    """The calibrated GRU with another scale for one operator."""
    gru = copy.deepcopy(good[0])
    found = gru.get_quant_config(name)
    zero_point = 0 if "contrib" in name or name in GATES else found["zero_point"]
    gru.adjust_quant_config(name, exp2_inv=found["exp2_inv"] - octaves, zero_point=zero_point)
    return gru, good[1]


@pytest.mark.parametrize("name", COARSER)
def test_a_scale_16_times_too_coarse_comes_first(good, name):
    gru, x = rescaled(good, name, 4)
    found = operator_sqnr(gru, x)
    assert next(iter(found)) == f"{name}_l0"
    assert [*found.remarks] == [f"{name}_l0"]
    said = found.remarks[f"{name}_l0"]
    scale = gru.get_quant_config(name)["scale"]
    assert said.startswith(f"scale {float(f'{scale:.6g}')} spends ")
    assert 4 <= int(said.split()[3]) <= 32
    flat = name.startswith("matmul") or name == "op.rRh" or name in GATES
    ends = "where the gate is not flat" if flat else "of this data"
    assert said.endswith("of the gate" if name.endswith("_out") else ends)
    assert f"{name}_l0: {said}" in str(found)


@pytest.mark.parametrize("name", OTHERS)
def test_a_scale_16_times_too_fine_comes_first(good, name):
    gru, x = rescaled(good, name, -4)
    found = operator_sqnr(gru, x)
    assert next(iter(found)) == f"{name}_l0"
    assert [*found.remarks] == [f"{name}_l0"]
    assert " clips " in found.remarks[f"{name}_l0"]


@pytest.mark.parametrize(("name", "octaves"), [("gate.z_pre", 4), ("output.h", 4), ("op.rRh", -4)])
def test_the_gain_points_at_it_too(good, name, octaves):
    gru, x = rescaled(good, name, octaves)
    gain = operator_gain(gru, x, progress=False)
    assert gain.rows[0].operator == name
    assert gain.remarks == operator_sqnr(gru, x).remarks
    assert f"{name}_l0: scale " in str(gain).splitlines()[1]
    later = [row.value for row in gain.rows if row.operator != name]
    assert later == sorted(later, reverse=True)


@pytest.mark.parametrize("bias", first_of([40, 20, 80], 1))
def test_gates_that_stay_open(bias):
    """'minmax' covers the open gates: few codes are left for the others."""

    def opened(gru):
        gru.bias_ih_l0[H : H + 4] += bias

    gru, x = calibrated(opened, "minmax")
    found = operator_sqnr(gru, x)
    assert {*found.remarks} == {"matmul.Wx_l0", "gate.z_pre_l0"}
    assert [*found][:2] == [*found.remarks]
    gain = operator_gain(gru, x, progress=False)
    assert gain.rows[0].operator in ("matmul.Wx", "gate.z_pre")
    assert gain.remarks == found.remarks
    gru, x = calibrated(opened)
    assert not operator_sqnr(gru, x).remarks


def test_the_sentence():
    """A scale of 1 where the arguments of the gates reach from -8 to 8 and beyond."""

    gru, x = calibrated(lambda gru: gru.weight_ih_l0[:H].mul_(50), "minmax")
    assert gru.get_quant_config("r_pre")["scale"] == 1
    said = operator_sqnr(gru, x).remarks["gate.r_pre_l0"]
    assert said == "scale 1.0 spends 16 of 256 codes where the gate is not flat"


def test_models_name_the_gru():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.GRU(C, 12, bidirectional=True)
            self.last = torch.nn.GRU(24, 8)

        def forward(self, x):
            return self.last(self.first(x)[0])[0]

    torch.manual_seed(0)
    model, batches = convert_model(Two(), "int8"), list(torch.randn(3, 20, 4, C))
    for gru, x in ((model.first, batches[0]), (model.last, torch.randn(20, 4, 24) / 2)):
        gru.calibrate(x)
        gru.finalize_calibration()
        gru.use_quantization = True
    exponent = model.first.get_quant_config("z_pre")["exp2_inv"]
    model.first.adjust_quant_config("z_pre", exp2_inv=exponent - 4, zero_point=0)
    names = {"first.gate.z_pre_l0", "first.gate.z_pre_l0_reverse"}
    assert {*[*operator_sqnr(model, batches)][:2]} == names
    for given in ({"data": batches}, {"metric": lambda m: -float(m(batches[0]).sum())}):
        gain = operator_gain(model, **given, progress=False)
        assert (gain.rows[0].module, gain.rows[0].operator) == ("first", "gate.z_pre")
        assert {*gain.remarks} == names


CONFIGS = {
    "int8": QuantConfig.int8(),
    "int8_wide": QuantConfig.int8_wide(),
    "w8a16": QuantConfig.w8a16(),
    "int16": QuantConfig.int16(),
    "free": QuantConfig.int8().replace_globals(scale_kind="free"),
    "4 bits": QuantConfig.int8().replace("z_pre", bitwidth=4).replace("h", bitwidth=4),
}


@pytest.mark.parametrize("name", first_of(CONFIGS, 3))
@pytest.mark.parametrize("factor", first_of((1, 0.3, 4), 1))
def test_calibrated_grus_get_no_remark(name, factor):
    def change(gru):
        for weight in gru.parameters():
            weight *= factor

    for seed in range(3):
        shape = {"hidden": (7, 20, 33)[seed], "num_layers": 1 + seed % 2, "bias": seed != 1}
        gru, x = calibrated(change, config=CONFIGS[name], seed=seed, **shape)
        for given in (x, x[:8], x[:1, :1]):
            assert not operator_sqnr(gru, given).remarks


@shared
def remembering():
    """A float GRU that was trained to remember the sign of the first input."""
    torch.manual_seed(0)
    gru, head = torch.nn.GRU(4, 16), torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], 0.02)
    for _ in range(200):
        x = torch.randn(12, 64, 4)
        wanted = (x[0, :, 0] > 0).float()
        output = head(gru(x)[0][-1])[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3
    return gru


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["int8", "int8_wide"])
def test_a_trained_gru_gets_no_remark(preset):
    quantized = QuantGRU(4, 16, config=preset).eval()
    quantized.load_state_dict(remembering().state_dict())
    quantized.calibrate(torch.randn(20, 64, 4))
    quantized.finalize_calibration()
    quantized.use_quantization = True
    x = torch.randn(20, 64, 4)
    assert not operator_sqnr(quantized, x).remarks
    assert not operator_gain(quantized, x, progress=False).remarks
