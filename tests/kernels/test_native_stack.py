"""Native stacks and streams: every value that of the reference executor."""

import pytest
import torch
from random_stacks import random_stack

from quant_gru.execution.layers import run_real
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
