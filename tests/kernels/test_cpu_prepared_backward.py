"""Prepared backwards of one cell on the CPU: the bits of the general way, what is left to it."""

import threading

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from quant_gru import QuantConfig, QuantGRU
from quant_gru.kernels.cpu import executor
from quant_gru.kernels.cpu.prepared_backward import PreparedBackward

C, H = 5, 12
nan = float("nan")


def training(config="int8", **options):
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=getattr(QuantConfig, config)(), **options)
    gru.calibrate(torch.randn(12, 8, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru.train()


def gradients(gru, x, hx=None, of_x=True, only_last=False, grad=None):
    x = x.clone().requires_grad_(of_x) if not isinstance(x, tuple) else x
    y, h_n = gru(x, hx)
    leaves = ([x] if of_x else []) + [p for p in gru.parameters() if p.requires_grad]
    y = y.data if isinstance(y, tuple) else y
    if only_last:
        return torch.autograd.grad(h_n.sum(), leaves)
    grad = torch.linspace(-1, 1, y.numel()).view_as(y) if grad is None else grad
    return torch.autograd.grad([y, h_n], leaves, [grad, torch.ones_like(h_n)])


@pytest.fixture
def ran(monkeypatch):
    """Whether each prepared backward ran."""
    found, run = [], PreparedBackward.run
    monkeypatch.setattr(
        PreparedBackward,
        "run",
        lambda *a: (found.append((result := run(*a)) is not None), result)[1],
    )
    return found


def generally(monkeypatch, *args, **options):
    with monkeypatch.context() as patch:
        patch.setattr(PreparedBackward, "run", lambda *_: None)
        return gradients(*args, **options)


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("variant", [v for v in executor.choices() if v != executor.REFERENCE])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": True}])
@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
def test_the_bits_of_the_general_way(monkeypatch, ran, variant, options, config):
    monkeypatch.setenv(executor.VARIABLE, variant)
    gru = training(config, **options)
    for shape in ((1, 1), (7, 3), (3, 7), (7, 3)):
        x = torch.randn(*shape, C) * 2
        for given in ({}, {"of_x": False}):
            same(gradients(gru, x, **given), generally(monkeypatch, gru, x, **given))
        x[0, 0, 1] = nan
        same(gradients(gru, x), generally(monkeypatch, gru, x))
    assert ran == [True] * 12


def test_weights_are_followed(monkeypatch, ran):
    gru, x = training(), torch.randn(4, 3, C)
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


def test_a_forward_of_other_weights_before_the_backward(monkeypatch, ran):
    gru, x = training(), torch.randn(4, 3, C)
    expected = gradients(gru, x)
    leaf = x.clone().requires_grad_()
    y, h_n = gru(leaf)
    weights = list(gru.parameters())
    kept = [w.detach().clone() for w in weights]
    for w in weights:
        w.data.mul_(2)
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
    spread = torch.stack([torch.linspace(-1, 1, 4 * 3 * H).view(4, 3, H)] * 2, -1)[..., 0]
    same(gradients(gru, x, grad=spread), expected)
    gradients(gru, x, torch.randn(1, 3, H))
    gradients(gru, pack_padded_sequence(x, [4, 2, 1]), of_x=False)
    gradients(gru, x, only_last=True)
    assert ran == [True] + [False] * 4
    ran.clear()
    y, _ = gru(x)
    monkeypatch.setenv(executor.VARIABLE, executor.REFERENCE)
    y.sum().backward()
    gradients(training(num_layers=2), x)
    assert not any(ran)


def test_a_backward_in_another_thread_takes_the_general_way(ran):
    gru, x = training(), torch.randn(4, 3, C)
    expected = gradients(gru, x)
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
