"""The quantized forward: every layout gives the same codes, in and out in integers, NaN, freeze."""

import copy
import json
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from gru_helpers import (
    CONFIGS,
    C,
    H,
    packed,
    quantized,
    same,
    saved_and_loaded,
    seeded,
    states,
    unpacked,
)
from torch import nn
from torch.nn.utils import parametrize, prune

from quant_gru import (
    FrozenQuantGRU,
    ParameterError,
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    QuantGRUWarning,
)
from quant_gru.execution.noise import draw

DEEP = {"num_layers": 2, "bidirectional": True}
KINDS = ["pot8", "free8-fused"]
nan, inf = float("nan"), float("inf")


def module(config, frozen=False, **options):
    gru = quantized(config, **options)
    return gru.freeze() if frozen else gru


# --- layouts


@pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
@pytest.mark.parametrize("config", ["pot8", "w8a16-fused", "free8"])
def test_unbatched_is_a_row_of_the_batch(config, frozen):
    gru = module(config, frozen, **DEEP)
    x, hx = seeded(6, 3, C), states(quantized(config, **DEEP), 3)
    y, h_n = gru(x, hx)
    assert y.shape == (6, 3, 2 * H)
    assert h_n.shape == (4, 3, H)
    assert y.dtype == h_n.dtype == torch.float32
    for row in range(3):
        y_row, h_row = gru(x[:, row], hx[:, row])
        same(y_row, y[:, row])
        same(h_row, h_n[:, row])


@pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
@pytest.mark.parametrize("config", KINDS)
def test_batch_first_is_the_transpose(config, frozen):
    gru = module(config, frozen, **DEEP)
    other = quantized(config, **DEEP)
    other.batch_first = True
    other = other.freeze() if frozen else other
    x, hx = seeded(6, 3, C), states(quantized(config, **DEEP), 3)
    y, h_n = gru(x, hx)
    y_first, h_first = other(x.transpose(0, 1), hx)
    same(y_first.transpose(0, 1), y)
    same(h_first, h_n)
    # unbatched input has no batch dimension to come first
    same(other(x[:, 0], hx[:, 0])[0], y[:, 0])


@pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
@pytest.mark.parametrize("with_hx", [False, True], ids=["no hx", "hx"])
@pytest.mark.parametrize("lengths", [(3, 5, 1), (4, 4), (2,)], ids=str)
@pytest.mark.parametrize("config", KINDS)
def test_packed_rows_are_the_sequences_alone(config, lengths, with_hx, frozen):
    gru = module(config, frozen, **DEEP)
    x, rows = packed(*lengths)
    hx = states(quantized(config, **DEEP), len(lengths)) if with_hx else None
    y, h_n = gru(x, hx)
    for i, (row, out) in enumerate(zip(rows, unpacked(y), strict=True)):
        y_alone, h_alone = gru(row, None if hx is None else hx[:, i])
        same(out, y_alone)
        same(h_n[:, i], h_alone)
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert torch.equal(getattr(y, name), getattr(x, name)), name


def test_a_sorted_pack_without_indices():
    gru = quantized(**DEEP)
    rows = [seeded(T, C, seed=T) for T in (5, 3, 3)]
    y, h_n = gru(nn.utils.rnn.pack_sequence(rows, enforce_sorted=True))
    assert y.sorted_indices is None
    for i, (row, out) in enumerate(zip(rows, unpacked(y), strict=True)):
        same(out, gru(row)[0])
        same(h_n[:, i], gru(row)[1])


WIDE_STATES = QuantConfig.int8().replace("h", bitwidth=24)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"config": config, "num_layers": layers}, (1, 4, 2, 2))
        for config in ("pot8", "pot8-fused", "pot16", "w8a16-fused", "free8", WIDE_STATES)
        for layers in (1, 2)
    ]
    + [({"hidden_size": 2}, (33, 37))],  # more steps than are projected at once
)
def test_chunks_are_the_whole(options, sizes):
    gru = quantized(**options)
    x, hx = seeded(sum(sizes), 3, C, scale=2.0), states(gru, 3)
    y, h_n = gru(x, hx)
    outputs, state = [], hx
    for chunk in x.split(sizes):
        out, state = gru(chunk, state)
        outputs.append(out)
    same(torch.cat(outputs), y)
    same(state, h_n)


def test_32_bit_states_go_through_forward_integer():
    gru = quantized(QuantConfig.uniform(32), method="minmax")
    x = gru.trace_codes(seeded(6, 2, C))["input.x_l0"]
    y, h_n = gru.forward_integer(x)
    first, state = gru.forward_integer(x[:3])
    second, last = gru.forward_integer(x[3:], state)
    same(torch.cat([first, second]), y)
    same(last, h_n)
    assert y.dtype == torch.int32


@pytest.mark.parametrize("config", KINDS)
def test_rows_of_a_batch_are_independent(config):
    gru = quantized(config, **DEEP)
    x = seeded(6, 4, C)
    y, h_n = gru(x)
    order = [2, 0, 3, 1]
    y_moved, h_moved = gru(x[:, order])
    same(y_moved, y[:, order])
    same(h_moved, h_n[:, order])
    x[:, 1] = 1e30
    x[:, 3] = nan
    y_other, h_other = gru(x)
    for row in (0, 2):
        same(y_other[:, row], y[:, row])
        same(h_other[:, row], h_n[:, row])


def test_strided_input():
    gru = quantized()
    wide = seeded(12, 3, 2 * C)
    same(gru(wide[::2, :, ::2])[0], gru(wide[::2, :, ::2].contiguous())[0])
    same(gru(wide[:6, :1, :C].expand(6, 3, C))[0][:, 2], gru(wide[:6, 0, :C])[0])


def test_dropout_acts_between_layers_in_training_only(tmp_path):
    gru = quantized(num_layers=2, dropout=0.5)
    x = seeded(6, 3, C)
    y, h_n = gru(x)
    same(gru(x)[0], y)
    gru.train()
    torch.manual_seed(0)
    y_train, h_train = gru(x)
    assert not torch.equal(y_train, y)
    same(h_train[0], h_n[0])  # the layer below is before the dropout
    torch.manual_seed(0)
    same(gru(x)[0], y_train)
    # the dropped value is quantized by input.x of the layer above
    lower, upper = (alone(gru, layer, tmp_path / "params.json") for layer in (0, 1))
    torch.manual_seed(0)
    factors = draw(x.device, dropout=0.5).factors(1, (6, 3, H))
    assert factors.unique().tolist() == [0, 2]
    assert 0.3 < (factors == 0).float().mean() < 0.7
    same(upper(lower(x)[0] * factors)[0], y_train)


def alone(gru, layer, path):
    """A layer of a stack as a GRU of its own, by way of the parameter file."""
    new = QuantGRU(gru.input_size if layer == 0 else gru.hidden_size, gru.hidden_size)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            parameter.copy_(getattr(gru, name.replace("l0", f"l{layer}")))
    gru.export_quant_params(path)
    document = json.loads(path.read_text())
    document["cells"] = [{**document["cells"][layer], "layer": 0}]
    document["gru"] |= {"num_layers": 1, "input_size": new.input_size}
    path.write_text(json.dumps(document))
    new.load_quant_params(path)
    new.use_quantization = True
    return new.eval()


def test_layers_are_joined_by_integers_only(tmp_path):
    gru = quantized("free8", num_layers=2)
    x = seeded(6, 3, C)
    lower, upper = (alone(gru, layer, tmp_path / "params.json") for layer in (0, 1))
    lower = lower.trace_codes(x)["output.h_l0"].long()
    between = gru.trace_codes(x)["input.x_l1"]
    h, q = gru.get_quant_config("h"), gru.get_quant_config("x", layer=1)
    ratio = h["scale"] / q["scale"]
    exact = (lower - h["zero_point"]).double() * ratio + q["zero_point"]
    assert (between - exact.clamp(-128, 127)).abs().max() <= 0.5 + 1e-6
    same(upper.forward_integer(between)[0], gru.trace_codes(x)["output.h_l1"])


# --- integers in, integers out


@pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
@pytest.mark.parametrize("config", CONFIGS)
def test_forward_integer_is_forward(config, frozen):
    gru = quantized(config, **DEEP)
    x, hx = seeded(6, 3, C), states(gru, 3)
    y, h_n = gru(x, hx)
    codes = gru.trace_codes(x, hx)
    suffixes = ("_l0", "_l0_reverse", "_l1", "_l1_reverse")
    h0 = torch.stack([codes[f"output.h0{suffix}"] for suffix in suffixes])
    each = gru.freeze() if frozen else gru
    y_codes, h_codes = each.forward_integer(codes["input.x_l0"], h0)
    assert y_codes.dtype == h_codes.dtype == codes["output.h_l0"].dtype
    same(y_codes, torch.cat([codes["output.h_l1"], codes["output.h_l1_reverse"]], -1))
    for i, (layer, reverse) in enumerate(((0, False), (0, True), (1, False), (1, True))):
        q = gru.get_quant_config("h", layer, reverse)
        same((h_codes[i].float() - q["zero_point"]) * torch.tensor(q["scale"]), h_n[i])
        if layer:
            half = y_codes[..., reverse * H : (reverse + 1) * H]
            real = (half.float() - q["zero_point"]) * torch.tensor(q["scale"])
            same(real, y[..., reverse * H : (reverse + 1) * H])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_codes_of_any_integer_dtype(dtype):
    gru = quantized()
    codes = gru.trace_codes(seeded(4, 2, C))["input.x_l0"]
    same(gru.forward_integer(codes.to(dtype))[0], gru.forward_integer(codes)[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32], ids=str)
def test_codes_of_unsigned_dtypes(dtype):
    gru = quantized(QuantConfig.int8().replace("x", is_unsigned=True))
    codes = gru.trace_codes(seeded(4, 2, C))["input.x_l0"]
    assert codes.dtype == torch.uint8
    same(gru.forward_integer(codes.to(dtype))[0], gru.forward_integer(codes)[0])


def test_forward_integer_layouts():
    gru = quantized(**DEEP)
    x = gru.trace_codes(seeded(4, 3, C))["input.x_l0"]
    h = gru.trace_codes(seeded(4, 3, C), states(gru, 3))
    h0 = torch.stack([h[f"output.h0{s}"] for s in ("_l0", "_l0_reverse", "_l1", "_l1_reverse")])
    y, h_n = gru.forward_integer(x, h0)
    row, h_row = gru.forward_integer(x[:, 1], h0[:, 1])
    same(row, y[:, 1])
    same(h_row, h_n[:, 1])
    gru.batch_first = True
    first, h_first = gru.forward_integer(x.transpose(0, 1), h0)
    same(first.transpose(0, 1), y)
    same(h_first, h_n)


def test_states_start_at_the_zero_points():
    gru = quantized()
    x = seeded(4, 2, C)
    codes = gru.trace_codes(x)
    assert gru.get_quant_config("h")["zero_point"] != 0
    same(gru.forward_integer(codes["input.x_l0"])[0], codes["output.h_l0"])
    assert set(codes["output.h0_l0"].flatten().tolist()) == {
        gru.get_quant_config("h")["zero_point"]
    }


@pytest.mark.parametrize(
    ("width", "unsigned", "dtype"),
    [
        (4, False, torch.int8),
        (8, False, torch.int8),
        (7, True, torch.int8),
        (8, True, torch.uint8),
        (9, True, torch.int16),
        (16, False, torch.int16),
        (16, True, torch.int32),
        (17, False, torch.int32),
        (32, False, torch.int32),
        (32, True, torch.int64),
    ],
)
def test_containers_of_the_output(width, unsigned, dtype):
    fields = {"bitwidth": width, "is_symmetric": False, "is_unsigned": unsigned}
    gru = quantized(QuantConfig.int8().replace("h", **fields), method="minmax")
    x = seeded(4, 2, C)
    codes = gru.trace_codes(x)
    y, h_n = gru.forward_integer(codes["input.x_l0"])
    assert y.dtype == h_n.dtype == codes["output.h_l0"].dtype == codes["output.h0_l0"].dtype
    assert y.dtype == dtype
    if width <= 16:
        q = gru.get_quant_config("h")
        same((y.double() - q["zero_point"]).float() * torch.tensor(q["scale"]), gru(x)[0])


CODES = torch.zeros(4, 2, C, dtype=torch.int8)
STATE = torch.zeros(1, 2, H, dtype=torch.int8)


@pytest.mark.parametrize(
    ("x", "h", "words"),
    [
        (CODES.short() + 128, None, r"\[-128, 127\].*128.*input\.x"),
        (CODES.short() - 129, None, r"\[-128, 127\].*-129.*input\.x"),
        (CODES.float(), None, "integers"),
        (CODES.bool(), None, "integers"),
        (CODES.numpy(), None, "x_codes to be"),
        (CODES[..., 1:], None, "5 features"),
        (CODES[None], None, "2-D or 3-D"),
        (CODES, STATE.short() + 200, r"\[-128, 127\].*200.*output\.h"),
        (CODES, STATE.double(), "integers"),
        (CODES, STATE[:, :1], "shape"),
        (CODES, STATE[0], "shape"),
        (CODES[:, 0], STATE, "shape"),
    ],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
def test_codes_that_do_not_fit_are_errors(x, h, words, frozen):
    with pytest.raises(QuantGRUError, match=words):
        module("pot8", frozen).forward_integer(x, h)


# --- golden vectors


def test_names_and_shapes_of_trace_codes():
    gru = quantized(**DEEP)
    codes = gru.trace_codes(seeded(6, 3, C))
    names = {
        name.removesuffix("_reverse").removesuffix("_l0").removesuffix("_l1") for name in codes
    }
    assert names == {
        *gru.config.operators,
        "output.h0",
        "accumulator.bw",
        "accumulator.br",
    }
    assert len(codes) == 4 * len(names)
    for name, tensor in codes.items():
        assert not tensor.is_floating_point()
        assert tensor.device.type == "cpu"
        operator = name.partition("_l")[0]
        width = {"input.x": 2 * H if "_l1" in name else C, "matmul.Wx": 3 * H, "matmul.Rh": 3 * H}
        if operator.startswith(("gate", "op", "matmul", "input")) or operator == "output.h":
            assert tensor.shape == (6, 3, width.get(operator, H)), name
    assert codes["weight.W_l1"].shape == (3 * H, 2 * H)
    assert codes["output.h0_l0"].shape == (3, H)


def test_fused_operators_have_no_codes():
    codes = quantized("pot8-fused").trace_codes(seeded(6, 3, C))
    assert not [name for name in codes if name.startswith("op.")]


def test_trace_codes_does_not_need_the_switch_and_changes_nothing():
    gru = quantized()
    x = seeded(6, 3, C)
    expected = gru.trace_codes(x)
    gru.use_quantization = False
    assert all(torch.equal(expected[name], codes) for name, codes in gru.trace_codes(x).items())
    assert gru.use_quantization is False


def test_numpy_savez_round_trip(tmp_path):
    gru = quantized(**DEEP)
    codes = gru.trace_codes(seeded(6, 3, C))
    np.savez(tmp_path / "golden.npz", **codes)
    with np.load(tmp_path / "golden.npz") as file:
        assert sorted(file.files) == sorted(codes)
        for name, tensor in codes.items():
            assert file[name].dtype == tensor.numpy().dtype
            assert np.array_equal(file[name], tensor.numpy())


def test_trace_of_a_packed_sequence():
    gru = quantized(bidirectional=True)
    x, rows = packed(3, 5)
    codes = gru.trace_codes(x)
    for place, index in enumerate(x.sorted_indices.tolist()):
        alone = gru.trace_codes(rows[index][:, None])
        T = len(rows[index])
        for name in ("gate.z_out_l0", "output.h_l0_reverse", "matmul.Rh_l0_reverse"):
            same(codes[name][:T, place], alone[name][:, 0])


def test_trace_with_a_different_input_quantizer_per_direction():
    gru = quantized(bidirectional=True)
    gru.adjust_quant_config("x", bitwidth=4, reverse=True)
    x = seeded(6, 3, C)
    y, _ = gru(x)
    codes = gru.trace_codes(x)
    assert codes["input.x_l0_reverse"].min() >= -8
    assert codes["input.x_l0"].min() < -8
    q = gru.get_quant_config("h", reverse=True)
    real = (codes["output.h_l0_reverse"].float() - q["zero_point"]) * q["scale"]
    same(real, y[..., H:])


# --- NaN and infinity


@pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
@pytest.mark.parametrize("config", KINDS)
@pytest.mark.parametrize("step", [0, 2, 5])
def test_nan_in_x_from_that_step_on(step, config, frozen):
    gru = module(config, frozen, bidirectional=True)
    x = seeded(6, 3, C)
    y, h_n = gru(x)
    x[step, 1, 3] = nan
    y_nan, h_nan = gru(x)
    forward, backward = y_nan[..., :H], y_nan[..., H:]
    assert forward[step:, 1].isnan().all()
    assert backward[: step + 1, 1].isnan().all()
    assert h_nan[:, 1].isnan().all()
    same(forward[:step, 1], y[:step, 1, :H])
    same(backward[step + 1 :, 1], y[step + 1 :, 1, H:])
    same(y_nan[:, [0, 2]], y[:, [0, 2]])
    same(h_nan[:, [0, 2]], h_n[:, [0, 2]])


def test_nan_in_a_packed_row():
    gru = quantized(bidirectional=True)
    _, rows = packed(4, 6, 2)
    expected = [gru(row) for row in rows]
    rows[0][1, 0] = nan
    y, h_n = gru(nn.utils.rnn.pack_sequence(rows, enforce_sorted=False))
    out = unpacked(y)
    assert out[0][:, :H].isnan().all(-1).tolist() == [False, True, True, True]
    assert out[0][:, H:].isnan().all(-1).tolist() == [True, True, False, False]
    assert h_n[:, 0].isnan().all()
    for i in (1, 2):
        same(out[i], expected[i][0])
        same(h_n[:, i], expected[i][1])


def test_nan_goes_up_the_layers():
    gru = quantized(num_layers=3)
    x = seeded(6, 2, C)
    y, _ = gru(x)
    x[3, 0, 0] = nan
    y_nan, h_nan = gru(x)
    assert y_nan[3:, 0].isnan().all()
    assert h_nan[:, 0].isnan().all()
    same(y_nan[:3], y[:3])
    assert not h_nan[:, 1].isnan().any()
    both = quantized(**DEEP)(x)[0]  # one direction of layer 0 or the other is NaN at every step
    assert both[:, 0].isnan().all()
    assert not both[:, 1].isnan().any()


@pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
def test_nan_in_hx_is_the_whole_row(frozen):
    gru = module("pot8", frozen, num_layers=2)
    x, hx = seeded(6, 3, C), states(quantized(num_layers=2), 3)
    y, h_n = gru(x, hx)
    hx[0, 1, 2] = nan
    y_nan, h_nan = gru(x, hx)
    assert y_nan[:, 1].isnan().all()
    assert h_nan[:, 1].isnan().all()
    same(y_nan[:, [0, 2]], y[:, [0, 2]])
    upper = states(quantized(num_layers=2), 3)
    upper[1, 2, 0] = nan  # the layer above alone
    y_upper, h_upper = gru(x, upper)
    assert y_upper[:, 2].isnan().all()
    assert not h_upper[0].isnan().any()
    same(h_upper[0], h_n[0])


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_nan_or_infinity_in_any_weight_is_every_output(name, value):
    gru = quantized(num_layers=2)
    x = seeded(4, 2, C)
    gru(x)
    with torch.no_grad():
        getattr(gru, name).view(-1)[-1] = value
    for mode in (False, True):
        y, h_n = gru.train(mode)(x)
        assert y.isnan().all()
        assert h_n.isnan().all()
    with torch.no_grad():
        getattr(gru, name).view(-1)[-1] = 0.5
    assert not gru.eval()(x)[0].isnan().any()


def test_weights_that_are_not_finite_cannot_be_frozen():
    gru = quantized()
    with torch.no_grad():
        gru.bias_hh_l0[0] = nan
    with pytest.raises(QuantGRUError, match="finite"):
        gru.freeze()


@pytest.mark.parametrize("config", CONFIGS)
def test_infinity_saturates(config):
    gru = quantized(config)
    x = seeded(4, 2, C)
    hx = states(gru, 2)
    x[1, 0, 2], x[2, 1, 0], hx[0, 0, 1] = inf, -inf, inf
    y, _ = gru(x, hx)
    assert y.isfinite().all()
    q = gru.get_quant_config("x")
    codes = gru.trace_codes(x, hx)["input.x_l0"]
    bits = q["bitwidth"]
    assert codes[1, 0, 2] == 2 ** (bits - 1) - 1
    assert codes[2, 1, 0] == -(2 ** (bits - 1))
    huge = x.nan_to_num(posinf=3e38, neginf=-3e38)
    same(gru(huge, hx.nan_to_num(posinf=3e38))[0], y)


def test_integer_entry_points_have_no_nan():
    gru = quantized()
    x = seeded(4, 2, C)
    expected, _ = gru.forward_integer(gru.trace_codes(x)["input.x_l0"])
    x[1, 0, 0] = nan
    codes = gru.trace_codes(x)
    assert codes["input.x_l0"][1, 0, 0] == gru.get_quant_config("x")["zero_point"]
    same(codes["output.h_l0"][:, 1], expected[:, 1])


# --- weights that change


def changed_in_place(gru):
    with torch.no_grad():
        gru.weight_hh_l0.mul_(0.5)
        gru.bias_ih_l1.add_(0.3)


def loaded(gru):
    torch.manual_seed(99)
    with pytest.warns(QuantGRUWarning, match="other weights were loaded"):
        gru.load_state_dict(nn.GRU(C, H, 2).state_dict())


def assigned(gru):
    torch.manual_seed(98)
    with pytest.warns(QuantGRUWarning, match="other weights were loaded"):
        gru.load_state_dict(nn.GRU(C, H, 2).state_dict(), assign=True)


def from_a_vector(gru):
    vector = nn.utils.parameters_to_vector(gru.parameters()).detach() * 0.7
    nn.utils.vector_to_parameters(vector, gru.parameters())


def from_one_vector_again_and_again(gru):
    """As evolution strategies do: the parameters are views of a vector that changes."""
    vector = nn.utils.parameters_to_vector(gru.parameters()).detach()
    nn.utils.vector_to_parameters(vector, gru.parameters())
    gru(seeded(3, 2, C))
    vector.mul_(0.7)
    nn.utils.vector_to_parameters(vector, gru.parameters())


def clipped(gru):
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.clamp_(-0.1, 0.1)


def parametrized(gru):
    class Half(nn.Module):
        def forward(self, w):
            return 0.5 * w

    parametrize.register_parametrization(gru, "weight_hh_l0", Half())


def stepped(gru, optimizer=torch.optim.SGD, **options):
    step = optimizer(gru.parameters(), lr=0.1, **options)
    gru(seeded(3, 2, C))[0].square().sum().backward()
    step.step()


CHANGES = {
    "in place": changed_in_place,
    "loaded": loaded,
    "assigned": assigned,
    "SGD": stepped,
    "Adam": lambda gru: stepped(gru, torch.optim.Adam, foreach=True),
    "fused AdamW": lambda gru: stepped(gru, torch.optim.AdamW, fused=True),
    "half and back": lambda gru: gru.half().float(),
    "from a vector": from_a_vector,
    "from one vector": from_one_vector_again_and_again,
    "through data": lambda gru: gru.weight_hh_l0.data.mul_(0.7),
    "new parameter": lambda gru: setattr(
        gru, "weight_ih_l0", nn.Parameter(gru.weight_ih_l0.detach() * 0.5)
    ),
    "reset": QuantGRU.reset_parameters,
    "clipped": clipped,
    "pruned": lambda gru: prune.l1_unstructured(gru, "weight_hh_l0", amount=0.5),
    "parametrized": parametrized,
}


@pytest.mark.parametrize("change", CHANGES)
def test_weight_changes_are_followed_in_eval(change):
    gru = quantized(num_layers=2)
    x = seeded(4, 2, C)
    before = gru.trace_codes(x)
    gru(x)
    CHANGES[change](gru)
    after = gru(x)
    fresh = quantized(num_layers=2)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            parameter.copy_(getattr(gru, name))
    for a, b in zip(fresh(x), after, strict=True):
        same(a, b)
    found = gru.trace_codes(x)
    weights = [name for name in before if name.startswith(("weight", "accumulator"))]
    assert any(not torch.equal(before[name], found[name]) for name in weights)
    frozen = gru.freeze()
    same(frozen(x)[0], after[0])


WITHOUT_TRACE = ("from one vector", "through data")


@pytest.mark.parametrize("change", ["in place", "loaded", "from a vector", *WITHOUT_TRACE])
@pytest.mark.parametrize("why", ["no_grad", "frozen weights"])
def test_weight_changes_are_followed_without_gradients(change, why):
    """Those without a trace after eval: averaged weights are often copied in through `.data`."""
    gru = quantized(num_layers=2).requires_grad_(why == "no_grad")
    model = nn.Sequential(gru)
    x = seeded(4, 2, C)
    with torch.set_grad_enabled(why != "no_grad"):
        before = gru(x)[0]
        CHANGES[change](gru)
        if change in WITHOUT_TRACE:
            model.eval()
        after = gru(x)[0]
        assert not torch.equal(before, after)
        same(copy.deepcopy(gru)(x)[0], after)


def test_scales_reported_follow_the_weights():
    gru = quantized()
    before = gru.get_quant_config("W")["exp2_inv"]
    with torch.no_grad():
        gru.weight_ih_l0.mul_(4)
    assert gru.get_quant_config("W")["exp2_inv"] == [e - 2 for e in before]


def test_inference_mode():
    x = seeded(4, 2, C)
    expected = quantized(**DEEP)(x)
    gru = quantized(**DEEP)
    with torch.inference_mode():
        for a, b in zip(gru(x), expected, strict=True):
            same(a.clone(), b.detach())
    y, _ = gru(x)  # what was cached in inference mode serves outside, with gradients, too
    y.sum().backward()
    assert all(p.grad is not None for p in gru.parameters())
    with torch.inference_mode():
        gru.trace_codes(x)
        gru.forward_integer(gru.trace_codes(x)["input.x_l0"])
        frozen = gru.freeze()
        frozen(x)
    same(frozen(x)[0], y.detach())
    copy.deepcopy(frozen)


def test_everything_inside_inference_mode_then_training():
    with torch.inference_mode():
        gru = QuantGRU(C, H, config=QuantConfig.int8(), use_quantization=True)
        gru.calibrate(seeded(4, 2, C))
        gru.finalize_calibration()
        expected = gru(seeded(4, 2, C))[0].clone()
        with torch.no_grad():
            gru.weight_hh_l0.mul_(0.5)
        changed = gru(seeded(4, 2, C))[0].clone()
    assert not torch.equal(expected, changed)
    other = QuantGRU(C, H)
    other.load_state_dict(gru.state_dict())
    same(other(seeded(4, 2, C))[0].detach(), changed.clone())


@pytest.mark.parametrize("method", ["histogram", "minmax", "percentile", "ema"])
def test_statistics_of_inference_mode_can_be_continued(method):
    gru = QuantGRU(C, H)
    gru.calibration_method = method
    with torch.inference_mode():
        gru.calibrate(seeded(4, 2, C))
    gru.calibrate(5 * seeded(4, 2, C))
    with torch.inference_mode():
        gru.calibrate(9 * seeded(4, 2, C))
    new = copy.deepcopy(gru)
    new.finalize_calibration()
    new.use_quantization = True
    new(seeded(4, 2, C))[0].sum().backward()


# --- freeze


def total_bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("size", [(128, 128), (64, 256)], ids=["C=H=128", "C=64, H=256"])
@pytest.mark.parametrize("config", ["pot8", "free8-fused"])
def test_frozen_size(size, config, tmp_path):
    gru = quantized(config, input_size=size[0], hidden_size=size[1], method="minmax")
    frozen = gru.freeze()
    plain = nn.GRU(*size)
    ratio = total_bytes(frozen.state_dict().values()) / total_bytes(plain.parameters())
    assert ratio <= 0.3
    torch.save(frozen.state_dict(), tmp_path / "frozen.pt")
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    sizes = [(tmp_path / f"{name}.pt").stat().st_size for name in ("frozen", "plain")]
    assert sizes[0] <= 0.3 * sizes[1]


def test_frozen_has_no_floating_point():
    frozen = quantized(**DEEP).freeze()
    assert list(frozen.parameters()) == []
    assert list(frozen.buffers())
    for name, tensor in (*frozen.named_buffers(), *frozen.state_dict().items()):
        assert not tensor.is_floating_point(), name
    x = seeded(4, 2, C)
    expected = frozen(x)[0]
    same(frozen.half()(x)[0], expected)
    same(frozen.double()(x)[0], expected)
    same(frozen.train()(x)[0], expected)


WAYS_OF_STATES = {
    "itself": lambda state: state,
    "torch": lambda state: saved_and_loaded(state, weights_only=True),
    "safetensors": lambda state: safetensors.torch.load(safetensors.torch.save(state)),
}
WAYS_OF_FROZEN = {
    "pickle": lambda frozen: pickle.loads(pickle.dumps(frozen)),
    "deepcopy": copy.deepcopy,
}
for name, way in WAYS_OF_STATES.items():
    WAYS_OF_FROZEN[f"state_dict, {name}"] = lambda frozen, way=way: FrozenQuantGRU.from_state_dict(
        way(frozen.state_dict())
    )


@pytest.mark.parametrize("way", WAYS_OF_FROZEN)
@pytest.mark.parametrize("config", ["pot16", "free8-fused"])
def test_frozen_round_trips(config, way):
    batch_first = config == "pot16"
    gru = quantized(config, batch_first=batch_first, **DEEP)
    frozen = gru.freeze()
    frozen(seeded(3, 2, C))
    new = WAYS_OF_FROZEN[way](frozen)
    assert repr(new) == repr(frozen)
    x, hx = seeded(4, 3, C), states(gru, 4 if batch_first else 3)
    for a, b in zip(gru(x, hx), new(x, hx), strict=True):
        same(a, b)
    expected = gru.trace_codes(x, hx)
    found = new.trace_codes(x, hx)
    assert set(expected) - set(found) == {n for n in expected if n.startswith("weight.b")}
    for name, codes in found.items():
        assert torch.equal(codes.long(), expected[name].long()), name
    with torch.no_grad():  # the frozen module is on its own
        gru.weight_ih_l0.zero_()
    for a, b in zip(frozen(x, hx), new(x, hx), strict=True):
        same(a, b)


def test_frozen_of_mixed_widths_and_pinned_scales():
    config = CONFIGS["free8"].replace("R", bitwidth=20).replace("bw", bitwidth=31)
    gru = quantized(config.replace("z_pre", bitwidth=14).replace("h", bitwidth=24), method="minmax")
    gru.adjust_quant_config("W", scale=0.01)
    x = seeded(4, 2, C)
    same(FrozenQuantGRU.from_state_dict(gru.freeze().state_dict())(x)[0], gru(x)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("in_rows", [False, True])
def test_frozen_gives_the_dtype_of_its_input(dtype, in_rows):
    gru = quantized(QuantConfig.int8())
    frozen, x = gru.freeze(), seeded(6, 3, C).to(dtype)
    hx = seeded(1, 3, H, seed=4).to(dtype)
    given = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 1]) if in_rows else x
    with torch.no_grad():
        expected = gru(given.float(), hx.float())
        got = frozen(given, hx)
        model = torch.nn.Sequential(First(frozen), torch.nn.Linear(H, 2)).to(dtype)
        assert model(x).dtype is dtype
        program = torch.export.export(frozen, (x, hx)).module()
        assert torch.equal(program(x, hx)[0], frozen(x, hx)[0])
    for ours, theirs in zip(got, expected, strict=True):
        ours, theirs = (getattr(each, "data", each) for each in (ours, theirs))
        assert ours.dtype is dtype
        assert torch.equal(ours, theirs.to(dtype))


class First(torch.nn.Module):
    """The first result of a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


def test_frozen_refuses_gradients():
    frozen = quantized().freeze()
    x = seeded(4, 2, C).requires_grad_()
    with pytest.raises(QuantGRUError, match="inference"):
        frozen(x)
    with pytest.raises(QuantGRUError, match="inference"):
        frozen(x.detach(), states(quantized(), 2).requires_grad_())
    with pytest.raises(QuantGRUError, match="inference"):
        frozen(nn.utils.rnn.pack_padded_sequence(x, [4, 2]))
    with torch.no_grad():
        assert not frozen(x)[0].requires_grad
    assert not frozen(x.detach())[0].requires_grad


def test_a_frozen_state_dict_that_does_not_fit_is_an_error():
    state = quantized().freeze().state_dict()
    for name in state:
        with pytest.raises(ParameterError, match=name):
            FrozenQuantGRU.from_state_dict({k: v for k, v in state.items() if k != name})
    with pytest.raises(ParameterError, match="W_l0"):
        FrozenQuantGRU.from_state_dict({**state, "W_l0": state["W_l0"][:-1]})
    with pytest.raises(ParameterError, match="R_l0"):
        FrozenQuantGRU.from_state_dict({**state, "R_l0": state["R_l0"].float()})
    with pytest.raises(ParameterError):
        FrozenQuantGRU.from_state_dict({**state, "plan": state["plan"][:-9]})
    with pytest.raises(ParameterError, match="W_l0"):
        FrozenQuantGRU.from_state_dict({**state, "W_l0": state["W_l0"].int() + 1000})


def test_frozen_load_state_dict_takes_the_whole_plan_or_fails():
    """Never the integers of one module under the scales of another."""
    x = seeded(4, 2, C)
    first = quantized()
    second = quantized()
    # documents of the same length, which saturating inputs tell apart
    first.adjust_quant_config("x", zero_point=-15)
    second.adjust_quant_config("x", zero_point=-16)
    x = 30 * x
    source, target = first.freeze(), second.freeze()
    assert source.plan.shape == target.plan.shape
    expected = source(x)[0]
    assert not torch.equal(target(x)[0], expected)
    try:
        target.load_state_dict(source.state_dict())
    except (RuntimeError, ValueError):
        return
    same(target(x)[0], expected)


def test_frozen_inside_a_model():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = quantized(batch_first=True).freeze()
            self.head = nn.Linear(H, 3)

        def forward(self, x):
            return self.head(self.gru(x)[0][:, -1])

    net = Net()
    x = seeded(2, 4, C)
    net(x).sum().backward()
    assert net.head.weight.grad is not None
    same(copy.deepcopy(net)(x), net(x))
