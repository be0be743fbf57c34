"""Bits per sample and layer while a model is trained."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import actnn
from actnn.saving.adaptive import Adaptive


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 5),
    )


def train(net, x, steps):
    for _ in range(steps):
        net.zero_grad()
        net(x).square().mean().backward()


def adaptive_of(net) -> Adaptive:
    assert net.actnn.adaptive is not None
    return net.actnn.adaptive


def test_samples_and_layers_get_different_bits_within_the_budget():
    net = actnn.compress(model(), level="L3", min_bytes=0)
    x = torch.randn(8, 3, 16, 16) * torch.logspace(-2, 1, 8).view(-1, 1, 1, 1)
    train(net, x, 4)
    statistics = adaptive_of(net).statistics
    bits = {name: known.bits for name, known in statistics.tensors.items()}
    assert len(set(bits.values())) > 1
    weights = {name: known.elements for name, known in statistics.tensors.items()}
    total = sum(bits[name] * weights[name] for name in bits)
    assert total <= 2 * sum(weights.values()) + 1e-6
    held = sum(r.held for r in net.actnn.records if r.reason == "compressed")
    exact = sum(r.nbytes for r in net.actnn.records if r.reason == "compressed")
    assert held < exact * 2.5 / 32


@pytest.mark.filterwarnings("ignore:Compression adds")  # one batch: its gradient has no variance
def test_gradients_are_those_of_exact_training_on_average():
    exact, net = model(), actnn.compress(model(), bits=6, level="L3", min_bytes=0)
    x = torch.randn(4, 3, 16, 16)
    train(exact, x, 1)
    train(net, x, 3)
    mean = torch.zeros_like(exact[3].weight)
    for _ in range(20):
        train(net, x, 1)
        mean += net[3].weight.grad / 20
    difference = (mean - exact[3].weight.grad).norm() / exact[3].weight.grad.norm()
    assert difference < 0.02


def test_tokens_share_the_bits_of_their_sample():
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    actnn.compress(net, level="L3", min_bytes=0)
    adaptive_of(net).statistics.per_sample = True
    x = torch.randn(3, 40, 64)
    train(net, x, 3)
    statistics = adaptive_of(net).statistics
    assert {len(k.variance) for k in statistics.tensors.values() if k.variance is not None} == {3}
    assert net[2].weight.grad.isfinite().all()


def test_codes_that_a_layer_shares_get_bits_by_its_gradients():
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 8))
    actnn.compress(net, level="L3", min_bytes=0)
    train(net, torch.randn(32, 64), 5)
    tensors = adaptive_of(net).statistics.tensors
    assert {name: known.source for name, known in tensors.items()} == {"1:0": "2", "3:0": "3"}


def test_complex_weights():
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, dtype=torch.cfloat))

        def forward(self, x):
            return torch.fft.ifft(torch.fft.fft(self.a(x)) * self.w).real

    net = actnn.compress(nn.Sequential(Filter(), nn.Linear(8, 4)), level="L3", min_bytes=0)
    for _ in range(12):
        train(net, torch.randn(16, 8), 1)
    assert net[0].w.grad.is_complex()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.cfloat], ids=str)
def test_gradients_of_other_types(dtype):
    net = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 4, dtype=dtype))
    actnn.compress(net, level="L3", min_bytes=0)
    for _ in range(6):
        net(torch.randn(16, 8, dtype=dtype)).abs().square().sum().backward()
    energies = adaptive_of(net).statistics._energy
    assert {energy.dtype for energy in energies.values()} == {torch.float32}
    assert all(energy > 0 for energy in energies.values())


def test_empty_batches():
    net = actnn.compress(model(), level="L3", min_bytes=0).eval()
    for step in range(6):
        train(net, torch.randn(0 if step == 3 else 2, 3, 16, 16), 1)


def test_a_copy_has_statistics_of_its_own():
    net = actnn.compress(model(), level="L3", min_bytes=0)
    x = torch.randn(4, 3, 16, 16)
    train(net, x, 2)
    other = copy.deepcopy(net)
    train(other, x, 3)
    assert adaptive_of(net).statistics.steps == 2
    assert adaptive_of(other).statistics.steps == 5


def test_uncompress_removes_the_hooks():
    net = actnn.compress(model(), level="L3")
    assert net[0]._forward_hooks
    actnn.uncompress(net)
    assert not any(module._forward_hooks for module in net.modules())


def test_too_few_bits_warn():
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
    actnn.compress(net, bits=1, level="L3", min_bytes=0)
    adaptive_of(net).statistics.refresh = 1
    x = torch.randn(16, 64)

    def run():
        train(net, x, 14)  # the same batch: the gradient itself does not vary

    with pytest.warns(actnn.ActNNWarning, match="Compression adds"):
        run()


def operations(net, x):
    """Names and counts of the operations of one step, without views that launch nothing."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(net, x, 1)
    counts = {event.key: event.count for event in profile.key_averages() if "::" in event.key}
    counts.pop("aten::as_strided")
    return counts


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11
def test_a_step_between_allocations_runs_what_equal_bits_run():
    x = torch.randn(8, 3, 16, 16)
    equal = actnn.compress(model(), bits=2, min_bytes=0)
    adaptive = actnn.compress(model(), level="L3", min_bytes=0)
    train(equal, x, 10)
    train(adaptive, x, 10)
    bits = {known.bits for known in adaptive_of(adaptive).statistics.tensors.values()}
    assert len(bits) > 1
    assert operations(adaptive, x) == operations(equal, x)
    adaptive_of(adaptive).statistics.refresh = 1
    assert operations(adaptive, x) != operations(equal, x)


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_codes_are_never_larger_than_those_of_equal_bits(bits, layout):
    held = {}
    for level in ("L2", "L3"):
        net = actnn.compress(model(), bits=bits, level=level, min_bytes=0)
        net.to(memory_format=layout)
        scales = torch.logspace(-2, 1, 8).view(-1, 1, 1, 1)
        x = (torch.randn(8, 3, 16, 16) * scales).to(memory_format=layout)
        for _ in range(24):
            train(net, x, 1)
            records = [r for r in net.actnn.records if r.reason == "compressed"]
            held.setdefault(level, []).append(sum(r.held for r in records))
    assert all(a <= b for a, b in zip(held["L3"], held["L2"], strict=True))
    assert all(a > 0 for a in held["L3"])


def test_a_captured_step_learns_nothing(monkeypatch):
    net, x = actnn.compress(model(), level="L3", min_bytes=0), torch.randn(8, 3, 16, 16)
    train(net, x, 4)
    statistics = adaptive_of(net).statistics
    bits = {name: statistics.tensor_bits(name) for name in statistics.tensors}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(20):
        train(net, x, 1)
    assert statistics.steps == 4
    assert not statistics.observing
    assert not any(p._backward_hooks for p in net.parameters())
    assert bits == {name: statistics.tensor_bits(name) for name in statistics.tensors}
    monkeypatch.undo()
    train(net, x, 1)
    assert statistics.steps == 5


def test_no_parameter_is_held():
    """fully_shard puts others in their place, whose memory would be the model's once more."""
    net, x = actnn.compress(model(), level="L3", min_bytes=0), torch.randn(8, 3, 16, 16)
    train(net, x, 7)
    old = weakref.ref(net[0].weight)
    net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    train(net, x, 2)
    gc.collect()
    assert old() is None
