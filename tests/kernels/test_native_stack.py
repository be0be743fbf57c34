"""Native stacks and streams: every value that of the reference executor."""

import dataclasses
from math import nan

import pytest
import torch
from random_stacks import random_stack

from quant_gru.execution.layers import run_real
from quant_gru.integer.backward import Kept
from quant_gru.kernels import _native
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.modules.stream import Stream

NATIVE = cpu.choices()[:-1]


def reference(case, monkeypatch):
    gru = case.gru
    D = 2 if gru.bidirectional else 1
    h0 = case.h0
    if h0 is None:
        h0 = torch.zeros(gru.num_layers * D, case.x.shape[1], gru.hidden_size)
    with monkeypatch.context() as patch:
        patch.setenv(cpu.VARIABLE, cpu.REFERENCE)
        return run_real(case.plan, case.x, h0, case.lengths)


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


def with_nan(case, seed):
    """The case with NaN in inputs and states, and in one of three a weight that is not finite."""
    generator = torch.Generator().manual_seed(seed)

    def some(t):
        where = None if t is None else torch.rand(t.shape, generator=generator) < 0.01
        return None if t is None else t.masked_fill(where, nan)

    x = some(case.x)
    x[-1, -1, -1] = nan
    if seed % 3 == 0:
        *_, last = case.gru.parameters()
        last.view(-1)[0] = (nan, torch.inf, -torch.inf)[seed // 3 % 3]
    return dataclasses.replace(case, x=x, h0=some(case.h0))


@torch.no_grad()
@pytest.mark.usefixtures("cheap_threads")
@pytest.mark.parametrize("seed", range(18))
def test_nan(seed, monkeypatch):
    case = with_nan(random_stack(seed), seed)
    expected = reference(case, monkeypatch)
    assert expected[0].isnan().any()
    torch.set_num_threads(1 + seed % 2)
    for variant in NATIVE:
        kept = Kept()
        found = cpu.stack_of(case.plan, variant).run(case.x, case.h0, case.lengths, kept)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    # whole calls, prepared and not
    case.gru.use_quantization = True
    for _ in range(3 if case.lengths is None else 0):
        found = case.gru(case.x, case.h0)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_stream(seed, monkeypatch):
    case = random_stack(seed, bidirectional=False)
    case = type(case)(case.gru, case.x, None, None)
    y, _ = reference(case, monkeypatch)
    for variant in NATIVE:
        monkeypatch.setenv(cpu.VARIABLE, variant)
        stream = Stream(case.plan, case.x.shape[1])
        for x, expected in zip(case.x, y, strict=True):
            assert torch.equal(stream(x), expected)
