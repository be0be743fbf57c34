"""The snippets of the QuantGRU document, on the CPU; ONNX is in tests/gru/test_onnx.py."""

import json
import warnings

import pytest
import torch

from quant_gru import QuantConfig, QuantGRU, QuantGRUWarning, default_config_path


@pytest.fixture
def calibration_loader():
    return [torch.randn(8, 10, 64) for _ in range(3)]


@pytest.fixture
def input_data():
    return torch.randn(32, 10, 64)


@pytest.fixture
def config_file(tmp_path):
    """The path of the document, holding the file that comes with the library."""
    path = tmp_path / "pytorch/config/gru_quant_bitwidth_config.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(default_config_path().read_bytes())
    return str(path)


def test_quantized_inference_with_a_file(config_file, calibration_loader, input_data, capsys):
    gru = QuantGRU(input_size=64, hidden_size=128, batch_first=True)
    gru.load_bitwidth_config(config_file, verbose=True)
    assert gru.use_quantization
    assert gru.config == QuantConfig.from_json(config_file)
    assert gru.config.without_comments() == QuantConfig.int8()
    capsys.readouterr()
    for batch in calibration_loader:
        gru.calibrate(batch)
    assert not gru.is_calibrated()
    with pytest.warns(QuantGRUWarning, match="finalize"):
        output, h_n = gru(input_data)
    assert gru.is_calibrated()
    assert output.shape == (32, 10, 128)
    assert h_n.shape == (1, 32, 128)

    # finished once, said once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(gru(input_data)[0], output)

    # every value is a code of output.h
    h = gru.get_quant_config("output.h")
    codes = output / h["scale"] + h["zero_point"]
    assert torch.equal(codes, codes.round())
    assert -128 <= codes.min()
    assert codes.max() <= 127

    gru.use_quantization = False
    real = gru(input_data)[0]
    assert torch.cosine_similarity(real.flatten(), output.flatten(), dim=0) > 0.999


def test_quantized_inference_with_one_width(calibration_loader, input_data, capsys):
    gru = QuantGRU(input_size=64, hidden_size=128, batch_first=True)
    gru.set_all_bitwidth(bitwidth=8, is_symmetric=True, verbose=True)
    assert "8" in capsys.readouterr().out
    gru.use_quantization = True
    for batch in calibration_loader:
        gru.calibrate(batch)
    with pytest.warns(QuantGRUWarning, match="finalize"):
        output, _ = gru(input_data)
    assert all(gru.get_quant_config(name)["zero_point"] == 0 for name in ("x", "h", "Wx", "g_pre"))
    gru.use_quantization = False
    assert (gru(input_data)[0] - output).square().mean() < 1e-3


@pytest.mark.parametrize("disable", [False, True])
def test_switch_of_the_file(tmp_path, disable, input_data):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "GRU_config": {
                    "default_config": {"disable_quantization": disable},
                    "operator_config": {
                        "input.x": {"bitwidth": 8, "is_symmetric": False},
                        "input.h": {"bitwidth": 8, "is_symmetric": False},
                        "weight.W": {"bitwidth": 8, "is_symmetric": True},
                        "weight.R": {"bitwidth": 8, "is_symmetric": True},
                        "gate.z_out": {"bitwidth": 8, "is_symmetric": False},
                    },
                }
            }
        )
    )
    gru = QuantGRU(input_size=64, hidden_size=128, batch_first=True)
    gru.use_quantization = disable  # the file decides
    gru.load_bitwidth_config(path)
    assert gru.use_quantization is not disable
    assert gru.get_quant_config("input.h") == gru.get_quant_config("output.h")
    assert gru.get_quant_config("h")["is_symmetric"] is False
    assert gru.get_quant_config("z_out")["is_unsigned"] is True
    if disable:
        real = torch.nn.GRU(64, 128, batch_first=True)
        real.load_state_dict(gru.state_dict())
        assert torch.equal(gru(input_data)[0], real(input_data)[0])


def test_quantization_aware_training(config_file, calibration_loader):
    num_epochs = 10
    torch.manual_seed(5)
    teacher = torch.nn.GRU(64, 128, batch_first=True)
    inputs = [torch.randn(8, 10, 64) for _ in range(3)]
    with torch.no_grad():
        train_loader = [(x, teacher(x)[0]) for x in inputs]

    gru = QuantGRU(input_size=64, hidden_size=128, batch_first=True)
    gru.load_bitwidth_config(config_file)
    for batch in calibration_loader:
        gru.calibrate(batch)
    optimizer = torch.optim.Adam(gru.parameters(), lr=0.001)
    criterion = torch.nn.MSELoss()
    gru.train()

    losses = []
    before = {name: parameter.detach().clone() for name, parameter in gru.named_parameters()}
    with warnings.catch_warnings():  # literally: the first step finalizes, and says so
        warnings.simplefilter("ignore", QuantGRUWarning)
        gru(calibration_loader[0])
    for _epoch in range(num_epochs):
        for x, target in train_loader:
            optimizer.zero_grad()
            output, _ = gru(x)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert gru.use_quantization
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    for name, parameter in gru.named_parameters():
        assert not torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    ("arguments", "options", "width", "symmetric"),
    [((8,), {"is_symmetric": True}, 8, True), ((16,), {"is_symmetric": False}, 16, False)],
    ids=["8 bits symmetric", "16 bits asymmetric"],
)
def test_set_all_bitwidth(arguments, options, width, symmetric):
    gru = QuantGRU(64, 128)
    gru.set_all_bitwidth(*arguments, **options)
    for name, operator in gru.get_quant_config().items():
        assert operator["bitwidth"] == width
        assert operator["is_symmetric"] is (symmetric or name.startswith("weight."))
        assert operator["is_unsigned"] is (name in ("gate.z_out", "gate.r_out"))


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("offset", [0, 100, -7])
def test_equations_of_the_document(width, offset):
    """z, r, g and h as the document writes them, up to what rounding costs.

    Also where the range of the input excludes 0: its zero point is then no code.
    """
    config = QuantConfig.uniform(width, False).replace_globals(input_excludes_zero=True)
    gru = QuantGRU(4, 3, use_quantization=True, config=config)
    x = torch.randn(5, 1, 4).clamp(-3, 3) + offset
    with torch.no_grad():
        gru.bias_ih_l0 -= gru.weight_ih_l0.sum(1) * offset
    gru.calibrate(x)
    gru.finalize_calibration()
    quantizer = gru.get_quant_config("x")
    lowest = -(1 << (width - 1))
    assert (lowest <= quantizer["zero_point"] < -lowest) is not bool(offset)
    W, R, b, c = gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0
    h = torch.zeros(1, 3)
    outputs = []
    for x_t in x:
        Wx_r, Wx_z, Wx_g = (x_t @ W.T + b).chunk(3, -1)
        Rh_r, Rh_z, Rh_g = (h @ R.T + c).chunk(3, -1)
        z = torch.sigmoid(Wx_z + Rh_z)
        r = torch.sigmoid(Wx_r + Rh_r)
        g = torch.tanh(Wx_g + r * Rh_g)
        h = z * h + (1 - z) * g
        outputs.append(h)
    tolerance = {8: 0.06, 16: 3e-4}[width]
    torch.testing.assert_close(gru(x)[0], torch.stack(outputs), rtol=0, atol=tolerance)
