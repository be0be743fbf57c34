"""What reaches native code is checked: buffers of frozen modules, arguments of the operators."""

import copy

import pytest
import torch
from gru_helpers import C, H, quantized, seeded

from quant_gru import ParameterError, QuantGRUError
from quant_gru.torch_ops import operators

LONG = torch.int64


def frozen_pair(**options):
    gru = quantized(**options)
    return gru.freeze(), gru


WRONG = {
    "empty bias": ("Bw_l0", torch.zeros(0, dtype=LONG), r"\(18,\).*'Bw_l0'.*\(0,\)"),
    "one multiplier": ("Mx_l0", torch.full((1,), 1 << 23), r"\(18,\).*'Mx_l0'"),
    "larger matrix": ("R_l0", torch.zeros(6 * H, 2 * H, dtype=torch.int8), r"\(18, 6\).*'R_l0'"),
    "fewer rows": ("W_l0", torch.zeros(1, C, dtype=torch.int8), r"\(18, 5\).*'W_l0'"),
    "codes beyond the width": (
        "W_l0",
        torch.full((3 * H, C), 300, dtype=torch.int16),
        r"\[-128, 127\].*'W_l0'.*300",
    ),
    "multiplier beyond its bits": ("Mh_l0", torch.full((3 * H,), 1 << 40), "'Mh_l0'"),
    "bias beyond its limit": ("Br_l0", torch.full((3 * H,), 1 << 62), "'Br_l0'"),
    "shift beyond reason": ("kh_l0", torch.full((3 * H,), 700), r"\[-600, 600\].*'kh_l0'"),
    "real weights": ("W_l0", torch.zeros(3 * H, C), "'W_l0'.*float32"),
    "sparse": ("R_l0", torch.zeros(3 * H, H, dtype=torch.int8).to_sparse(), "'R_l0'.*sparse"),
}


class TestBuffersOfAFrozenModule:
    @pytest.mark.parametrize("called_before", [False, True])
    @pytest.mark.parametrize("case", list(WRONG))
    def test_are_checked_before_anything_reads_them(self, case, called_before):
        frozen, gru = frozen_pair()
        x = seeded(4, 2, C)
        name, wrong, message = WRONG[case]
        if called_before:
            frozen(x)
        good = getattr(frozen, name)
        setattr(frozen, name, wrong)
        with pytest.raises(ParameterError, match=message):
            frozen(x)
        setattr(frozen, name, good)
        assert torch.equal(frozen(x)[0], gru(x)[0])

    def test_of_a_functional_call(self):
        frozen, _ = frozen_pair()
        buffers = dict(frozen.named_buffers()) | {"R_l0": torch.zeros(36, 12, dtype=torch.int8)}
        with pytest.raises(ParameterError, match=r"\(18, 6\).*'R_l0'"):
            torch.func.functional_call(frozen, buffers, (seeded(4, 2, C),))

    @pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
    def test_wider_dtypes_and_strides_are_taken(self, dtype):
        frozen, gru = frozen_pair()
        x = seeded(4, 2, C)
        frozen.W_l0 = frozen.W_l0.to(dtype).t().contiguous().t()
        frozen.R_l0 = frozen.R_l0.to(dtype)
        assert torch.equal(frozen(x)[0], gru(x)[0])


def arguments(frozen=False, **options):
    """What `operators.forward` takes for a GRU, by name."""
    gru = quantized(**options).requires_grad_(False)
    if frozen:
        gru = gru.freeze()
        weights, parameters = gru._integers(), gru.plan
    else:
        weights, parameters = list(gru.parameters()), gru._state.text
    states = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    return {
        "x": seeded(4, 2, C),
        "h0": torch.zeros(states, 2, H),
        "lengths": None,
        "weights": weights,
        "parameters": parameters,
        "settings": operators.Settings(bidirectional=options.get("bidirectional", False)),
    }


class TestArgumentsOfTheOperators:
    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("live", [False, True])
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("x", torch.zeros(4, 2, C - 2), rf"x .*\(T, N, {C}\), got \(4, 2, 3\)"),
            ("x", torch.zeros(4, C), "x .*shape"),
            ("x", torch.zeros(4, 2, C, dtype=torch.int32), "x to be real"),
            ("h0", torch.zeros(1, 3, H), r"h0 .*\(1, 2, 6\), got \(1, 3, 6\)"),
            ("h0", torch.zeros(2, 2, H), "h0 "),
            ("h0", torch.zeros(1, 2, H + 10), "h0 "),
            ("lengths", torch.ones(3, dtype=LONG), r"lengths .*\(2,\).*\(3,\)"),
            ("lengths", torch.ones(2, dtype=torch.int32), "lengths .*int64"),
            ("lengths", torch.zeros(0, dtype=LONG), "lengths "),
        ],
    )
    def test_inputs(self, name, value, message, live, frozen):
        given = arguments(frozen)
        operators.forward(**given)
        given["settings"] = operators.Settings(live=live and not frozen)
        with pytest.raises(QuantGRUError, match=message):
            operators.forward(**(given | {name: value}))

    @pytest.mark.parametrize("live", [False, True])
    @pytest.mark.parametrize("called_before", [False, True])
    @pytest.mark.parametrize(
        ("index", "shape"), [(0, (3 * H, C + 1)), (1, (6 * H, 2 * H)), (2, (5,)), (3, (1,))]
    )
    def test_weights(self, index, shape, called_before, live):
        given = arguments()
        given["settings"] = operators.Settings(live=live)
        if called_before:
            operators.forward(**given)
        weights = list(given["weights"])
        weights[index] = torch.randn(shape)
        with pytest.raises(QuantGRUError, match=r"Expected (W|R|bw|br) of cell 0 to be of shape"):
            operators.forward(**(given | {"weights": weights}))

    @pytest.mark.parametrize("frozen", [False, True])
    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_number_of_weights(self, count, frozen):
        given = arguments(frozen)
        with pytest.raises(QuantGRUError, match=r"Expected (\d+ )?(weights|tensors)"):
            operators.forward(**(given | {"weights": given["weights"][:count]}))

    def test_backward_checks_them_again(self):
        gru = quantized().train()
        given = arguments() | {"weights": list(gru.parameters()), "parameters": gru._state.text}
        given["settings"] = operators.Settings(live=True, kept=(torch.int8,))
        y, _ = operators.forward(**given)
        weights = given["weights"]
        weights[1].data = torch.zeros(2, 2)
        with pytest.raises((QuantGRUError, RuntimeError), match=r"shape|modified|size"):
            y.sum().backward()


def test_a_copy_of_a_frozen_module_has_checks_of_its_own():
    frozen, _ = frozen_pair()
    other = copy.deepcopy(frozen)
    other.Bw_l0 = torch.zeros(0, dtype=LONG)
    frozen(seeded(4, 2, C))
    with pytest.raises(ParameterError, match="'Bw_l0'"):
        other(seeded(4, 2, C))
