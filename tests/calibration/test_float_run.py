"""The float GRU that calibration observes."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from quant_gru import CalibrationError, QuantConfig, QuantGRU
from quant_gru.calibration import float_run
from quant_gru.config import ACTIVATIONS

T, N, C, H = 7, 4, 3, 5


def observed(gru, x, lengths=None):
    """(layer, direction) -> operator -> values of all blocks, in the order of processing."""
    found = {}

    def observe(layer, direction, values):
        known = found.setdefault((layer, direction), values)
        if known is not values:
            found[layer, direction] = {
                name: torch.cat((known[name], values[name])) for name in values
            }

    h0 = torch.zeros(gru.num_layers * (1 + gru.bidirectional), x.shape[1], gru.hidden_size)
    float_run.float_layers(x, h0, lengths, gru._float_weights(), observe)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block", [1, 2 * N * H, 1 << 19], ids=["step", "two-steps", "whole"])
@pytest.mark.parametrize("lengths", [None, [7, 7, 3, 1]], ids=["full", "lengths"])
def test_states_are_those_of_nn_gru(monkeypatch, bias, block, lengths):
    """Every layer and direction, whatever the blocks of steps are."""
    monkeypatch.setattr(float_run, "_VALUES", block)
    torch.manual_seed(0)
    gru = QuantGRU(C, H, 2, bias=bias, bidirectional=True)
    x = torch.randn(T, N, C)
    given = x.double() if lengths is None else pack_padded_sequence(x.double(), lengths)
    reference = torch.nn.GRU(C, H, 2, bias=bias, bidirectional=True).double()
    reference.load_state_dict(gru.state_dict())
    y = reference(given)[0]
    y = y if lengths is None else pad_packed_sequence(y)[0]
    mask = torch.ones(T, N, dtype=torch.bool)
    if lengths is not None:
        lengths = torch.tensor(lengths)
        mask = torch.arange(T)[:, None] < lengths
    found = observed(gru, x, lengths)
    size = max(1, block // (N * H))
    for direction, expected in enumerate(y.chunk(2, dim=-1)):
        h = found[1, direction]["output.h"]
        blocks = [range(start, min(start + size, T)) for start in range(0, T, size)]
        steps = [t for each in (blocks[::-1] if direction else blocks) for t in each]
        torch.testing.assert_close(h, expected[steps][mask[steps]], rtol=0, atol=1e-14)


def test_operators_follow_the_equations():
    torch.manual_seed(0)
    gru = QuantGRU(C, H)
    (v,) = observed(gru, torch.randn(T, N, C)).values()
    assert set(v) == set(ACTIVATIONS)
    before = torch.cat((torch.zeros(N, H).double(), v["output.h"][:-N]))
    Wx, Rh = v["matmul.Wx"].chunk(3, -1), v["matmul.Rh"].chunk(3, -1)
    W, R, bw, br = (w.double() for w in gru.parameters())
    expected = {
        "matmul.Wx": v["input.x"] @ W.T + bw,
        "matmul.Rh": before @ R.T + br,
        "gate.r_pre": Wx[0] + Rh[0],
        "gate.z_pre": Wx[1] + Rh[1],
        "gate.r_out": torch.sigmoid(v["gate.r_pre"]),
        "gate.z_out": torch.sigmoid(v["gate.z_pre"]),
        "op.rRh": v["gate.r_out"] * Rh[2],
        "gate.g_pre": Wx[2] + v["op.rRh"],
        "gate.g_out": torch.tanh(v["gate.g_pre"]),
        "op.old_contrib": v["gate.z_out"] * before,
        "op.new_contrib": (1 - v["gate.z_out"]) * v["gate.g_out"],
        "output.h": v["op.old_contrib"] + v["op.new_contrib"],
    }
    for name, value in expected.items():
        torch.testing.assert_close(v[name], value.detach(), rtol=0, atol=1e-14, msg=name)


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
def test_scales_do_not_depend_on_the_order_of_sums(method):
    """The same GRU with its inputs and units in other orders has the same free scales."""
    config = QuantConfig.int8().replace_globals(scale_kind="free")
    torch.manual_seed(0)
    grus = [QuantGRU(24, 32, config=config) for _ in range(2)]
    x, inputs, units = torch.randn(30, 8, 24), torch.randperm(24), torch.randperm(32)
    rows = torch.cat([units + gate * 32 for gate in range(3)])
    W, R, bw, br = (w.detach() for w in grus[0].parameters())
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    moved = (W[rows][:, inputs], R[rows][:, units], bw[rows], br[rows])
    grus[1].load_state_dict(dict(zip(names, moved, strict=True)))
    scales = []
    for gru, given in zip(grus, (x, x[..., inputs]), strict=True):
        gru.calibration_method = method
        gru.calibrate(given)
        gru.finalize_calibration()
        scales.append({name: gru.get_quant_config(name) for name in ACTIVATIONS})
    assert scales[0] == scales[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
def test_a_gpu_gives_the_scales_of_a_cpu(method):
    config = QuantConfig.int8().replace_globals(scale_kind="free")
    torch.manual_seed(0)
    gru = QuantGRU(24, 32, 2, bidirectional=True, config=config)
    batches = [torch.randn(30, 8, 24) for _ in range(3)]
    scales = []
    for device in ("cpu", "cuda"):
        gru = gru.to(device)
        gru.reset_calibration()
        gru.calibration_method = method
        for x in batches:
            gru.calibrate(pack_padded_sequence(x.to(device), torch.arange(30, 14, -2)))
        gru.finalize_calibration()
        cells = [(layer, reverse) for layer in range(2) for reverse in (False, True)]
        scales.append([gru.get_quant_config(name, *cell) for name in ACTIVATIONS for cell in cells])
    assert scales[0] == scales[1]


def test_other_dtypes_are_refused():
    gru = QuantGRU(C, H)
    with pytest.raises(CalibrationError, match=r"dtype of the weights, torch.float32, got .*64"):
        gru.calibrate(torch.zeros(T, N, C, dtype=torch.float64))


@pytest.mark.parametrize("sizes", [(0, N), (T, 0)])
def test_nothing_to_observe(sizes):
    found = observed(QuantGRU(C, H), torch.zeros(*sizes, C))
    assert {name: value.shape[0] for name, value in found[0, 0].items()} == dict.fromkeys(
        ACTIVATIONS, 0
    )
