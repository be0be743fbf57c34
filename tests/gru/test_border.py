"""Where a call begins: dtypes, modules of inference mode, packed sequences, computed weights."""

import copy

import pytest
import torch
from gru_helpers import C, quantized, seeded
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from quant_gru import QuantConfig, QuantGRU
from quant_gru.execution import sequence_layout
from quant_gru.integer.call_form import inward, outward
from quant_gru.modules import quantization_state

DTYPES = [torch.float16, torch.bfloat16, torch.float64]
OPTIONS = [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}]


def prepared_anew(monkeypatch, run):
    """How often a call is prepared while something runs."""
    calls, prepare = [], quantization_state.prepare
    with monkeypatch.context() as patch:
        patch.setattr(quantization_state, "prepare", lambda *a: calls.append(a) or prepare(*a))
        run()
    return len(calls)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("frozen", [False, True])
def test_inputs_of_any_dtype_are_those_of_float32(dtype, options, frozen, monkeypatch):
    gru = quantized(**options)
    module = gru.freeze() if frozen else gru
    x = seeded(5, 3, C)
    hx = seeded(gru.num_layers * (1 + gru.bidirectional), 5 if gru.batch_first else 3, 12)
    hx = hx[..., : gru.hidden_size]
    low, low_hx = x.to(dtype), hx.to(dtype)
    expected = module(low.float(), low_hx.float())
    for _ in range(3):
        found = module(low, low_hx)
        assert {each.dtype for each in found} == {dtype if frozen else torch.float32}
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.float(), theirs.to(found[0].dtype).float())
    assert prepared_anew(monkeypatch, lambda: module(low, low_hx)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_any_dtype(dtype):
    gru = quantized().train()
    x = seeded(5, 3, C).to(dtype)
    found = []
    for leaf in (x.clone().requires_grad_(), x.float().requires_grad_()):
        gru.zero_grad()
        gru(leaf)[0].sum().backward()
        found.append((leaf.grad, [w.grad.clone() for w in gru.parameters()]))
    (ours, weights), (theirs, expected) = found
    assert ours.dtype is dtype
    assert torch.equal(ours, theirs.to(dtype))
    assert all(map(torch.equal, weights, expected))


def test_autocast(monkeypatch):
    torch.manual_seed(0)
    gru, linear = quantized(), torch.nn.Linear(4, C)
    x = seeded(5, 3, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = linear(x)
        assert low.dtype is torch.bfloat16
        for _ in range(2):
            y, _ = gru(low)
        assert prepared_anew(monkeypatch, lambda: gru(low)) == 0
    with torch.no_grad():
        assert torch.equal(y, gru(low.float())[0])


def in_inference_mode(make):
    with torch.inference_mode():
        return make()


def made():
    torch.manual_seed(0)
    gru = QuantGRU(C, 12, config=QuantConfig.int8()).eval()
    gru.calibrate(torch.randn(5, 3, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["made", "cast", "copied", "loaded"])
def test_modules_of_inference_mode_are_like_others(frozen, how, monkeypatch):
    def make():
        gru = made()
        if how == "cast":
            gru = gru.double().float()
        if how == "copied":
            gru = copy.deepcopy(gru)
        if how == "loaded":
            gru.load_state_dict({k: v.clone() for k, v in gru.state_dict().items()}, assign=True)
        return gru.freeze() if frozen else gru

    module, x = in_inference_mode(make), seeded(5, 3, C)
    if how in ("made", "cast") and not frozen:
        assert not any(each.is_inference() for each in module.parameters())
    expected = (made().freeze() if frozen else made())(x)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            for _ in range(3):
                assert torch.equal(module(x)[0], expected[0])
            assert prepared_anew(monkeypatch, lambda: module(x)) == 0


def test_changes_in_inference_mode_are_seen():
    gru, x = in_inference_mode(made), seeded(5, 3, C)
    with torch.inference_mode():
        for _ in range(3):
            y = gru(x)[0]
            gru.weight_hh_l0.mul_(-1)
            found = gru(x)[0]
            assert not torch.equal(found, y)
            assert torch.equal(found, copy.deepcopy(gru)(x)[0])


def test_inference_tensors_that_are_assigned_are_followed():
    gru, x = made(), seeded(5, 3, C)
    with torch.inference_mode():
        weight = torch.nn.Parameter(gru.weight_hh_l0.clone(), requires_grad=False)
        gru.weight_hh_l0 = weight
        for _ in range(3):
            y = gru(x)[0]
            weight.mul_(-1)
            assert not torch.equal(gru(x)[0], y)


def test_parametrized_weights_are_followed_in_place():
    class Doubled(torch.nn.Module):
        def forward(self, w):
            return w * 2

    gru, x = made(), seeded(5, 3, C)
    parametrize.register_parametrization(gru, "weight_hh_l0", Doubled())
    with torch.no_grad():
        first = gru._prepared(None)
        for _ in range(2):
            gru.parametrizations.weight_hh_l0.original.mul_(-0.7)
            y = gru(x)[0]
            assert gru._prepared(None).plan is first.plan
            other = made()
            other.weight_hh_l0.copy_(gru.weight_hh_l0)
            assert torch.equal(y, other(x)[0])
    gru(x)[0].sum().backward()
    assert gru.parametrizations.weight_hh_l0.original.grad is not None


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.booleans())
def test_places_of_packed_rows(lengths, spare):
    lengths = sorted(lengths, reverse=True)
    x = torch.randn(max(lengths), len(lengths), 2)
    packed = pack_padded_sequence(x, torch.tensor(lengths))
    data = torch.cat([packed.data, torch.zeros(1, 2)]) if spare else packed.data
    packing, rows = sequence_layout._packing_of(PackedSequence(data, packed.batch_sizes))
    assert rows == len(packed.data)
    assert packing.lengths.tolist() == lengths
    padded, _ = inward(packed.data, None, packing, torch.float64)
    assert padded.dtype is torch.float64
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(packed)
    assert torch.equal(padded.float(), expected)
    again, _ = outward(padded.float(), None, packing, rows)
    assert torch.equal(again, packed.data)


def test_batch_sizes_of_any_layout_and_zeros():
    x = torch.randn(4, C)
    sizes = torch.tensor([3, 9, 1, 9, 0, 9])[::2]
    packing, rows = sequence_layout._packing_of(PackedSequence(x, sizes))
    assert (packing.T, packing.N, rows) == (3, 3, 4)
    assert packing.layout.tolist() == [2, 1, 1, 0, 3, 4, 4]
    assert packing.places(rows).tolist() == [0, 1, 2, 3]


@torch.no_grad()
def test_packed_calls_are_prepared(monkeypatch):
    gru = quantized(bidirectional=True)
    packed = pack_padded_sequence(seeded(5, 3, C), [5, 4, 1])
    y, h_n = gru(packed)
    for _ in range(2):
        again = gru(packed)
        assert torch.equal(again[0].data, y.data)
        assert torch.equal(again[1], h_n)
    assert prepared_anew(monkeypatch, lambda: gru(packed)) == 0
