"""What changes at an awkward moment: shapes, scales, weights and threads around a step."""

import copy
import subprocess
import sys
import threading

import pytest
import torch
from gru_helpers import C, H, quantized, same, seeded
from torch import nn

from quant_gru import QuantGRU, QuantGRUError, QuantGRUWarning, float_state_dict
from quant_gru.kernels import dispatch


class TestShapesOfWeights:
    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("weight_hh_l0", (3 * H - 1, H)),
            ("weight_hh_l0", (3 * H, H + 1)),
            ("weight_hh_l0", (6 * H, 2 * H)),
            ("weight_ih_l0", (3 * H, C + 4)),
            ("weight_ih_l0", (1, C)),
            ("bias_hh_l0", (5,)),
            ("bias_ih_l0", (3 * H + 1,)),
        ],
    )
    def test_are_checked_before_anything_reads_them(self, name, shape, training):
        gru, x = quantized().train(training), seeded(4, 2, C)
        gru(x)
        setattr(gru, name, nn.Parameter(torch.randn(shape)))
        with pytest.raises(QuantGRUError, match=rf"{name} to be of shape \(18,.*got \({shape[0]},"):
            gru(x)

    def test_of_a_functional_call(self):
        gru, x = quantized().train(), seeded(4, 2, C)
        weights = dict(gru.named_parameters()) | {"bias_ih_l0": torch.zeros(3)}
        with pytest.raises(QuantGRUError, match="bias_ih_l0"):
            torch.func.functional_call(gru, weights, (x,))


class TestBetweenForwardAndBackward:
    @pytest.mark.parametrize("change", ["zoneout", "adjust", "calibrate"])
    def test_new_scales_are_for_new_forwards(self, change):
        """The backward is of its forward; what comes after is of the scales of then."""
        gru, x = quantized().train(), seeded(6, 4, C)
        weights = list(gru.parameters())
        loss = gru(x)[0].square().mean()
        expected = torch.autograd.grad(loss, weights, retain_graph=True)
        if change == "zoneout":
            gru.zoneout = 0.5
        elif change == "adjust":
            gru.adjust_quant_config("h", exp2_inv=4)
        else:
            gru.reset_calibration()
            gru.calibrate(4 * x)
            gru.finalize_calibration()
        for _ in range(2):
            for a, b in zip(
                torch.autograd.grad(loss, weights, retain_graph=True), expected, strict=True
            ):
                assert torch.equal(a, b)
            with torch.no_grad():
                other = copy.deepcopy(gru).eval()
                same(gru.eval()(x)[0], other(x)[0])
                codes, expected_codes = gru.trace_codes(x), other.trace_codes(x)
                for name, each in codes.items():
                    assert torch.equal(each, expected_codes[name]), name
            gru.train()
            gru(x)

    @pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
    def test_a_step_in_eval_mode_is_seen(self, options):
        gru, x = quantized(), seeded(6, 4, C)
        optimizer = torch.optim.Adam(gru.parameters(), lr=0.1, **options)
        gru.train()(x)[0].square().mean().backward()
        gru.eval()
        with torch.no_grad():
            before = [gru(x)[0] for _ in range(3)]
            optimizer.step()
            after = gru(x)[0]
        assert not torch.equal(after, before[-1])
        same(after, copy.deepcopy(gru)(x)[0].detach())

    def test_another_thread_has_numbers_of_its_own(self, monkeypatch):
        """A forward in the thread of the first one, while another thread is in backward."""
        gru, x = quantized(hidden_size=40).train(), seeded(6, 4, C)
        weights = list(gru.parameters())
        expected = torch.autograd.grad(gru(x)[0].square().sum(), weights)
        loss = gru(x)[0].square().sum()
        inside, go_on, found = threading.Event(), threading.Event(), []
        original = dispatch.CPU.backward_layer

        def slow(*arguments):
            inside.set()
            go_on.wait(30)
            return original(*arguments)

        monkeypatch.setattr(dispatch.CPU, "backward_layer", slow)
        thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(loss, weights)))
        thread.start()
        assert inside.wait(30)
        others = {name: 0.3 * p.detach() for name, p in gru.named_parameters()}
        torch.func.functional_call(gru, others, (x[:2],))
        go_on.set()
        thread.join()
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


class TestSecondDerivatives:
    @pytest.mark.parametrize("wanted", ["x", "hx", "weight_hh_l0"])
    def test_are_refused_for_a_loss_that_is_linear_in_the_output(self, wanted):
        gru = quantized().train()
        leaves = {"x": seeded(4, 2, C), "hx": seeded(1, 2, H)}
        for leaf in leaves.values():
            leaf.requires_grad_()
        y = gru(leaves["x"], leaves["hx"])[0]
        leaves["weight_hh_l0"] = gru.weight_hh_l0
        (grad,) = torch.autograd.grad(y.sum(), leaves[wanted], create_graph=True)
        assert grad.requires_grad
        with pytest.raises(QuantGRUError, match="differentiated once"):
            grad.square().sum().backward()


class TestLearnedScalesAndCheckpoints:
    def learning(self):
        return quantized(learn_scales=True)

    def test_a_float_checkpoint_loads_strictly(self):
        gru, plain = self.learning(), nn.GRU(C, H)
        before = gru.log2_scale_l0.detach().clone()
        with pytest.warns(QuantGRUWarning, match="other weights were loaded"):
            gru.load_state_dict(plain.state_dict(), strict=True)
        assert torch.equal(gru.log2_scale_l0, before)
        assert torch.equal(gru.weight_hh_l0, plain.weight_hh_l0)

    def test_the_way_back_loads_strictly(self):
        gru, plain = self.learning(), nn.GRU(C, H)
        plain.load_state_dict(float_state_dict(gru), strict=True)
        model = nn.Sequential(self.learning())
        assert not any("log2" in name for name in float_state_dict(model))

    def test_a_checkpoint_without_scales_leaves_them(self):
        gru = self.learning()
        before = gru.get_quant_config("h")["scale"]
        with pytest.warns(QuantGRUWarning, match="other weights were loaded"):
            gru.load_state_dict(QuantGRU(C, H, learn_scales=True).state_dict(), strict=True)
        assert gru.is_calibrated()
        assert gru.get_quant_config("h")["scale"] == before
        with torch.no_grad():
            gru(seeded(3, 2, C))
        assert gru.get_quant_config("h")["scale"] == before

    @pytest.mark.parametrize("to", [False, True])
    def test_scales_go_from_one_kind_to_the_other(self, to):
        source = quantized() if to else self.learning()
        target = self.learning() if to else quantized()
        with torch.no_grad():
            source.weight_hh_l0.mul_(0.5)
        source.adjust_quant_config("h", exp2_inv=5)
        target.load_state_dict(source.state_dict(), strict=True)
        assert target.get_quant_config("h")["scale"] == 2.0**-5
        x = seeded(4, 2, C)
        with torch.no_grad():
            same(target(x)[0], source(x)[0])


@pytest.mark.slow
def test_an_exit_with_plans_in_use_is_silent():
    code = (
        "import torch; from quant_gru import QuantGRU\n"
        "gru = QuantGRU(3, 4); gru.calibrate(torch.randn(5, 2, 3)); gru.finalize_calibration()\n"
        "gru.use_quantization = True; gru.train(); y = gru(torch.randn(5, 2, 3))[0]\n"
        "y.sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "leaked" not in done.stdout + done.stderr
