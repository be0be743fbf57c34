"""One definition on every device: CPU and CUDA give the same plan and the same codes."""

import copy
import dataclasses

import pytest
import torch

from quant_gru import QuantConfig, QuantGRU
from quant_gru.calibration.input_mean import MeanObserver
from quant_gru.integer.plan import build_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def configs():
    int8 = QuantConfig.int8()
    fused = int8
    for name in ("op.rRh", "op.old_contrib", "op.new_contrib"):
        fused = fused.replace(name, bitwidth=None)
    return {
        "int8": int8,
        "fused free": fused.replace_globals(scale_kind="free"),
        "w8a16": QuantConfig.w8a16(),
        "int16 free": QuantConfig.int16().replace_globals(scale_kind="free"),
        "4-bit weights": int8.replace("W", bitwidth=4).replace("R", bitwidth=4),
        "pwl": int8.replace_globals(activation="pwl"),
        "24 bits": QuantConfig.uniform(24, False),
    }


def same_numbers(a, b):
    assert torch.equal(a.W, b.W.cpu())
    assert torch.equal(a.R, b.R.cpu())
    assert torch.equal(a.Bw, b.Bw.cpu())
    assert torch.equal(a.Br, b.Br.cpu())
    for name, scales in a.scales.items():
        assert torch.equal(scales, b.scales[name].cpu())
    for mine, theirs in ((a.Wx, b.Wx), (a.Rh, b.Rh)):
        assert torch.equal(mine.multipliers[0], theirs.multipliers[0].cpu())
        assert torch.equal(mine.shift, theirs.shift.cpu())


@pytest.mark.parametrize("name", configs())
@pytest.mark.parametrize("seed", range(3))
def test_plan_and_codes_are_equal(name, seed):
    torch.manual_seed(seed)
    gru = QuantGRU(17, 33, num_layers=2, bidirectional=True, config=configs()[name]).eval()
    with torch.no_grad():
        for w in gru.parameters():
            w.mul_(1 + 2 * torch.rand(1).item())
    x, hx = torch.randn(12, 5, 17), torch.randn(4, 5, 33).tanh()
    gru.calibrate(x, hx)
    gru.finalize_calibration()
    gru.use_quantization = True
    y, h_n = gru(x, hx)
    plan = gru._plan()
    gru.cuda()
    on_device = gru._plan()
    for ours, theirs in zip(plan.cells, on_device.cells, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            same_numbers(a.weights, b.weights)
    y_cuda, h_cuda = gru(x.cuda(), hx.cuda())
    assert torch.equal(y, y_cuda.cpu())
    assert torch.equal(h_n, h_cuda.cpu())
    frozen = gru.freeze()
    assert torch.equal(y, frozen(x.cuda(), hx.cuda())[0].cpu())
    assert torch.equal(y, frozen.cpu()(x, hx)[0])


@pytest.mark.parametrize("scale_kind", ["pot", "free"])
def test_weight_part_over_many_weights(scale_kind):
    """Scales that depend on sums of errors, over thousands of channels of every magnitude."""
    config = QuantConfig.int8().replace_globals(scale_kind=scale_kind)
    gru = QuantGRU(8, 8, config=config)
    gru.calibrate(torch.randn(10, 4, 8))
    gru.finalize_calibration()
    calibrated = gru._state.scales[0][0]
    for H, C in ((1000, 257), (256, 1024), (1, 3)):
        mean = MeanObserver()
        mean.update(torch.randn(20, C).double() + 1)
        qparams = dataclasses.replace(calibrated, input_mean=mean.mean())
        magnitude = torch.exp2(torch.randint(-6, 6, (3 * H, 1)).float())
        W, R = torch.randn(3 * H, C) * magnitude, torch.randn(3 * H, H) * magnitude
        bw, br = torch.randn(3 * H) * magnitude[:, 0], torch.randn(3 * H)
        same_numbers(
            build_weights(qparams, W, R, bw, br),
            build_weights(qparams, W.cuda(), R.cuda(), bw.cuda(), br.cuda()),
        )


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_weight_part_needs_no_host_sync():
    gru = QuantGRU(16, 32, config=QuantConfig.int8())
    gru.calibrate(torch.randn(10, 4, 16))
    gru.finalize_calibration()
    qparams = gru._state.scales[0][0]
    weights = [w.detach().cuda() for w in gru.parameters()]
    build_weights(qparams, *weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        build_weights(qparams, *weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-5), ("tf32", 1e-3), ("bf16", 1e-2)])
def test_gradients_agree(precision, bound):
    torch.manual_seed(0)
    gru = QuantGRU(9, 14, config=QuantConfig.int8())
    gru.precision = precision
    x = torch.randn(8, 3, 9)
    gru.calibrate(x)
    gru.finalize_calibration()
    gru.use_quantization = True
    gru(x)[0].square().sum().backward()
    on_cpu = [w.grad.clone() for w in gru.parameters()]
    gru.zero_grad()
    gru.cuda()(x.cuda())[0].square().sum().backward()
    for a, b in zip(on_cpu, (w.grad.cpu() for w in gru.parameters()), strict=True):
        assert (a - b).norm() <= bound * a.norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["int8", "w8a16", "24 bits"])
def test_another_device_than_the_current_one(name):
    """The same codes and gradients on both, called in turn, while the first is current."""
    torch.manual_seed(0)
    gru = QuantGRU(17, 33, num_layers=2, bidirectional=True, config=configs()[name])
    x, hx = torch.randn(12, 40, 17), torch.randn(4, 40, 33).tanh()
    gru.calibrate(x, hx)
    gru.finalize_calibration()
    gru.use_quantization = True
    grus = [copy.deepcopy(gru).to(device) for device in ("cuda:0", "cuda:1")]
    expected = gru.eval()(x, hx)
    for _ in range(3):
        gradients = []
        for device, each in enumerate(grus):
            inputs = x.to(device), hx.to(device)
            found = each.train()(*inputs)
            gradients.append(torch.autograd.grad(found[0].sum(), list(each.parameters())))
            with torch.no_grad():
                for result in (found, each.eval()(*inputs), each.freeze()(*inputs)):
                    for a, b in zip(result, expected, strict=True):
                        assert a.device.index == device
                        assert torch.equal(a.cpu(), b)
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a.cpu(), b.cpu())
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel_replicas():
    torch.manual_seed(0)
    gru = QuantGRU(9, 14, batch_first=True, config=QuantConfig.int8())
    x = torch.randn(6, 8, 9)
    gru.calibrate(x)
    gru.finalize_calibration()
    gru.use_quantization = True
    expected = gru.eval()(x)[0]
    with torch.no_grad():
        found = torch.nn.DataParallel(gru.cuda(), [0, 1])(x.cuda())[0]
    assert torch.equal(found.cpu(), expected)


def test_calibration_on_the_device_gives_the_same_scales():
    x = torch.randn(20, 6, 9)
    gru = QuantGRU(9, 14, config=QuantConfig.int8())
    scales = []
    for device in ("cpu", "cuda"):
        gru.to(device)
        gru.reset_calibration()
        gru.calibration_method = "minmax"
        gru.calibrate(x.to(device))
        gru.finalize_calibration()
        scales.append([gru.get_quant_config(n)["scale"] for n in ("x", "h", "Wx", "z_pre")])
    assert scales[0] == scales[1]
