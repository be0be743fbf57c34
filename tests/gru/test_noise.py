"""Zoneout and recurrent dropout: integers as defined, gradients, and the float mode beside them."""

import numpy as np
import pytest
import torch
from gru_helpers import C, H, packed, quantized, same, seeded, states, unpacked
from torch import nn

from quant_gru import ConfigError, FrozenQuantGRU, ParameterError, QuantGRU, QuantGRUError
from quant_gru.execution.noise import draw
from quant_gru.integer import cell as reference
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels import dispatch
from quant_gru.kernels.cpu import executor as cpu

DEEP = {"num_layers": 2, "bidirectional": True}
T, N = 7, 3


def distance(a, b):
    return float((a - b).norm() / b.norm())


def step_codes(gru, x, before):
    """Codes of output.h that the gates of a single layer give, from the states before each step."""
    cell = gru._plan().cells[0][0]
    return reference.trace(cell, cell.x.quantize(x), before).codes["output.h"]


class TestZoneoutInEval:
    @pytest.mark.parametrize("config", ["pot8", "free8-fused", "pot16"])
    def test_interpolates_in_integers(self, config):
        gru = quantized(config, zoneout=0.3)
        x = seeded(T, N, C)
        plan = gru._plan().cells[0][0]
        zero, P = plan.h.zero_point, round(0.3 * 2**15)
        h0 = plan.h.quantize(states(gru, N)[0])
        out = plan.h.quantize(gru(x, states(gru, N))[0])
        before = torch.cat([h0[None], out[:-1]])
        new = step_codes(gru, x, before)
        total = P * (before - zero) + (2**15 - P) * (new - zero)
        # ties to even: the double has every bit
        assert torch.equal(out, torch.round(total.double() / 2**15).long() + zero)
        assert not torch.equal(out, new)

    def test_chunks_streams_and_frozen_grus_agree(self, tmp_path):
        gru = quantized(num_layers=2, zoneout=0.1)
        x = seeded(T, N, C)
        y, h_n = gru(x)
        first, h = gru(x[:3])
        same(torch.cat([first, gru(x[3:], h)[0]]), y)
        stream = gru.stream(N)
        same(torch.stack([stream(step) for step in x]), y)
        frozen = gru.freeze()
        same(frozen(x), (y, h_n))
        same(FrozenQuantGRU.from_state_dict(frozen.state_dict())(x), (y, h_n))
        gru.export_quant_params(tmp_path / "p.json")
        other = quantized(num_layers=2, zoneout=0.1)
        other.load_quant_params(tmp_path / "p.json")
        same(other(x)[0], y)
        with pytest.raises(ParameterError, match=r"zoneout=0\.0, got .*zoneout=0\.1"):
            quantized(num_layers=2).load_quant_params(tmp_path / "p.json")

    def test_may_be_changed_after_calibration(self):
        gru, x = quantized(), seeded(T, N, C)
        y = gru(x)[0]
        gru.zoneout = 0.5
        assert not torch.equal(gru(x)[0], y)
        gru.zoneout = 0
        same(gru(x)[0], y)
        gru.zoneout = 1.0
        same(gru(x, states(gru, N))[1], gru(x[:1], states(gru, N))[1])

    def test_gradient_is_that_of_the_interpolation(self):
        check_against_float(wide("pot16", zoneout=0.25), None, 2e-3)

    @pytest.mark.skipif(cpu.chosen() == cpu.REFERENCE, reason="no native kernels")
    def test_neither_way_goes_through_the_definition(self, monkeypatch):
        gru, x = quantized(zoneout=0.2, **DEEP), seeded(T, N, C)
        monkeypatch.setattr(reference, "run", lambda *_: pytest.fail("step by step"))
        monkeypatch.setattr(dispatch, "straight_through", lambda *_: pytest.fail("in float64"))
        assert cpu.stack_of(gru._plan(), cpu.chosen()) is not None
        gru(x)[0].sum().backward()

    def test_compiled(self):
        gru, x = quantized(zoneout=0.2), seeded(T, N, C)
        with torch._dynamo.config.patch(allow_rnn=True):
            same(torch.compile(gru, fullgraph=True, backend="aot_eager")(x), gru(x))


class TestZoneoutInTraining:
    def test_holds_the_units_that_were_drawn(self):
        gru = quantized(zoneout=0.4).train()
        x = seeded(T, N, C)
        torch.manual_seed(3)
        out = gru._plan().cells[0][0].h.quantize(gru(x)[0])
        torch.manual_seed(3)
        held = draw(x.device, zoneout=0.4).held(0, 0, 1, (T, N, H))
        assert 0.2 < held.float().mean() < 0.6
        zero = torch.full((1, N, H), gru._plan().cells[0][0].h.zero_point)
        before = torch.cat([zero, out[:-1]])
        assert torch.equal(out, torch.where(held, before, step_codes(gru, x, before)))
        assert not torch.equal(gru(x)[0], gru(x)[0])

    def test_layers_and_directions_draw_their_own(self):
        noise = draw(torch.device("cpu"), zoneout=0.5)
        masks = [noise.held(layer, d, 2, (T, N, H)) for layer in (0, 1) for d in (0, 1)]
        for i, mask in enumerate(masks):
            assert not any(torch.equal(mask, other) for other in masks[:i])

    @pytest.mark.parametrize("config", ["pot8", "pot16"])
    def test_mask_of_the_caller(self, config):
        gru = quantized(config, **DEEP).train()
        x = seeded(T, N, C)
        same(gru(x, zoneout_mask=torch.ones(4, T, N, H)), gru(x))
        y, h_n = gru(x, states(gru, N), zoneout_mask=torch.zeros(4, T, N, H))
        same(h_n, gru(x, states(gru, N), zoneout_mask=torch.zeros(4, T, N, H, dtype=torch.bool))[1])
        same(y[0], y[-1])

    def test_mask_in_all_layouts(self):
        mask = seeded(T, N, H, seed=8) > 0
        gru = quantized(batch_first=True).train()
        y = gru(seeded(N, T, C), zoneout_mask=mask)[0]
        for i in range(N):
            alone = gru(seeded(N, T, C)[i], zoneout_mask=mask[:, i])[0]
            same(alone, y[i])
        input, rows = packed(4, 7, 2)
        output = unpacked(gru(input, zoneout_mask=mask)[0])
        for i, row in enumerate(rows):
            same(gru(row, zoneout_mask=mask[: len(row), i])[0], output[i])

    @pytest.mark.parametrize(("config", "error"), [("pot16", 2e-3), ("w8a16-fused", 3e-2)])
    def test_gradients(self, config, error):
        gru = wide(config, zoneout=0.3, **DEEP).train()
        check_against_float(gru, seeded(4, T, N, H, seed=8) > -0.5, error)

    def test_gradients_use_the_mask_of_the_forward(self):
        gru, x = quantized("pot16", zoneout=0.3).train(), seeded(T, N, C)
        torch.manual_seed(1)
        gru(x)[0].square().sum().backward()
        drawn = [p.grad.clone() for p in gru.parameters()]
        torch.manual_seed(1)
        held = draw(x.device, zoneout=0.3).held(0, 0, 1, (T, N, H))
        gru.zero_grad()
        gru(x, zoneout_mask=~held)[0].square().sum().backward()
        same(drawn, [p.grad for p in gru.parameters()])

    def test_compiled_training_step(self):
        gru, x = quantized(zoneout=0.3).train(), seeded(T, N, C)
        with torch._dynamo.config.patch(allow_rnn=True):
            run = torch.compile(gru, fullgraph=True, backend="aot_eager")
            run(x)[0].sum().backward()
        assert gru.weight_hh_l0.grad.any()

    def test_checkpointing_draws_the_same(self):
        gru = quantized(zoneout=0.3).train()
        x = seeded(T, N, C).requires_grad_()
        torch.manual_seed(5)
        gru(x)[0].square().sum().backward()
        expected = x.grad.clone()
        x.grad = None
        torch.manual_seed(5)
        y = torch.utils.checkpoint.checkpoint(lambda x: gru(x)[0], x, use_reentrant=False)
        y.square().sum().backward()
        same(x.grad, expected)


def wide(config, **options):
    """A GRU whose ranges cover everything, so that nothing is clamped."""
    gru = quantized(config, **options)
    gru.reset_calibration()
    gru.calibration_method = "minmax"
    gru.calibrate(seeded(40, 8, C, scale=1.5), 2 * states(gru, 8))
    gru.calibrate(seeded(T, N, C), 1.1 * states(gru, N))
    gru.finalize_calibration()
    return gru


def check_against_float(gru, mask, error):
    """Gradients of 16 bits are those of the float mode, up to quantization."""
    found = []
    x, hx = seeded(T, N, C).requires_grad_(), states(gru, N).requires_grad_()
    for gru.use_quantization in (True, False):
        y, h_n = gru(x, hx, zoneout_mask=mask)
        loss = (y * seeded(*y.shape, seed=4)).sum() + (h_n * seeded(*h_n.shape, seed=5)).sum()
        found.append(torch.autograd.grad(loss, [x, hx, *gru.parameters()]))
    for a, b in zip(*found, strict=True):
        assert distance(a, b) < error


class TestRecurrentDropout:
    @pytest.mark.parametrize("config", ["pot8", "free8", "pot16"])
    def test_masks_codes_and_scales_the_rest(self, config):
        gru = quantized(config, recurrent_dropout=0.4).train()
        x = seeded(T, N, C)
        torch.manual_seed(2)
        y = gru(x)[0]
        torch.manual_seed(2)
        dropped = draw(x.device, recurrent_dropout=0.4).dropped_weights(0, 0, H)
        assert 0.2 < dropped.float().mean() < 0.6
        whole = gru.eval()._plan().cells[0][0]
        # the codes of the plan, rows update, reset, candidate, and their scales
        reset, update, candidate = dropped.chunk(3)
        R = whole.weights.R.long() * ~torch.cat([update, reset, candidate])
        scales = whole.weights.scales["weight.R"] / torch.tensor(1 - 0.4)
        torch.manual_seed(2)
        part = gru.train()._prepared(draw(x.device, recurrent_dropout=0.4)).plan.cells[0][0].weights
        assert torch.equal(part.R.long(), R)
        assert torch.equal(part.scales["weight.R"], scales)
        assert torch.equal(part.W, whole.weights.W)
        expected, _ = reference.run(
            CellPlan(whole.frozen, part), whole.x.quantize(x), whole.h.quantize(torch.zeros(N, H))
        )
        assert torch.equal(whole.h.quantize(y), expected.long())

    def test_gradients(self):
        gru = wide("pot16", recurrent_dropout=0.3, **DEEP).train()
        found = []
        x = seeded(T, N, C).requires_grad_()
        for gru.use_quantization in (True, False):
            torch.manual_seed(6)
            y, _ = gru(x)
            loss = (y * seeded(*y.shape, seed=4)).sum()
            found.append(torch.autograd.grad(loss, [x, *gru.parameters()]))
        for a, b in zip(*found, strict=True):
            assert distance(a, b) < 2e-3
            assert torch.equal(a == 0, b == 0)

    def test_eval_drops_nothing(self):
        same(quantized(recurrent_dropout=0.5)(seeded(T, N, C)), quantized()(seeded(T, N, C)))


class TestFloatMode:
    @pytest.mark.parametrize("options", [{}, DEEP, {"bias": False}], ids=["plain", "deep", "bare"])
    def test_nothing_held_is_nn_gru(self, options):
        gru = QuantGRU(C, H, **options)
        cells = gru.num_layers * (2 if gru.bidirectional else 1)
        plain = nn.GRU(C, H, **options)
        plain.load_state_dict(gru.state_dict())
        x, hx = seeded(T, N, C), states(gru, N)
        everything = torch.ones(cells, T, N, H)
        for a, b in zip(gru(x, hx, zoneout_mask=everything), plain(x, hx), strict=True):
            torch.testing.assert_close(a, b)
        input, _ = packed(4, 7, 2)
        a, b = gru(input, hx, zoneout_mask=everything), plain(input, hx)
        torch.testing.assert_close(a[0].data, b[0].data)
        torch.testing.assert_close(a[1], b[1])

    def test_zoneout(self):
        gru = QuantGRU(C, H, zoneout=0.25)
        x, hx = seeded(T, N, C), states(gru, N)
        gru.train()
        torch.manual_seed(1)
        y = gru(x, hx)[0]
        before = torch.cat([hx, y[:-1]])
        torch.manual_seed(1)
        held = draw(x.device, zoneout=0.25).held(0, 0, 1, (T, N, H))
        assert torch.equal(y == before, held)
        gru.eval()
        y = gru(x[:1], hx)[0]
        gru.zoneout = 0
        torch.testing.assert_close(y, 0.25 * hx + 0.75 * gru(x[:1], hx)[0])

    def test_recurrent_dropout(self):
        gru = QuantGRU(C, H, recurrent_dropout=0.25).train()
        plain = nn.GRU(C, H)
        plain.load_state_dict(gru.state_dict())
        torch.manual_seed(1)
        dropped = draw(torch.device("cpu"), recurrent_dropout=0.25).dropped_weights(0, 0, H)
        with torch.no_grad():
            plain.weight_hh_l0.mul_(torch.where(dropped, 0, 1 / 0.75))
        torch.manual_seed(1)
        torch.testing.assert_close(gru(seeded(T, N, C)), plain(seeded(T, N, C)))


class TestErrors:
    @pytest.mark.parametrize("name", ["zoneout", "recurrent_dropout"])
    @pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), "a", True, None])
    def test_probabilities(self, name, p):
        with pytest.raises(ConfigError, match=name):
            QuantGRU(C, H, **{name: p})

    def test_any_real_number_is_a_probability(self):
        assert QuantGRU(C, H, zoneout=np.float32(0.5)).zoneout == 0.5

    def test_all_recurrent_weights_dropped(self):
        with pytest.raises(ConfigError, match="below 1"):
            QuantGRU(C, H, recurrent_dropout=1)

    def test_precision(self):
        with pytest.raises(ConfigError, match="bf16, tf32, fp32, got 'int8'"):
            QuantGRU(C, H, precision="int8")

    def test_masks(self):
        gru, x = quantized(**DEEP), seeded(T, N, C)
        with pytest.raises(QuantGRUError, match="eval mode"):
            gru(x, zoneout_mask=torch.ones(4, T, N, H))
        with pytest.raises(QuantGRUError, match=r"shape \(4, 7, 3, 6\), got \(7, 3, 6\)"):
            gru.train()(x, zoneout_mask=torch.ones(T, N, H))
