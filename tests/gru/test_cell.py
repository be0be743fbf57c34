"""QuantGRUCell: nn.GRUCell in float mode, a step of a QuantGRU in quantized mode."""

import copy
import pickle

import pytest
import torch
from gru_helpers import C, H, same, seeded
from torch import nn

from quant_gru import (
    CalibrationError,
    FrozenQuantGRUCell,
    QuantConfig,
    QuantGRU,
    QuantGRUCell,
    QuantGRUError,
    calibrate_model,
    convert_model,
    float_state_dict,
    operator_gain,
    operator_sqnr,
)

T = 6


class Decoder(nn.Module):
    """A loop of one's own around a cell."""

    def __init__(self, **options):
        super().__init__()
        self.cell = nn.GRUCell(C, H, **options)

    def forward(self, x):
        h, found = None, []
        for step in x:
            h = self.cell(step, h)
            found.append(h)
        return torch.stack(found)


def whole(cell):
    """A QuantGRU with the weights and scales of a cell."""
    gru = QuantGRU(C, H, bias=cell.bias, config=cell.config).eval()
    gru.load_state_dict({f"{k}_l0": v for k, v in float_state_dict(cell).items()})
    gru._state.take(_document(cell), "cell")
    gru.use_quantization = True
    return gru


def _document(cell):
    from quant_gru.parameters import document

    return document.from_document(cell._state.document(), "cell")


def decoder(config="int8", **options):
    torch.manual_seed(0)
    model = convert_model(Decoder(**options), config).eval()
    return calibrate_model(model, [(seeded(T, 3, C), None)])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_float_mode_is_that_of_torch(bias):
    cell = nn.GRUCell(C, H, bias)
    ours = convert_model(cell)
    ours.use_quantization = False
    assert type(ours) is QuantGRUCell
    assert isinstance(ours, nn.GRUCell)
    x, h = seeded(3, C), seeded(3, H, seed=2)
    for given in ((x,), (x, h), (x[0],), (x[0], h[0])):
        same(ours(*given), cell(*given))
    assert list(ours.state_dict()) == list(cell.state_dict())
    cell.load_state_dict(ours.state_dict())
    made = QuantGRUCell(C, H, bias)
    made.load_state_dict(cell.state_dict())
    same(made(x, h), cell(x, h))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("config", ["int8", "int8_wide", "int16"])
def test_steps_are_those_of_a_quant_gru(config, bias):
    model = decoder(config, bias=bias)
    x = seeded(T, 3, C, seed=4)
    gru = whole(model.cell)
    with torch.no_grad():
        same(model(x), gru(x)[0])
        same(model.cell(x[0, 0]), gru(x[:1, 0])[0][0])
        stream = model.cell.stream(3)
        same(torch.stack([stream(step) for step in x]), gru(x)[0])
    assert not torch.equal(model(x), decoder("int8", bias=not bias)(x))


def test_gradients_are_those_of_a_quant_gru():
    model = decoder().train()
    gru = whole(model.cell).train()
    x = seeded(T, 3, C, seed=4)
    model(x).square().sum().backward()
    gru(x)[0].square().sum().backward()
    for name, p in model.cell.named_parameters():
        torch.testing.assert_close(p.grad, dict(gru.named_parameters())[f"{name}_l0"].grad)


def test_statistics_are_those_of_all_steps():
    model = decoder()
    gru = QuantGRU(C, H, config=QuantConfig.int8())
    gru.load_state_dict({f"{k}_l0": v for k, v in float_state_dict(model.cell).items()})
    gru.calibrate(seeded(T, 3, C))
    gru.finalize_calibration()
    ours, theirs = model.cell.get_quant_config(), gru.get_quant_config()
    assert ours["input.x"] == theirs["input.x"]
    assert ours["weight.W"] == theirs["weight.W"]


def test_codes_and_traces():
    cell = decoder().cell
    gru = whole(cell)
    x = seeded(3, C, seed=4)
    codes = torch.randint(-128, 128, (3, C))
    same(cell.forward_integer(codes), gru.forward_integer(codes[None])[0][0])
    same(cell.forward_integer(codes[0]), gru.forward_integer(codes[None, 0])[0][0])
    ours, theirs = cell.trace_codes(x), gru.trace_codes(x[None])
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        same(tensor, theirs[name])


def test_frozen_cells():
    cell = decoder().cell
    frozen = cell.freeze()
    x, h = seeded(3, C, seed=4), seeded(3, H, seed=5)
    again = FrozenQuantGRUCell.from_state_dict(frozen.state_dict())
    with torch.no_grad():
        for each in (frozen, again):
            same(each(x, h), cell(x, h))
            same(each(x[0]), cell(x[0]))
            assert each(x).shape == (3, H)
    codes = torch.randint(-128, 128, (3, C))
    same(frozen.forward_integer(codes), cell.forward_integer(codes))
    same(frozen.stream(3)(x), cell(x))


def test_checkpoints_copies_and_pickles():
    model = decoder()
    x = seeded(T, 3, C, seed=4)
    expected = model(x)
    other = convert_model(Decoder(), "int8").eval()
    other.load_state_dict(model.state_dict())
    same(other(x), expected)
    same(copy.deepcopy(model)(x), expected)
    same(pickle.loads(pickle.dumps(model))(x), expected)
    same(model.double()(x.double()).float(), expected)


def test_a_converted_cell_shares_parameters_and_is_trained():
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    convert_model(model, "int8", inplace=True)
    calibrate_model(model, [(seeded(T, 3, C), None)])
    before = model.cell.weight_ih.detach().clone()
    model(seeded(T, 3, C)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.cell.weight_ih, before)
    with torch.no_grad():
        first = model.eval()(seeded(T, 3, C))
        model.cell.weight_ih.mul_(2)
        assert not torch.equal(model(seeded(T, 3, C)), first)


def test_analysis():
    model = decoder()
    data = [(seeded(T, 3, C), None)]
    assert "cell.gate.z_pre_l0" in operator_sqnr(model, data)
    assert len(operator_gain(model, data, progress=False).rows) > 10


def test_errors():
    cell = QuantGRUCell(C, H, use_quantization=True)
    x = torch.zeros(3, C)
    with pytest.raises(CalibrationError, match="calibrated"):
        cell(x)
    cell = decoder().cell
    with pytest.raises(QuantGRUError, match=r"\(N, C\) or \(C,\), got \(1, 3, 5\)"):
        cell(x[None])
    with pytest.raises(QuantGRUError, match=r"state of a cell to be \(N, H\), got \(1, 3, 6\)"):
        cell(x, torch.zeros(1, 3, H))
    with pytest.raises(QuantGRUError, match=r"features"):
        cell(torch.zeros(3, C + 1))


def test_compiled():
    cell = decoder().cell
    x = seeded(3, C, seed=4)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        same(torch.compile(cell, backend="eager", fullgraph=True)(x), cell(x))
