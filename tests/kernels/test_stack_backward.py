"""Backwards of whole stacks on the CPU: the bits of the general way, in every form of a call."""

import itertools
import threading

import pytest
import torch
from bits import same_bits
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from kept import calibrated_gru
from quant_gru.integer.call_form import FLOATS
from quant_gru.kernels import _native
from quant_gru.kernels.cpu import executor

C, H = 5, 12
nan = float("nan")
STACKS = [
    {},
    {"bidirectional": True},
    {"num_layers": 2},
    {"num_layers": 3, "bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "bias": False},
    {"num_layers": 2, "batch_first": True},
]
DEEP = {"num_layers": 2, "bidirectional": True}

pytestmark = pytest.mark.skipif(
    executor.choices()[0] == executor.REFERENCE, reason="no native kernels"
)


def training(config="int8", hidden_size=H, **options):
    return calibrated_gru(C, hidden_size, config, data=(12, 8), **options).train()


def states(gru, rows, dtype=torch.float32):
    cells = gru.num_layers * (1 + gru.bidirectional)
    values = torch.linspace(-1.5, 1.5, cells * rows * gru.hidden_size)
    return values.view(cells, rows, gru.hidden_size).to(dtype)


def gradients(gru, x, hx=None, of_x=True, ends="both", grad=None):
    """Outputs and gradients; `ends`: what of the results the loss is made of."""
    packed = x if isinstance(x, PackedSequence) else None
    values = x if packed is None else packed.data
    values = values.clone(memory_format=torch.preserve_format).requires_grad_(of_x)
    hx = None if hx is None else hx.clone().requires_grad_()
    y, h_n = gru(values if packed is None else packed._replace(data=values), hx)
    y = y.data if packed is not None else y
    leaves = [values] * of_x + ([] if hx is None else [hx])
    leaves += [p for p in gru.parameters() if p.requires_grad]
    if grad is None:
        grad = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    roots = {"y": [y], "h_n": [h_n], "both": [y, h_n]}[ends]
    given = {"y": [grad], "h_n": [torch.ones_like(h_n)], "both": [grad, torch.ones_like(h_n)]}[ends]
    found = torch.autograd.grad(roots, leaves, given, allow_unused=True)
    return [y.detach(), h_n.detach(), *found]


@pytest.fixture
def ran(monkeypatch):
    """Whether each backward of a stack ran."""
    found, run = [], _native.CPUBackward.run
    monkeypatch.setattr(
        _native.CPUBackward,
        "run",
        lambda *a: (found.append((result := run(*a)) is not None), result)[1],
    )
    return found


def generally(monkeypatch, *args, **options):
    with monkeypatch.context() as patch:
        patch.setattr(_native.CPUBackward, "run", lambda *_: None)
        return gradients(*args, **options)


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or same_bits(a, b)


NATIVE = [variant for variant in executor.choices() if variant != executor.REFERENCE]
# Each stack in three instruction sets, one for each configuration.
EVERY_STACK = [
    (config, options, NATIVE[(i + j) % len(NATIVE)])
    for i, config in enumerate(("int8", "w8a16", "int16"))
    for j, options in enumerate(STACKS)
    if NATIVE
]


@pytest.mark.parametrize(("config", "options", "variant"), EVERY_STACK)
def test_the_bits_of_the_general_way(monkeypatch, ran, variant, options, config):
    monkeypatch.setenv(executor.VARIABLE, variant)
    gru = training(config, **options)
    for shape in ((1, 1), (7, 3), (3, 7), (7, 3)):
        x = torch.randn(*shape, C) * 2
        rows = x.shape[0 if gru.batch_first else 1]
        for given in ({}, {"of_x": False}, {"hx": states(gru, rows)}):
            same(gradients(gru, x, **given), generally(monkeypatch, gru, x, **given))
        x[0, 0, 1] = nan
        same(gradients(gru, x), generally(monkeypatch, gru, x))
    assert ran == [True] * 16


@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize("options", STACKS)
def test_any_number_of_threads(options):
    gru, x = training(hidden_size=70, **options), torch.randn(16, 30, C)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(gradients(gru, x, states(gru, x.shape[0 if gru.batch_first else 1])))
    same(*found)


@pytest.mark.parametrize("options", [{}, DEEP])
@pytest.mark.parametrize("module", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(monkeypatch, ran, options, module, dtype):
    gru = training(**options).to(module)
    x = (torch.randn(6, 3, C) * 2).to(dtype)
    for hx in (None, states(gru, 3, dtype)):
        found = gradients(gru, x, hx)
        same(found, generally(monkeypatch, gru, x, hx))
        assert found[0].dtype is module
        assert found[2].dtype is dtype
    assert ran == [True] * 2


@pytest.mark.parametrize("options", [{}, DEEP])
@pytest.mark.parametrize("lengths", [[5, 4, 1], [2, 5, 3], [1, 1, 1], [3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows(monkeypatch, ran, options, lengths, dtype):
    gru = training(**options)
    padded = (torch.randn(max(lengths), len(lengths), C) * 2).to(dtype)
    x = pack_padded_sequence(padded, lengths, enforce_sorted=False)
    for hx in (None, states(gru, len(lengths))):
        for ends in ("y", "h_n", "both"):
            found = gradients(gru, x, hx, ends=ends)
            same(found, generally(monkeypatch, gru, x, hx, ends=ends))
    assert ran == [True] * 6


@pytest.mark.parametrize("options", [{}, DEEP, {"batch_first": True}])
def test_layouts_of_gradients(monkeypatch, ran, options):
    gru, x = training(**options), torch.randn(4, 3, C)
    width = H * (1 + gru.bidirectional)
    spread = torch.stack([torch.linspace(-1, 1, 12 * width).view(4, 3, width)] * 2, -1)[..., 0]
    turned = torch.linspace(-1, 1, 12 * width).view(width, 3, 4).permute(2, 1, 0)
    rows = torch.linspace(-1, 1, width).expand(4, 3, width)
    for grad in (torch.ones(()).expand(4, 3, width), rows, spread, turned):
        assert not grad.is_contiguous()
        same(gradients(gru, x, grad=grad), generally(monkeypatch, gru, x, grad=grad))
    for ends in ("y", "h_n"):
        same(gradients(gru, x, ends=ends), generally(monkeypatch, gru, x, ends=ends))
    assert ran == [True] * 6


@pytest.mark.parametrize("strides", ["rows outermost", "spread", "turned", "repeated"])
def test_layouts_of_inputs(ran, strides):
    gru, x = training(**DEEP), torch.randn(4, 3, C)
    given = {
        "rows outermost": x.transpose(0, 1).contiguous().transpose(0, 1),
        "spread": torch.stack([x] * 2, -1)[..., 0],
        "turned": x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "repeated": x[:1].expand(4, 3, C),
    }[strides]
    assert not given.is_contiguous()
    expected = gradients(gru, given.contiguous())
    leaves = list(gru.parameters())
    y, h_n = gru(given)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape)
    found = torch.autograd.grad([y, h_n], leaves, [grad, torch.ones_like(h_n)])
    same([y.detach(), h_n.detach(), *found], [*expected[:2], *expected[3:]])
    assert ran == [True] * 2


@pytest.mark.parametrize("options", [{"num_layers": 2}, DEEP])
def test_what_is_wanted(monkeypatch, ran, options):
    """Each combination of learning layers, of an input and of states that want a gradient."""
    gru, x = training(**options), torch.randn(4, 3, C)
    count = 0
    for of_x, of_states, *learning in itertools.product((False, True), repeat=4):
        for name, weight in gru.named_parameters():
            weight.requires_grad_(learning["l1" in name])
        given = {"of_x": of_x, "hx": states(gru, 3) if of_states else None}
        if not (of_x or of_states or any(learning)):
            continue
        same(gradients(gru, x, **given), generally(monkeypatch, gru, x, **given))
        count += 1
    assert ran == [True] * count


@pytest.mark.parametrize("options", [{}, DEEP])
def test_weights_are_followed(monkeypatch, ran, options):
    gru, x = training(**options), torch.randn(4, 3, C)
    first = gradients(gru, x)
    with torch.no_grad():
        for w in gru.parameters():
            w.mul_(-0.8)
    second = gradients(gru, x)
    assert not torch.equal(first[0], second[0])
    same(second, generally(monkeypatch, gru, x))
    gru.weight_hh_l0.requires_grad_(False)
    same(gradients(gru, x), generally(monkeypatch, gru, x))
    assert ran == [True] * 3


@pytest.mark.parametrize("options", [{}, DEEP])
def test_a_forward_of_other_weights_before_the_backward(ran, options):
    gru, x = training(**options), torch.randn(4, 3, C)
    expected = gradients(gru, x)[2:]
    leaf = x.clone().requires_grad_()
    y, h_n = gru(leaf)
    weights = list(gru.parameters())
    kept = [w.detach().clone() for w in weights]
    weights[-1].data.mul_(2)
    gru(x)
    for w, old in zip(weights, kept, strict=True):
        w.data.copy_(old)
    grad = torch.linspace(-1, 1, y.numel()).view_as(y)
    found = torch.autograd.grad([y, h_n], [leaf, *weights], [grad, torch.ones_like(h_n)])
    same(found, expected)
    assert ran == [True]


def test_what_is_left_to_the_general_way(monkeypatch, ran):
    gru, x = training(), torch.randn(4, 3, C)
    expected = gradients(gru, x)
    grad = torch.linspace(-1, 1, 12 * H).view(4, 3, H)
    same(gradients(gru, x, grad=-torch._neg_view(grad)), expected)
    same(gradients(gru, x, grad=torch._neg_view(-grad)), expected)
    assert ran == [True, True, False]
    ran.clear()
    y, _ = gru(x)
    monkeypatch.setenv(executor.VARIABLE, executor.REFERENCE)
    y.sum().backward()
    assert ran == [False]


def test_saved_tensors_that_hooks_replace(ran):
    """Codes that come back in another layout are not read by their address."""
    gru, x = training(**DEEP), torch.randn(4, 3, C)
    expected = gradients(gru, x)

    def spread(tensor):
        return torch.stack([tensor.detach()] * 2, -1)

    with torch.autograd.graph.saved_tensors_hooks(spread, lambda tensor: tensor[..., 0]):
        same(gradients(gru, x), expected)
    assert ran == [True, False]


def test_a_backward_in_another_thread_takes_the_general_way(ran):
    gru, x = training(**DEEP), torch.randn(4, 3, C)
    expected = gradients(gru, x)[2:]
    leaf, found = x.clone().requires_grad_(), []
    y, h_n = gru(leaf)
    grad = torch.linspace(-1, 1, y.numel()).view_as(y)

    def work():
        leaves = [leaf, *gru.parameters()]
        found.extend(torch.autograd.grad([y, h_n], leaves, [grad, torch.ones_like(h_n)]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    same(found, expected)
    assert ran == [True]


@pytest.mark.parametrize("dtype", FLOATS)
def test_packed_calls_have_the_values_of_padded_ones(dtype):
    """Rows in the caller's order, and 0 beyond their steps for layers above and below."""
    gru, lengths = training(**DEEP).eval(), [2, 5, 3]
    padded, hx = (torch.randn(5, 3, C) * 2).to(dtype), states(training(**DEEP), 3)
    with torch.no_grad():
        packed, last = gru(pack_padded_sequence(padded, lengths, enforce_sorted=False), hx)
        y, lengths_found = torch.nn.utils.rnn.pad_packed_sequence(packed)
        assert lengths_found.tolist() == lengths
        for row, length in enumerate(lengths):
            alone, alone_last = gru(padded[:length, row : row + 1], hx[:, row : row + 1])
            assert same_bits(y[:length, row], alone[:, 0])
            assert same_bits(last[:, row], alone_last[:, 0])
