"""With quantization off, QuantGRU is torch.nn.GRU: values, arguments, checkpoints, copies."""

import copy
import inspect
import pickle

import cloudpickle
import pytest
import safetensors.torch
import torch
from gru_helpers import C, H, packed, quantized, same, saved_and_loaded, seeded, states, unpacked
from torch import nn

from quant_gru import (
    QuantConfig,
    QuantGRU,
    QuantGRUError,
    float_state_dict,
)

SHAPES = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "no bias": {"bias": False},
    "bidirectional": {"bidirectional": True},
    "two layers, bidirectional, dropout": {
        "num_layers": 2,
        "bidirectional": True,
        "dropout": 0.5,
    },
    "float64": {"dtype": torch.float64},
    "no bias, two layers, bidirectional": {"num_layers": 2, "bias": False, "bidirectional": True},
}


def pair(**options):
    """An nn.GRU and a QuantGRU with the same weights, in eval mode."""
    plain, quant = nn.GRU(C, H, **options).eval(), QuantGRU(C, H, **options).eval()
    assert quant.load_state_dict(plain.state_dict(), strict=True)[:] == ([], [])
    return plain, quant


def assert_same_output(a, b):
    for left, right in zip(a, b, strict=True):
        if isinstance(left, nn.utils.rnn.PackedSequence):
            assert torch.equal(left.batch_sizes, right.batch_sizes)
            for row, other in zip(unpacked(left), unpacked(right), strict=True):
                same(row, other)
        else:
            same(left, right)


@pytest.mark.parametrize("with_hx", [False, True], ids=["no hx", "hx"])
@pytest.mark.parametrize("layout", ["batched", "batch_first", "unbatched", "packed", "sorted"])
@pytest.mark.parametrize("shape", SHAPES)
def test_float_mode_is_nn_gru_to_the_bit(shape, layout, with_hx):
    options = SHAPES[shape]
    dtype = options.get("dtype", torch.float32)
    plain, quant = pair(**options, batch_first=layout == "batch_first")
    N = 3
    if layout == "packed":
        x = packed(4, 6, 2)[0].to(dtype)
    elif layout == "sorted":
        rows = [seeded(T, C, seed=T).to(dtype) for T in (6, 4, 4)]
        x = nn.utils.rnn.pack_sequence(rows, enforce_sorted=True)
    elif layout == "batch_first":
        x = seeded(N, 6, C).to(dtype)
    else:
        x = (seeded(6, N, C) if layout == "batched" else seeded(6, C)).to(dtype)
    hx = None
    if with_hx:
        hx = states(quant, N).to(dtype)
        hx = hx[:, 0] if layout == "unbatched" else hx
    assert_same_output(plain(x, hx), quant(x, hx))


@pytest.mark.parametrize(
    ("T", "N", "hidden"),
    [(1, 3, 6), (4, 1, 6), (4, 3, 1), (1, 1, 1), (4, 0, 6)],
)
@pytest.mark.parametrize("mode", ["float", "quantized"])
def test_small_sizes(mode, T, N, hidden):
    x = seeded(T, N, C).requires_grad_()
    quant = quantized(hidden_size=hidden, num_layers=2, bidirectional=True)
    plain = nn.GRU(C, hidden, 2, bidirectional=True)
    plain.load_state_dict(float_state_dict(quant))
    expected = plain(x)
    quant.use_quantization = mode == "quantized"
    found = quant(x)
    for a, b in zip(expected, found, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert b.requires_grad
        torch.testing.assert_close(a, b, rtol=0, atol=0 if mode == "float" else 0.2)
    found[0].sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("mode", ["float", "quantized"])
def test_no_time_steps_are_an_error_in_both_modes(mode):
    gru = quantized()
    gru.use_quantization = mode == "quantized"
    with pytest.raises((RuntimeError, ValueError), match=r"step|length"):
        gru(torch.zeros(0, 2, C))


def test_dropout_in_training_draws_as_nn_gru_does():
    plain, quant = pair(num_layers=2, dropout=0.5)
    x = seeded(5, 3, C)
    torch.manual_seed(4)
    expected = plain.train()(x)
    torch.manual_seed(4)
    assert_same_output(expected, quant.train()(x))


def test_float_gradients_are_those_of_nn_gru():
    plain, quant = pair(num_layers=2, bidirectional=True)
    grads = []
    for gru in (plain, quant):
        x = seeded(5, 3, C).requires_grad_()
        y, h_n = gru(x)
        (y.square().sum() + h_n.sum()).backward()
        grads.append([x.grad, *(p.grad for p in gru.parameters())])
    for a, b in zip(*grads, strict=True):
        same(a, b)


# --- construction


def test_positional_order_is_that_of_nn_gru():
    rnn = list(inspect.signature(nn.RNNBase.__init__).parameters)
    expected = [name for name in rnn if name not in ("self", "mode", "proj_size")]
    parameters = inspect.signature(QuantGRU).parameters
    positional = [
        name for name, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == expected
    defaults = inspect.signature(nn.RNNBase.__init__).parameters
    for name in positional[2:]:
        assert parameters[name].default == defaults[name].default, name


def test_additions_are_keyword_only():
    parameters = inspect.signature(QuantGRU).parameters
    added = {
        name: p.default
        for name, p in parameters.items()
        if p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    assert added["use_quantization"] is False
    assert added["config"] is None
    kinds = {parameters[name].kind for name in added if name != "_unknown"}  # names of an error
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}, parameters
    with pytest.raises(TypeError):
        QuantGRU(C, H, 1, True, False, 0.0, False, None, None, True)


def test_all_positional_arguments():
    gru = QuantGRU(C, H, 2, False, True, 0.25, True, "cpu", torch.float64)
    assert (gru.input_size, gru.hidden_size, gru.num_layers) == (C, H, 2)
    assert (gru.bias, gru.batch_first, gru.dropout, gru.bidirectional) == (False, True, 0.25, True)
    assert all(p.dtype == torch.float64 for p in gru.parameters())
    assert len(list(gru.parameters())) == 8


def test_is_an_nn_gru_with_the_same_random_initialization():
    torch.manual_seed(0)
    plain = nn.GRU(C, H, 2)
    torch.manual_seed(0)
    quant = QuantGRU(C, H, 2)
    assert isinstance(quant, nn.GRU)
    for a, b in zip(plain.parameters(), quant.parameters(), strict=True):
        same(a, b)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [((C, 0), {}), ((C, H), {"dropout": 2.0}), ((C, H), {"proj_size": 2}), ((C, "6"), {})],
)
def test_what_nn_gru_refuses_is_refused(arguments, options):
    for kind in (nn.GRU, QuantGRU):
        with pytest.raises((ValueError, TypeError)):
            kind(*arguments, **options)


def test_repr():
    text = repr(QuantGRU(C, H, 2, batch_first=True, bidirectional=True))
    assert text.startswith("QuantGRU(5, 6, num_layers=2, batch_first=True, bidirectional=True")
    assert "not calibrated" in text
    assert "not calibrated" not in repr(quantized())
    assert "use_quantization=True" in repr(quantized())
    shown = f"QuantGRU({C}, {H}, use_quantization=True, config=int8, calibrated)"
    assert repr(quantized()) == shown
    gru = quantized(config=QuantConfig.int8_wide())
    assert "config=int8_wide, calibrated)" in repr(gru)
    size = sum(each.nbytes for each in gru.freeze().state_dict().values())
    assert repr(gru.freeze()).endswith(f"config=int8_wide, {size} bytes)")
    shown = f"Stream({C}, {H}, num_layers=1, batch_size=2, config=int8_wide)"
    assert repr(gru.stream(2)) == shown
    assert repr(gru.freeze().stream(2)) == shown
    mixed = QuantConfig().replace("output.h", bitwidth=16)
    assert "8 to 16 bits" in repr(QuantGRU(C, H, config=mixed))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("zoneout", 0.25),
        ("recurrent_dropout", 0.5),
        ("precision", "tf32"),
        ("learn_scales", True),
        ("stash_bits", 4),
    ],
)
def test_repr_shows_options_of_training(option, value):
    gru = QuantGRU(C, H, **{option: value})
    shown = f"QuantGRU({C}, {H}, use_quantization=False, {option}={value}, 8 bits, not calibrated)"
    assert repr(gru) == shown
    setattr(gru, option, getattr(QuantGRU(C, H), option))
    assert option not in repr(gru)


# --- devices and dtypes


def test_meta_construction():
    gru = QuantGRU(C, H, 2, bidirectional=True, device="meta")
    assert {p.device.type for p in gru.parameters()} == {"meta"}
    repr(gru)
    copy.deepcopy(gru)
    assert gru(torch.empty(4, 3, C, device="meta"))[0].shape == (4, 3, 2 * H)
    source = quantized(num_layers=2, bidirectional=True)
    gru.load_state_dict(source.state_dict(), assign=True)
    x = seeded(4, 3, C)
    assert_same_output(source(x), gru(x))
    again = QuantGRU(C, H, 2, bidirectional=True, device="meta").to_empty(device="cpu")
    again.load_state_dict(source.state_dict())
    assert_same_output(source(x), again(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("when", ["before calibration", "after"])
def test_module_dtypes(dtype, when):
    x = seeded(5, 3, C)
    if when == "after":
        gru = quantized().to(dtype)
    else:
        gru = quantized(dtype=dtype)
    y, h_n = gru(x.to(dtype))
    assert y.dtype == h_n.dtype == dtype
    # the same weights and inputs in float32 give the same codes
    single = copy.deepcopy(gru).float()
    expected, expected_h = single(x.to(dtype).float())
    same(y, expected.to(dtype))
    same(h_n, expected_h.to(dtype))
    codes = gru.trace_codes(x.to(dtype))
    for name, tensor in single.trace_codes(x.to(dtype).float()).items():
        same(codes[name], tensor)


def test_autocast_does_not_coarsen_calibration():
    """Statistics are those of the float GRU: bfloat16 arithmetic around them changes no scale."""
    data, scales = seeded(20, 8, C), []
    for enabled in (False, True):
        torch.manual_seed(0)
        gru = QuantGRU(C, H, config=QuantConfig.int16())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            gru.calibrate(data)
        gru.finalize_calibration()
        scales.append(gru.get_quant_config())
    assert scales[0] == scales[1]


# --- checkpoints and copies


@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoints_of_nn_gru_both_ways(shape):
    plain, quant = pair(**SHAPES[shape])
    assert list(quant.state_dict()) == list(plain.state_dict())
    other = quantized(**SHAPES[shape])
    weights = float_state_dict(other)
    assert list(weights) == list(plain.state_dict())
    plain.load_state_dict(weights, strict=True)
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        same(a, b)
    assert len(other.state_dict()) == len(weights) + 1


def test_float_state_dict_of_a_model():
    class Net(nn.Module):
        def __init__(self, gru):
            super().__init__()
            self.quantization = nn.Linear(2, 2)  # a name like that of the state is no obstacle
            self.layers = nn.ModuleList([gru, nn.Linear(H, 2)])

    net, plain = Net(quantized()), Net(nn.GRU(C, H))
    assert len(net.state_dict()) == len(plain.state_dict()) + 1
    plain.load_state_dict(float_state_dict(net), strict=True)
    assert list(float_state_dict(plain)) == list(plain.state_dict())


def loaded(gru, state):
    new = QuantGRU(gru.input_size, gru.hidden_size, gru.num_layers, bidirectional=gru.bidirectional)
    new.load_state_dict(state, strict=True)
    return new


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda gru: pickle.loads(pickle.dumps(gru)),
    "cloudpickle": lambda gru: cloudpickle.loads(cloudpickle.dumps(gru)),
    "torch.save": lambda gru: saved_and_loaded(gru, weights_only=False),
}
WAYS = COPIES | {
    "state_dict": lambda gru: loaded(gru, saved_and_loaded(gru.state_dict(), weights_only=True)),
    "safetensors": lambda gru: loaded(
        gru, safetensors.torch.load(safetensors.torch.save(gru.state_dict()))
    ),
}


@pytest.mark.parametrize("config", ["pot8", "free8"])
@pytest.mark.parametrize("way", WAYS)
def test_round_trips_give_identical_codes(way, config):
    gru = quantized(config, num_layers=2, bidirectional=True)
    gru.adjust_quant_config("g_pre", bitwidth=10, layer=1, reverse=True)
    x = seeded(3, 2, C)
    gru(x)  # so that there is something cached
    new = WAYS[way](gru)
    assert new.use_quantization
    assert new.is_calibrated()
    assert new.config == gru.config
    new.eval()
    expected = gru.trace_codes(x)
    found = new.trace_codes(x)
    assert list(found) == list(expected)
    for name in expected:
        same(found[name], expected[name])
    assert_same_output(gru(x), new(x))
    # a copy of its own: changing it leaves the original
    with torch.no_grad():
        for p in new.parameters():
            p.add_(0.5)
    new.adjust_quant_config("x", bitwidth=4)
    assert not torch.equal(new(x)[0], gru(x)[0])
    assert torch.equal(gru.trace_codes(x)["output.h_l1"], expected["output.h_l1"])


@pytest.mark.parametrize("way", COPIES)
def test_copies_keep_pending_statistics(way):
    gru = QuantGRU(C, H)
    gru.calibration_method = "minmax"
    gru.calibrate(seeded(6, 3, C))
    new = WAYS[way](gru)
    new.calibrate(5 * seeded(6, 3, C))
    for each in (gru, new):
        each.finalize_calibration()
    assert new.calibration_method == "minmax"
    assert new.get_quant_config("x")["scale"] > gru.get_quant_config("x")["scale"]


@pytest.mark.parametrize("use_quantization", [False, True])
def test_checkpoint_carries_the_switch(use_quantization):
    gru = quantized()
    gru.use_quantization = use_quantization
    new = QuantGRU(C, H, use_quantization=not use_quantization)
    new.load_state_dict(gru.state_dict())
    assert new.use_quantization is use_quantization


def test_state_dict_holds_plain_tensors():
    for name, tensor in quantized(num_layers=2).state_dict().items():
        assert type(tensor) is torch.Tensor, name
        assert tensor.is_contiguous()


def test_a_checkpoint_of_another_shape_is_an_error():
    with pytest.raises(RuntimeError, match="num_layers"):
        QuantGRU(C, H, 2).load_state_dict(quantized().state_dict(), strict=False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_inputs_that_are_no_real_numbers_are_an_error(dtype):
    """As nn.GRU refuses them: codes go through forward_integer."""
    gru = quantized()
    x = torch.ones(5, 3, C).to(dtype)
    with pytest.raises((ValueError, RuntimeError)):
        nn.GRU(C, H)(x)
    with pytest.raises((ValueError, RuntimeError)):
        gru(x)


@pytest.mark.parametrize(
    ("x", "hx"),
    [
        (torch.zeros(5, 3, C + 1), None),
        (torch.zeros(5), None),
        (torch.zeros(1, 5, 3, C), None),
        (torch.zeros(5, 3, C), torch.zeros(1, 2, H)),
        (torch.zeros(5, 3, C), torch.zeros(1, H)),
        (torch.zeros(5, C), torch.zeros(1, 1, H)),
        (torch.zeros(5, 3, C), torch.zeros(2, 3, H)),
        (torch.zeros(5, 3, C).numpy(), None),
        (torch.zeros(5, 3, C), (torch.zeros(1, 3, H), torch.zeros(1, 3, H))),
    ],
)
def test_shapes_that_do_not_fit_are_errors(x, hx):
    gru = quantized()
    with pytest.raises(ValueError, match="Expected"):
        gru(x, hx)


@pytest.mark.parametrize(
    ("sizes", "rows", "said"),
    [
        ([3, 2, -1], 5, "got -1 at step 2 after 2"),
        ([-1], 4, "not to be negative and not to grow, got -1 at step 0$"),
        ([2, 3], 5, "not to grow, got 3 at step 1 after 2"),
        ([3, 2], 4, "to have the 5 rows of its batch_sizes, got 4"),
        ([], 4, r"at least one step, got torch\.int64 of shape \(0,\)"),
        ([[3, 2]], 5, r"of shape \(1, 2\)"),
        ([3.0, 2.0], 5, r"to be int64 .*, got torch\.float32"),
    ],
)
def test_packed_sequences_whose_steps_do_not_fit_are_errors(sizes, rows, said):
    """The fields of a PackedSequence may say anything; torch would read beyond its data."""
    dtype = torch.float32 if isinstance(next(iter(sizes), 0), float) else torch.int64
    x = nn.utils.rnn.PackedSequence(torch.zeros(rows, C), torch.tensor(sizes, dtype=dtype))
    with pytest.raises(QuantGRUError, match=said):
        quantized()(x)


def test_packed_sequences_may_have_more_rows_than_their_steps():
    x = nn.utils.rnn.PackedSequence(seeded(9, C), torch.tensor([3, 2, 0]))
    less = nn.utils.rnn.PackedSequence(x.data[:5], torch.tensor([3, 2]))
    gru = quantized()
    assert torch.equal(gru(x)[0].data, gru(less)[0].data)
