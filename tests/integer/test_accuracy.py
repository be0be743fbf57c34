"""The accuracy that the definition promises: nn.GRU's own initialization, normal input."""

import pytest
import torch

from quant_gru import QuantConfig, QuantGRU
from sweeps import first_of

I, H, B, T = 128, 256, 64, 50  # noqa: E741 - the names of the definition


def fused(config):
    for name in ("op.rRh", "op.old_contrib", "op.new_contrib"):
        config = config.replace(name, bitwidth=None)
    return config


def four_bit_weights(config):
    return config.replace("weight.W", bitwidth=4).replace("weight.R", bitwidth=4)


INT8 = QuantConfig.int8()
GATES = {
    "8 bits, pot": (INT8, "histogram", 0.9995, 4.5e-5),
    "8 bits, pot, minmax": (INT8, "minmax", 0.999, 1.0),
    "8 bits, free, fused": (
        fused(INT8.replace_globals(scale_kind="free")),
        "histogram",
        0.9997,
        2.5e-5,
    ),
    "8-bit weights, 16-bit activations": (QuantConfig.w8a16(), "histogram", 0.99998, 1.2e-6),
    "4-bit weights, 8-bit activations": (four_bit_weights(INT8), "histogram", 0.9965, 1.0),
    "16 bits, pot": (QuantConfig.int16(), "histogram", 0.9999, 2.5e-9),
}


@pytest.mark.parametrize("seed", first_of(range(4), 1))
@pytest.mark.parametrize("name", GATES)
def test_gate(name, seed):
    config, method, least_cosine, most_mse = GATES[name]
    torch.manual_seed(seed)
    gru = QuantGRU(I, H, config=config).eval()
    x = torch.randn(T, B, I)
    with torch.no_grad():
        expected = gru(x)[0].double().flatten()
        gru.calibration_method = method
        gru.calibrate(x)
        gru.finalize_calibration()
        gru.use_quantization = True
        y = gru(x)[0].double().flatten()
    cosine = torch.nn.functional.cosine_similarity(y, expected, dim=0).item()
    assert cosine >= least_cosine
    assert (y - expected).square().mean().item() <= most_mse


@pytest.mark.parametrize("activation", ["pwl", "quadratic"])
def test_few_segments_cost_little(activation):
    """8 bits with 16 linear or 8 quadratic segments stay near the exact tables."""
    gru = QuantGRU(I, H, config=INT8.replace_globals(activation=activation)).eval()
    x = torch.randn(20, 16, I)
    with torch.no_grad():
        expected = gru(x)[0].double().flatten()
        gru.calibrate(x)
        gru.finalize_calibration()
        gru.use_quantization = True
        y = gru(x)[0].double().flatten()
    assert torch.nn.functional.cosine_similarity(y, expected, dim=0).item() >= 0.999


@pytest.mark.parametrize("bits", [20, 24, 32])
@pytest.mark.parametrize("scale_kind", ["pot", "free"])
def test_wide_codes_come_closer_to_float(bits, scale_kind):
    config = QuantConfig.int16().with_all_bitwidths(bits, False)
    gru = QuantGRU(8, 12, config=config.replace_globals(scale_kind=scale_kind)).eval()
    x = torch.randn(10, 3, 8)
    with torch.no_grad():
        expected = gru(x)[0].double()
        gru.calibrate(x)
        gru.finalize_calibration()
        gru.use_quantization = True
        assert (gru(x)[0].double() - expected).square().mean().item() <= 2e-11


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_wide_registers_beat_dynamic_quantization(seed):
    """PyTorch's has 8-bit weights and inputs of products; gates and states are float32."""
    torch.manual_seed(seed)
    real = torch.nn.GRU(64, 128)
    data, x = torch.randn(2, T, 8, 64)
    found = {}
    with torch.no_grad():
        expected = real(x)[0]
        theirs = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(real), {torch.nn.GRU})
        found["dynamic"] = theirs[0](x)[0]
        for name in ("int8", "int8_wide"):
            gru = QuantGRU(64, 128, config=getattr(QuantConfig, name)()).eval()
            gru.load_state_dict(real.state_dict())
            gru.calibrate(data)
            gru.finalize_calibration()
            gru.use_quantization = True
            found[name] = gru(x)[0]
    noise = {name: float((y - expected).square().mean()) for name, y in found.items()}
    assert noise["int8_wide"] < 0.8 * noise["dynamic"] < noise["dynamic"] < noise["int8"]
