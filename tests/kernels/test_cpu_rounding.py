"""Native executors against the reference with every rule of rounding."""

import copy
import random

import pytest
import torch
from bits import same_bits
from native_runs import NATIVE, check
from random_plans import random_case
from test_cpu_backward import ALL, assert_close, calibrated, random_drawn

from quant_gru import QuantConfig, QuantGRU
from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer.backward import straight_through
from quant_gru.kernels.cpu import executor
from quant_gru.kernels.cpu.backward import backward

pytestmark = pytest.mark.slow

RULES = [rule for rule in ROUNDINGS if rule != "half_even"]
# Of each kind, these plans have ties of both signs: they tell all rules apart.
SWEEP = dict.fromkeys(("w8a8", "w8a16", "w16a16", "mixed", "wide"), 10)
GRADIENTS = dict.fromkeys(("w8a8", "w8a16", "w16a16", "mixed"), 5)


@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize("kind", SWEEP)
@pytest.mark.parametrize("rule", RULES)
def test_random_plans(rule, kind):
    for seed in range(SWEEP[kind]):
        case = random_case(seed, kind, rule)
        check(case.plan, case.x, case.h0, case.lengths, case.reverse, [1 + seed % 2], seed)


@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_random_plans(rule, kind):
    for seed in range(GRADIENTS[kind]):
        case = random_drawn(seed, kind, rule)
        expected = straight_through(case.tape, case.grad_out, case.grad_last, ALL)
        for variant in NATIVE:
            got = backward(case.tape, case.grad_out, case.grad_last, ALL, variant, 1 + seed % 2)
            assert_close(got, expected, case.tape, f"seed {seed}, {kind}, {variant}")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "config",
    [
        QuantConfig.int8(),
        QuantConfig.int8().replace_globals(scale_kind="free"),
        QuantConfig.w8a16(),
        QuantConfig.w8a16().replace_globals(scale_kind="free"),
        QuantConfig.int16(),
    ],
    ids=["int8", "int8-free", "w8a16", "w8a16-free", "int16"],
)
def test_every_rule_has_the_kernel_of_half_even(config, rule):
    def kinds(rounding):
        plan = calibrated(config.replace_globals(rounding=rounding), 8, 16)
        return [executor.layer_of(plan, variant).kind for variant in NATIVE]

    assert kinds(rule) == kinds("half_even")


def products_of_all_codes(config, exponent):
    """A plan with one input, whose weights are all codes; the scales leave ties in every sum."""
    H = 86
    gru = QuantGRU(1, H, config=config, bias=False).eval()
    codes = torch.arange(3 * H).remainder(256).sub(128).float()
    with torch.no_grad():
        gru.weight_ih_l0.copy_((codes / 128)[:, None])
    gru.calibrate(torch.linspace(-1, 1, 64)[:, None, None].repeat(1, 2, 1))
    gru.finalize_calibration()
    gru.use_quantization = True
    for name, more in (("Wx", exponent), ("Rh", exponent // 2)):
        gru.adjust_quant_config(name, scale=gru.get_quant_config(name)["scale"] * 2.0**more)
    return gru._plan().cells[0][0]


@pytest.mark.parametrize(("exponent", "scale_kind"), [(-4, "pot"), (-1, "free"), (0, "pot")])
@pytest.mark.parametrize("rule", ROUNDINGS)
def test_all_codes_times_all_weights(rule, exponent, scale_kind):
    config = QuantConfig.int8().replace_globals(scale_kind=scale_kind, rounding=rule)
    plan = products_of_all_codes(config, exponent)
    x = torch.arange(plan.x.lo, plan.x.hi + 1)[None, :, None].repeat(2, 1, 1)
    h0 = torch.randint(plan.h.lo, plan.h.hi + 1, (x.shape[1], plan.hidden_size))
    x, h0 = x.to(plan.x.container), h0.to(plan.h.container)
    check(plan, x, h0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("inputs", [30, 500, 1000])
def test_accumulators_about_the_limit_of_a_multiplier(rule, inputs):
    """Ties near 2^20, 2^23 (the limit of a stretched float) and 2^24."""
    gru = QuantGRU(inputs, 16, config=QuantConfig.int8().replace_globals(rounding=rule)).eval()
    with torch.no_grad():
        gru.weight_ih_l0.copy_(gru.weight_ih_l0.sign())
    gru.calibrate(torch.ones(4, 2, inputs) * torch.tensor([1.0, -1.0])[:, None])
    gru.finalize_calibration()
    gru.use_quantization = True
    plan = gru._plan().cells[0][0]
    generator = torch.Generator().manual_seed(inputs)
    signs = torch.randint(0, 2, (2, 300, inputs), generator=generator)
    x = torch.where(signs == 1, plan.x.hi, plan.x.lo)
    share = torch.rand(2, 300, 1, generator=generator)
    kept = torch.rand(2, 300, inputs, generator=generator) < share
    towards = torch.where(plan.weights.W.sum(0) > 0, plan.x.hi, plan.x.lo)
    x = torch.where(kept, towards, x).to(plan.x.container)
    h0 = torch.zeros(300, 16, dtype=plan.h.container)
    check(plan, x, h0)


@pytest.mark.parametrize("rule", ROUNDINGS)
def test_sums_far_beyond_their_limits(rule):
    """Products without a code of their own, of 23 bits, in a sum with a multiplier of 2^10."""
    config = QuantConfig.int8().replace_globals(rounding=rule)
    config = config.replace("rRh", bitwidth=None).replace("r_out", bitwidth=15)
    torch.manual_seed(0)
    gru = QuantGRU(8, 64, config=config).eval()
    with torch.no_grad():
        gru.weight_hh_l0.mul_(2.0**22)
    gru.calibrate(torch.randn(6, 4, 8))
    gru.finalize_calibration()
    gru.use_quantization = True
    exponent = gru.get_quant_config("Rh")["exp2_inv"]
    for name, more in (("Wx", 15), ("g_pre", 25)):
        gru.adjust_quant_config(name, exp2_inv=exponent + more)
    plan = gru._plan().cells[0][0]
    assert plan.frozen.sums["gate.g_pre"].shift == -10
    x = torch.randint(plan.x.lo, plan.x.hi + 1, (4, 200, 8)).to(plan.x.container)
    h0 = torch.randint(plan.h.lo, plan.h.hi + 1, (200, 64)).to(plan.h.container)
    check(plan, x, h0)


@pytest.mark.parametrize("rule", RULES)
def test_the_processor_rounds_to_the_nearest_after_a_call(rule):
    case = random_case(0, "w8a8", rule)
    a, b = 0.1, 0.2
    for variant in NATIVE:
        executor.run(case.plan, case.x, case.h0, case.lengths, case.reverse, variant, 1)
        assert a + b == 0.30000000000000004  # 0.3 in the other directions


def calibrated_module(rule, bits, scale_kind, **fields):
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


BOTH_RULES = [
    *((rule, {}) for rule in ROUNDINGS),
    *(("half_even", {"rounding_input": rule}) for rule in ROUNDINGS[1:-1]),
    ("half_up", {"rounding_input": "half_even"}),
    ("double", {"rounding_input": "floor"}),
]
WIDTHS = [(8, "pot"), (16, "free"), (8, "free"), (16, "pot")]


# Each pair of rules with codes of 8 and of 16 bits, and with both kinds of scales.
@pytest.mark.parametrize(
    ("rule", "fields", "bits", "scale_kind"),
    [(*rules, *WIDTHS[(2 * i + j) % 4]) for i, rules in enumerate(BOTH_RULES) for j in (0, 1)],
)
def test_whole_modules(rule, fields, bits, scale_kind, monkeypatch):
    """Real values in and out, training and its gradients, against the reference executor."""
    found, uncalled = {}, calibrated_module(rule, bits, scale_kind, **fields)
    for variant in (*NATIVE, "reference"):
        monkeypatch.setenv(executor.VARIABLE, variant)
        gru = copy.deepcopy(uncalled)
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


@pytest.mark.parametrize("rule", ROUNDINGS[:-1])
@pytest.mark.parametrize(("bits", "scale_kind"), [(8, "pot"), (8, "free"), (16, "pot")])
@pytest.mark.parametrize("N", [1, 40])
def test_real_values_at_every_limit(rule, bits, scale_kind, N, monkeypatch):
    """Halves of codes, the neighbours of halves and of limits, infinity and NaN."""
    torch.manual_seed(N)
    config = QuantConfig.uniform(bits, is_symmetric=False)
    config = config.replace_globals(rounding_input=rule, scale_kind=scale_kind)
    gru = QuantGRU(37, 9, config=config).eval()
    gru.calibrate(torch.randn(7, 5, 37))
    gru.finalize_calibration()
    gru.use_quantization = True
    scale = torch.tensor(gru.get_quant_config("x")["scale"])
    most = 1 << bits
    halves = torch.randint(-2 * most, 2 * most + 1, (30, N, 37)) / 2 * scale
    side = torch.randint(-1, 2, halves.shape).float()
    x = torch.where(side == 0, halves, torch.nextafter(halves, side * 9e9))
    special = [torch.inf, -torch.inf, 3e38, -3e38, 1e-45, -1e-45, -0.0]
    x = torch.where(torch.rand(x.shape) < 0.1, torch.tensor(special)[torch.randint(7, x.shape)], x)
    x[20:, N // 2, 36] = torch.nan
    found = {}
    for variant in (*NATIVE, "reference"):
        monkeypatch.setenv(executor.VARIABLE, variant)
        found[variant] = copy.deepcopy(gru)(x)[0]
    assert found["reference"].isnan().any(-1).sum() == 10
    for variant in NATIVE:
        assert same_bits(found[variant], found["reference"]), variant
