"""Native executors against the reference with every rule of rounding."""

import random
import sys
from pathlib import Path

import pytest
import torch

from quant_gru import QuantConfig, QuantGRU
from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer import cell as reference
from quant_gru.kernels.cpu import executor

sys.path.insert(0, str(Path(__file__).parent))
from random_plans import random_case

pytestmark = pytest.mark.slow

NATIVE = executor.choices()[:-1]
RULES = [rule for rule in ROUNDINGS if rule != "half_even"]
SWEEP = {"w8a8": 120, "w8a16": 80, "w16a16": 60, "mixed": 60, "wide": 30}


@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize("kind", SWEEP)
@pytest.mark.parametrize("rule", RULES)
def test_random_plans(rule, kind):
    for seed in range(SWEEP[kind]):
        case = random_case(seed, kind, rule)
        expected = reference.run(case.plan, case.x, case.h0, case.lengths, case.reverse)
        for variant in NATIVE:
            got = executor.run(
                case.plan, case.x, case.h0, case.lengths, case.reverse, variant, 1 + seed % 2
            )
            for ours, theirs in zip(got, expected, strict=True):
                assert torch.equal(ours, theirs), f"seed {seed}, {kind}, {variant}"


def module(rule, bits, scale_kind, **fields):
    torch.manual_seed(bits)
    config = QuantConfig.uniform(bits, is_symmetric=False)
    config = config.replace_globals(rounding=rule, scale_kind=scale_kind, **fields)
    gru = QuantGRU(6, 9, num_layers=2, bidirectional=True, config=config)
    gru.calibrate(torch.randn(7, 5, 6))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


def real_values(gru, ties=True):
    """Inputs of which many lie half-way between two codes."""
    scale = gru.get_quant_config("x")["scale"]
    rng = random.Random(0)
    values = [scale * (rng.randint(-250, 250) / (2 if ties else 3)) for _ in range(6 * 4 * 6)]
    return torch.tensor(values).view(6, 4, 6)


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        *((rule, {}) for rule in ROUNDINGS),
        *(("half_even", {"rounding_input": rule}) for rule in ROUNDINGS[1:-1]),
        ("half_up", {"rounding_input": "half_even"}),
        ("double", {"rounding_input": "floor"}),
    ],
)
@pytest.mark.parametrize(("bits", "scale_kind"), [(8, "pot"), (8, "free"), (16, "pot")])
def test_whole_modules(rule, fields, bits, scale_kind, monkeypatch):
    """Real values in and out, training and its gradients, against the reference executor."""
    found = {}
    for variant in (*NATIVE, "reference"):
        monkeypatch.setenv(executor.VARIABLE, variant)
        gru = module(rule, bits, scale_kind, **fields)
        x, h0 = real_values(gru), torch.full((4, 4, 9), 0.25)
        y, last = gru.eval()(x, h0)
        trained = x.clone().requires_grad_()
        gru.train()(trained, h0)[0].square().sum().backward()
        assert torch.equal(gru(x, h0)[0], y)
        found[variant] = [y, last, trained.grad, gru.weight_hh_l0.grad]
    for variant in NATIVE:
        ours, theirs = found[variant], found["reference"]
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        for mine, other in zip(ours[2:], theirs[2:], strict=True):
            assert torch.allclose(mine, other, rtol=1e-3, atol=1e-5)
