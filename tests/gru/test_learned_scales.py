"""Learned activation scales: what they are, their gradients, and that they get better."""

import copy
import math

import pytest
import torch
from gru_helpers import CONFIGS, C, H, quantized, same, seeded, states

from quant_gru import ConfigError, QuantGRU, QuantGRUError
from quant_gru.config import CALIBRATED
from quant_gru.kernels import dispatch
from quant_gru.kernels.cpu import executor as cpu
from sweeps import first_of

DEEP = {"num_layers": 2, "bidirectional": True}
T, N = 7, 3


def learning(config="pot8", **options):
    return quantized(config, learn_scales=True, **options)


def scale_of(gru, name):
    return gru.get_quant_config(name)["scale"]


@pytest.mark.parametrize("config", first_of(["free8-fused", "pot8", "w8a16-fused"], 1))
def test_parameters_are_the_logarithms_of_the_scales(config):
    gru = learning(config, **DEEP)
    names = [name for name, _ in gru.named_parameters() if name.startswith("log2")]
    assert names == [f"log2_scale_l{i}{d}" for i in (0, 1) for d in ("", "_reverse")]
    values = gru.log2_scale_l0.tolist()
    for name, value in zip(CALIBRATED, values, strict=True):
        scale = gru.get_quant_config(name)["scale"]
        assert value == pytest.approx(0 if scale is None else math.log2(scale), abs=1e-6)
    same(gru(seeded(T, N, C)), quantized(config, **DEEP)(seeded(T, N, C)))


@pytest.mark.parametrize("config", ["pot8", "free8"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_scales_follow_the_parameters(config, mode):
    gru = learning(config).train(mode == "train")
    x = seeded(T, N, C)
    y = gru(x)[0]
    before = scale_of(gru, "gate.z_pre")
    with torch.no_grad():
        gru.log2_scale_l0[CALIBRATED.index("gate.z_pre")] += 1.3
    after = scale_of(gru, "gate.z_pre")
    expected = 2 * before if config == "pot8" else before * 2**1.3
    assert after == pytest.approx(expected, rel=1e-6)
    assert not torch.equal(gru(x)[0], y)
    other = quantized(config)
    other.adjust_quant_config("gate.z_pre", scale=after)
    same(gru(x)[0].detach(), other(x)[0].detach())
    same(gru.freeze()(x), other.freeze()(x))


def test_parameters_follow_the_scales(tmp_path):
    gru = learning()
    gru.adjust_quant_config("output.h", exp2_inv=5)
    assert gru.log2_scale_l0[CALIBRATED.index("output.h")] == -5
    gru.export_quant_params(tmp_path / "p.json")
    other = learning()
    other.load_quant_params(tmp_path / "p.json")
    same(other.log2_scale_l0, gru.log2_scale_l0)
    with torch.no_grad():
        gru.log2_scale_l0[0] += 1
    third = QuantGRU(C, H, learn_scales=True, config=CONFIGS["pot8"])
    third.load_state_dict(gru.state_dict())
    same(third.eval()(seeded(T, N, C)), gru(seeded(T, N, C)))
    kept = gru.log2_scale_l0.tolist()
    gru.reset_parameters()
    assert gru.log2_scale_l0.tolist() == pytest.approx(kept)
    copied = copy.deepcopy(gru)
    same(copied(seeded(T, N, C)), gru(seeded(T, N, C)))


@pytest.mark.skipif(cpu.chosen() == cpu.REFERENCE, reason="no native kernels")
def test_states_go_back_through_the_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "straight_through", lambda *_: pytest.fail("in float64"))
    gru = learning(**DEEP).train()
    gru(seeded(T, N, C))[0].square().sum().backward()
    assert gru.log2_scale_l0.grad.norm() > 0


@pytest.mark.parametrize("config", ["pot8", "free8", "pot8-fused"])
def test_gradients_of_a_single_step(config):
    """Against the formula, operator by operator, from the codes of one step."""
    gru = learning(config)
    x, hx = seeded(1, N, C, scale=2.0), states(gru, N, scale=1.5)
    weight = seeded(1, N, H, seed=9)
    (gru(x, hx)[0] * weight).sum().backward()
    found = gru.log2_scale_l0.grad.double()
    codes = gru.trace_codes(x, hx)
    q = {name: gru.get_quant_config(name) for name in (*CALIBRATED, "gate.z_out", "gate.g_out")}

    def real(name):
        zero = q[name]["zero_point"] or 0
        return (codes[f"{name}_l0"][0].double() - zero) * q[name]["scale"]

    z, g = real("gate.z_out"), real("gate.g_out")
    h0 = (codes["output.h0_l0"].double() - q["output.h"]["zero_point"]) * q["output.h"]["scale"]
    fused = q["op.new_contrib"]["scale"] is None
    old, new = (z * h0, (1 - z) * g) if fused else (real("op.old_contrib"), real("op.new_contrib"))

    def slope(name, value):
        """d(dequantized)/d(scale) for a value that is quantized, and where it passes."""
        entry = q[name]
        lo = 0 if entry["is_unsigned"] else -(2 ** (entry["bitwidth"] - 1))
        hi = lo + 2 ** entry["bitwidth"] - 1
        code = torch.round(value / entry["scale"]) + entry["zero_point"]
        inside = (code >= lo) & (code <= hi)
        zero_free = code.clamp(lo, hi) - entry["zero_point"]
        return zero_free - inside * value / entry["scale"], inside

    def logarithm(name, total, count):
        entry = q[name]
        unsigned = entry["is_unsigned"]
        hi = 2 ** entry["bitwidth"] - 1 if unsigned else 2 ** (entry["bitwidth"] - 1) - 1
        weight = 1 / math.sqrt(count * (hi - entry["zero_point"]))
        return total * entry["scale"] * math.log(2) * weight

    d = weight[0].double()
    of_h, inside = slope("output.h", old + new)
    dh = d * inside
    # the state before the step has the same scale: through the direct path and the gates
    if not fused:
        of_new, _ = slope("op.new_contrib", (1 - z) * g)
        expected = logarithm("op.new_contrib", (dh * of_new).sum(), N * H)
        assert found[CALIBRATED.index("op.new_contrib")] == pytest.approx(float(expected), rel=1e-4)
        of_old, _ = slope("op.old_contrib", z * h0)
        expected = logarithm("op.old_contrib", (dh * of_old).sum(), N * H)
        assert found[CALIBRATED.index("op.old_contrib")] == pytest.approx(float(expected), rel=1e-4)
    else:
        assert not found[CALIBRATED.index("op.new_contrib")]
    gru.zero_grad()
    hx = hx.requires_grad_()
    (gru(x, hx)[0] * weight).sum().backward()
    # what reaches hx passed its mask; take it where hx was inside, all of it here or the clamp's
    at_start, inside0 = slope("output.h", hx.detach()[0].double())
    if inside0.all():
        total = (d * of_h).sum() + (hx.grad[0].double() * at_start).sum()
        expected = logarithm("output.h", total, N * H)
        assert found[CALIBRATED.index("output.h")] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("config", ["pot8", "free8"])
@pytest.mark.parametrize("options", first_of([{}, DEEP], 1))
def test_bad_scales_get_better(config, options):
    """Scales alone are trained, from ones that are four times too large, towards float outputs."""
    x = seeded(20, 4, C)
    gru = learning(config, data=x, **options).train()
    gru.use_quantization = False
    target = gru(x)[0].detach()
    gru.use_quantization = True
    good = float((gru(x)[0].detach() - target).square().mean())
    scales = [p for name, p in gru.named_parameters() if name.startswith("log2")]
    with torch.no_grad():
        for p in scales:
            p += 2
    optimizer = torch.optim.Adam(scales, lr=0.05)
    losses = []
    for _ in range(60):
        loss = (gru(x)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if losses[-1] < losses[0] / 4:
            break
    assert losses[0] > 5 * good
    assert losses[-1] < losses[0] / 4


def test_frozen_scales_cost_nothing(monkeypatch):
    gru = learning().train()
    gru.log2_scale_l0.requires_grad_(False)
    monkeypatch.setattr(
        "quant_gru.autograd.backward_pass.scale_gradients", lambda *_: pytest.fail("computed")
    )
    gru(seeded(T, N, C))[0].sum().backward()
    assert gru.log2_scale_l0.grad is None


def test_a_scale_that_is_not_finite_is_left():
    gru = learning()
    before = scale_of(gru, "gate.r_pre")
    with torch.no_grad():
        gru.log2_scale_l0[CALIBRATED.index("gate.r_pre")] = torch.nan
    assert scale_of(gru, "gate.r_pre") == before


def test_tracing_is_refused():
    with pytest.raises(QuantGRUError, match="learn_scales to be False"):
        torch.export.export(learning(), (seeded(T, N, C),))


@pytest.mark.parametrize("config", ["pot8", "free8"])
def test_learning_is_switched_on_and_off(config):
    gru, plain = quantized(config, **DEEP), quantized(config, **DEEP)
    x = seeded(T, N, C)
    same(gru(x), plain(x))
    gru.learn_scales = True
    made = learning(config, **DEEP)
    assert list(gru.state_dict()) == list(made.state_dict())
    for got, expected in zip(gru.parameters(), made.parameters(), strict=True):
        same(got, expected)
    same(gru(x), plain(x))
    kept = gru.log2_scale_l0
    gru.learn_scales = True
    assert gru.log2_scale_l0 is kept
    with torch.no_grad():
        kept[CALIBRATED.index("gate.z_pre")] += 1.3
    gru.learn_scales = False
    assert list(gru.state_dict()) == list(plain.state_dict())
    moved = scale_of(gru, "gate.z_pre")
    assert moved == pytest.approx(scale_of(plain, "gate.z_pre") * 2**1.3, rel=0.3)
    plain.adjust_quant_config("gate.z_pre", scale=moved, layer=0, reverse=False)
    same(gru(x), plain(x))
    # scales are known to tracers again
    same(torch.vmap(lambda x: gru(x)[0])(x[None])[0], plain(x)[0])


def test_switched_on_before_there_are_scales():
    gru = QuantGRU(C, H, config=CONFIGS["pot8"])
    gru.learn_scales = True
    assert not gru.log2_scale_l0.any()
    gru.calibrate(seeded(T, N, C))
    gru.finalize_calibration()
    assert gru.log2_scale_l0[0] == math.log2(scale_of(gru, CALIBRATED[0]))
    gru.reset_calibration()
    gru.learn_scales = False
    assert not gru.is_calibrated()


@pytest.mark.parametrize("value", ["yes", 1, 0, None, [True]])
def test_values_that_are_neither_true_nor_false(value):
    with pytest.raises(ConfigError, match="learn_scales to be True or False, got"):
        QuantGRU(C, H, learn_scales=value)
    gru = learning()
    with pytest.raises(ConfigError, match="learn_scales to be True or False, got"):
        gru.learn_scales = value
    assert gru.learn_scales
    assert "log2_scale_l0" in gru.state_dict()
