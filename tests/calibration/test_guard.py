"""The choice among sets of scales by the integer cell."""

import pytest
import torch

from quant_gru import QuantConfig, QuantGRU
from quant_gru.calibration.float_run import FloatWeights
from quant_gru.calibration.guard import Judge
from quant_gru.calibration.windows import CellSteps
from quant_gru.config.fields import ROUNDINGS

T, N, C, H = 6, 3, 5, 8


@pytest.mark.parametrize("rule", ROUNDINGS)
def test_the_integer_cell_rounds_by_the_rule(rule):
    torch.manual_seed(0)
    config = QuantConfig.uniform(5).replace_globals(rounding=rule)
    gru = QuantGRU(C, H, config=config).eval()
    x = torch.randn(T, N, C)
    gru.calibrate(x)
    gru.finalize_calibration()
    gru.use_quantization = True
    nothing = torch.zeros(T * N, H)
    steps = CellSteps(
        [N] * T,
        False,
        x.view(T * N, C),
        torch.zeros(T * N, 3 * H),
        torch.zeros(T * N, 3 * H),
        nothing,
        nothing,
    )
    named = (gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0)
    judge = Judge(steps, FloatWeights(*(each.detach() for each in named)), config)
    with torch.inference_mode():
        states = gru(x)[0].double()
    assert judge.error(gru._state.cells[0]) == float(states.square().sum())
