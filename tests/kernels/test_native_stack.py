"""Native stacks and streams: every value that of the reference executor."""

import random
from dataclasses import replace

import pytest
import torch
from bits import same_bits
from random_stacks import random_stack

from quant_gru.execution.layers import run_real
from quant_gru.integer.backward import Kept
from quant_gru.kernels import _native
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.dispatch import CPU
from quant_gru.modules.stream import Stream
from sweeps import first_of

NATIVE = cpu.choices()[:-1]


def reference(case, monkeypatch, kept=None):
    gru = case.gru
    D = 2 if gru.bidirectional else 1
    h0 = case.h0
    if h0 is None:
        h0 = torch.zeros(gru.num_layers * D, case.x.shape[1], gru.hidden_size)
    with monkeypatch.context() as patch:
        patch.setenv(cpu.VARIABLE, cpu.REFERENCE)
        return run_real(case.plan, case.x, h0, case.lengths, kept=kept)


def with_nan(seed):
    """A random stack with NaN in inputs or states, or with weights that are not finite."""
    case, rng = random_stack(seed), random.Random(seed)
    T, N, C = case.x.shape
    x, h0 = case.x.contiguous().resolve_neg().clone(), case.h0
    where = ("x", "row", "all", "h0", "weight")[seed % 5]
    if where == "x":
        for _ in range(rng.randint(1, 4)):
            n = rng.randrange(N)
            t = rng.randrange(T if case.lengths is None else int(case.lengths[n]))
            x[t, n, rng.randrange(C)] = torch.nan
    elif where == "row":
        x[:, rng.randrange(N)] = torch.nan
    elif where == "all":
        x.fill_(torch.nan)
    elif where == "h0":
        states = case.gru.num_layers * (1 + case.gru.bidirectional)
        h0 = torch.zeros(states, N, case.gru.hidden_size) if h0 is None else h0.clone()
        h0[rng.randrange(states), rng.randrange(N), -1] = torch.nan
    else:
        weight = rng.choice(list(case.gru.parameters()))
        with torch.no_grad():
            weight.view(-1)[-1] = rng.choice((torch.nan, torch.inf, -torch.inf))
    if seed % 3 == 0:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return replace(case, x=x, h0=h0)


@torch.no_grad()
@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize("seed", range(12))
def test_stack(seed, monkeypatch):
    case = random_stack(seed)
    y, last = reference(case, monkeypatch)
    torch.set_num_threads(1 + seed % 2)
    before = _native.threads_started()
    for variant in NATIVE:
        stack = cpu.stack_of(case.plan, variant)
        for rows_first in (False, True):
            x = case.x
            x = x.transpose(0, 1).contiguous().transpose(0, 1) if rows_first else x
            got = stack.run(x, case.h0, case.lengths)
            assert got is not None
            assert torch.equal(got[0], y)
            assert torch.equal(got[1], last)
    divides = seed % 2 and (case.x.shape[1] > 1 or case.gru.bidirectional)
    assert (_native.threads_started() > before) == bool(divides)


@torch.no_grad()
@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize("seed", first_of(range(30), 10))
def test_nan(seed, monkeypatch):
    case = with_nan(seed)
    wanted = Kept()
    y, last = reference(case, monkeypatch, wanted)
    assert y.isnan().any() or last.isnan().any()
    torch.set_num_threads(1 + seed % 2)
    for variant in NATIVE:
        stack = cpu.stack_of(case.plan, variant)
        codes = Kept()
        for kept in (None, codes):
            got = stack.run(case.x, case.h0, case.lengths, kept)
            assert same_bits(got[0], y)
            assert same_bits(got[1], last)
        assert all(map(torch.equal, codes.out, wanted.out))


@pytest.mark.parametrize("seed", range(20))
def test_gradients_of_nan(seed, monkeypatch):
    """The forward of a stack leaves to the backward what that of single layers does."""
    case = with_nan(seed)
    case.gru.zoneout, case.gru.use_quantization = 0, True
    results = []
    for whole in (True, False):
        with monkeypatch.context() as patch:
            if not whole:
                patch.setattr(CPU, "stack_of", lambda *_: None)
            case.gru.zero_grad()
            x = case.x.clone().requires_grad_()
            y, last = case.gru(x, case.h0)
            torch.autograd.backward((y, last), (y.detach().nan_to_num(), torch.ones_like(last)))
            results.append([y, last, x.grad, *(w.grad for w in case.gru.parameters())])
    assert results[0][2].isnan().any()
    assert all(map(same_bits, *results))


@torch.no_grad()
def test_weights_that_become_finite(monkeypatch):
    case = random_stack(3)
    weight = case.gru.weight_hh_l0
    variant = cpu.chosen()
    if variant == cpu.REFERENCE:
        pytest.skip("no native kernels")
    value = float(weight[0, 0])
    for put in (value, torch.inf, value, torch.nan, value):
        weight[0, 0] = put
        y, last = reference(case, monkeypatch)
        got = cpu.stack_of(case.plan, variant).run(case.x, case.h0, case.lengths)
        assert bool(last.isnan().any()) == (put != value)
        assert same_bits(got[0], y)
        assert same_bits(got[1], last)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_stream(seed, monkeypatch):
    case = random_stack(seed, bidirectional=False)
    case = type(case)(case.gru, case.x, None, None)
    y, _ = reference(case, monkeypatch)
    for variant in NATIVE:
        monkeypatch.setenv(cpu.VARIABLE, variant)
        stream = Stream(case.plan, case.x.shape[1], case.gru.config)
        for x, expected in zip(case.x, y, strict=True):
            assert torch.equal(stream(x), expected)
