"""Weights whose codes of few bits change the products least, on the data."""

import copy
import math

import pytest
import torch

from quant_gru import (
    CalibrationError,
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    allocate_bits,
    calibrate_model,
    convert_model,
)
from quant_gru.calibration.fitted_weights import fitted_rows
from quant_gru.integer.qparams import weight_scales
from quant_gru.whole_models.fit_weights import operands

pytestmark = pytest.mark.slow

GENERATOR = torch.Generator().manual_seed(1)
# inputs that depend on each other, far from zero
MIX = torch.randn(3, 9, generator=GENERATOR)
BATCHES = [(torch.randn(30, 6, 3, generator=GENERATOR) @ MIX + 1) / 2 for _ in range(2)]
TEST = (torch.randn(30, 6, 3, generator=GENERATOR) @ MIX + 1) / 2


def narrow(weights=4, others=16, **kinds):
    config = QuantConfig.uniform(others, is_symmetric=False).replace_globals(**kinds)
    return config.replace("W", bitwidth=weights).replace("R", bitwidth=weights)


def gru(**options):
    torch.manual_seed(0)
    return torch.nn.GRU(9, 12, **options)


def calibrated(model, config, **options):
    return calibrate_model(convert_model(model, config), BATCHES, progress=False, **options).eval()


@torch.no_grad()
def decibels(model, quantized, x=TEST):
    real, found = model(x)[0].double(), quantized(x)[0].double()
    return 10 * math.log10(float(real.square().sum() / (real - found).square().sum()))


def error(w, values, covariance):
    return float(((w - values) @ covariance * (w - values)).sum())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_change_products_less_than_the_nearest_ones(bits):
    generator = torch.Generator().manual_seed(bits)
    w = torch.randn(7, 10, generator=generator, dtype=torch.float64)
    rows = (
        torch.randn(50, 4, generator=generator).double()
        @ torch.randn(4, 10, generator=generator).double()
    )
    covariance = rows.T @ rows / 50 + 1e-3 * torch.eye(10)
    scales = 2.0 ** -torch.arange(7).double() * 2 ** (1 - bits)
    lo, hi = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    w = w.clamp(-1, 1) * scales[:, None] * hi
    found = fitted_rows(w, scales, bits, covariance)
    codes = found / scales[:, None]
    assert torch.equal(codes, codes.round())
    assert lo <= codes.min() <= codes.max() <= hi
    nearest = (w / scales[:, None]).round().clamp(lo, hi) * scales[:, None]
    assert error(w, found, covariance) < 0.7 * error(w, nearest, covariance)


def test_no_single_code_is_better():
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(5, 6, generator=generator, dtype=torch.float64) * 2 - 1
    rows = torch.randn(40, 6, generator=generator, dtype=torch.float64).cumsum(1)
    covariance = rows.T @ rows
    scales = torch.full((5,), 0.25, dtype=torch.float64)
    found = fitted_rows(w, scales, 4, covariance)
    damped = covariance + 1e-3 * covariance.diagonal().mean() * torch.eye(6)
    least = error(w, found, damped)
    for row in range(5):
        for column in range(6):
            for step in (-0.25, 0.25):
                other = found.clone()
                other[row, column] += step
                if -2 <= other[row, column] <= 1.75:
                    assert error(w, other, damped) >= least - 1e-9


def test_operands_that_never_change_keep_the_nearest_codes():
    w = torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64)
    found = fitted_rows(w, torch.tensor([0.25]), 4, torch.zeros(3, 3))
    assert found.tolist() == [[0.25, -0.25, 1.0]]


def test_moments_are_those_of_inputs_and_states_before_each_step():
    model = convert_model(gru(bidirectional=True))
    found = operands(model, {"": model}, BATCHES, None, False)[""]
    x = torch.cat([batch.double().flatten(0, 1) for batch in BATCHES])
    for direction in (0, 1):
        own = found[(0, direction), "input.x"]
        assert float(own.count) == len(x)
        torch.testing.assert_close(own.second, x.T @ x, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        out = torch.cat([model(batch)[0][:, :, 12:] for batch in BATCHES], dim=1).double()
    before = torch.cat((out[1:], torch.zeros(1, *out.shape[1:]))).flatten(0, 1)
    torch.testing.assert_close(found[(0, 1), "output.h"].first, before.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_four_bits_lose_much_less_on_other_data(options):
    model = gru(**options)
    plain = decibels(model, calibrated(model, narrow()))
    assert decibels(model, calibrated(model, narrow(), fit_weights=True)) > plain + 4


@pytest.mark.parametrize("kind", ["pot", "free"])
@pytest.mark.parametrize("granularity", ["tensor", "gate", "channel"])
def test_fitted_weights_are_codes_times_scales(kind, granularity):
    config = narrow(scale_kind=kind)
    for name in ("W", "R"):
        config = config.replace(name, granularity=granularity)
    found = calibrated(gru(), config, fit_weights=True)
    plan = found._plan().cells[0][0].weights
    for name, w, codes in (("W", found.weight_ih_l0, plan.W), ("R", found.weight_hh_l0, plan.R)):
        reset, update, candidate = w.detach().chunk(3)
        expected = torch.cat((update, reset, candidate)).double()
        scales = plan.scales[f"weight.{name}"].double()
        torch.testing.assert_close(codes * scales[:, None], expected, rtol=1e-6, atol=0)
    copied = copy.deepcopy(found)
    copied.load_state_dict(found.state_dict())
    assert torch.equal(copied(TEST)[0], found(TEST)[0])
    own = weight_scales(found._state.scales[0][0], "weight.W", found.weight_ih_l0)
    assert len(own) == {"tensor": 1, "gate": 3, "channel": 36}[granularity]


def test_wide_weights_and_the_model_given_stay():
    model = gru()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = calibrated(model, QuantConfig.int16(), fit_weights=True)
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in before.items())
    calibrated(model, narrow(), fit_weights=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_cells_and_generators():
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(9, 12)
    pairs = [(x, torch.rand(6, 12) - 0.5) for batch in BATCHES for x in batch]
    found = [
        calibrate_model(
            convert_model(cell, narrow()),
            iter(pairs),
            lambda m, b: m(*b),
            progress=False,
            fit_weights=fit,
        )
        for fit in (False, True)
    ]
    with torch.no_grad():
        errors = [
            sum(float((cell(x, h) - q(x, h)).square().sum()) for x, h in pairs) for q in found
        ]
    assert errors[1] < 0.6 * errors[0]


def test_weights_that_are_computed_are_refused():
    model = convert_model(gru(), narrow())
    torch.nn.utils.parametrizations.weight_norm(model, "weight_ih_l0")
    with pytest.raises(CalibrationError, match=r"Expected weight\.W and its bias to be finite"):
        calibrate_model(model, BATCHES, progress=False, fit_weights=True)
    assert not model.is_calibrated()


def test_allocation_with_fitted_weights():
    model = gru()
    options = {"budget": {"flash": 1400}, "fixed": {"W": 4, "R": 4}, "progress": False}
    plain = allocate_bits(model, BATCHES, test=[TEST], **options)
    fitted = allocate_bits(model, BATCHES, test=[TEST], fit_weights=True, **options)
    assert fitted.chosen.measured > plain.chosen.measured + 3
    assert decibels(model, fitted.model) == pytest.approx(fitted.chosen.measured, abs=1.5)
    again = fitted.with_budget({"flash": 1400}, test=[TEST], progress=False)
    assert again.chosen == fitted.chosen
    own = calibrated(model, fitted.config, fit_weights=True)
    assert abs(decibels(model, own) - decibels(model, fitted.model)) < 1
    free = narrow(scale_kind="free")
    with pytest.raises(QuantGRUError, match="Expected scale_kind to be 'pot' to fit weights"):
        allocate_bits(model, BATCHES, 1400, config=free, fit_weights=True, progress=False)


def test_a_shared_gru_is_fitted_once():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = torch.nn.GRU(9, 9)

        def forward(self, x):
            return self.gru(self.gru(x)[0])

    torch.manual_seed(0)
    model = Twice()
    plain, fitted = (calibrated(model, narrow(), fit_weights=fit) for fit in (False, True))
    assert isinstance(fitted.gru, QuantGRU)
    assert decibels(model, fitted) > decibels(model, plain)
