"""Local derivatives of plans in bytes, by one kernel on the host: the bits that three give."""

import ctypes
from dataclasses import replace

import pytest
import torch
from backward_cases import both_directions, outputs, plans_of, random_gradients, random_tape
from host_machine import COMPILER, Host, folder_of
from random_plans import random_case

from quant_gru import QuantConfig
from quant_gru.integer.backward import Tape, Wanted
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward import layer
from quant_gru.kernels.cuda.backward.launch_plan import POLICY, VARIABLES
from quant_gru.kernels.cuda.recurrence.planner import grid_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
]
# the word of a direction's arguments with the address of the derivatives that the recurrence reads;
# that of the others follows
DERIVATIVES = {"derivatives_of": 20, "derivatives_bytes": 16}


class Watching(Host):
    """Keeps the derivatives that a launch has written."""

    def launch(self, kernel, grid, arguments):
        super().launch(kernel, grid, arguments)
        first = DERIVATIVES.get(kernel.function)
        if first is not None:
            macros = dict(kernel.macros)
            size = self.elements * (8 if macros["HALF"] else 16)
            words = len(arguments) // macros["DIRS"]
            self.derivatives = [
                [ctypes.string_at(arguments[at + i], size) for i in range(2)]
                for at in range(first, len(arguments), words)
            ]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Watching(folder_of(tmp_path_factory))


def derivatives_of(host, tapes, precision, fused):
    T, N, H = tapes[0].out.shape
    host.elements = T * N * H
    host.launched.clear()
    given = zip(*(random_gradients(tape) for tape in tapes), strict=True)
    # schedules are kept by what they depend on, and tests change how they are made
    layer._schedules.clear()
    layer.backward(tapes, *given, Wanted(), precision, host)
    layer._schedules.clear()
    names = [name for name, _ in host.launched if name in DERIVATIVES]
    assert names == ["derivatives_bytes" if fused else "derivatives_of"]
    return host.derivatives


def check(host, monkeypatch, tapes, shape=None, precision="bf16"):
    """Both ways; `shape`: warps of units and groups of a block."""
    monkeypatch.setenv(VARIABLES[0], "1,1,1,8")
    with monkeypatch.context() as m:
        m.setattr(POLICY, "from_bytes", False)
        expected = derivatives_of(host, tapes, precision, False)
    with monkeypatch.context() as m:
        if shape is not None:
            m.setattr(POLICY, "derivatives", shape)
            # a single multiprocessor has several tiles to a group
            m.setattr(host, "resident", dict.fromkeys(host.resident, 1))
        found = derivatives_of(host, tapes, precision, True)
    for a, b in zip(found, expected, strict=True):
        assert a == b


@pytest.mark.parametrize(
    ("C", "H", "T", "N", "shape", "reverse"),
    [
        (5, 20, 6, 5, None, True),
        (1, 1, 1, 1, None, False),
        (16, 16, 7, 11, (1, 1), True),
        (70, 40, 9, 9, (2, 1), False),
        (33, 67, 5, 21, (4, 2), True),
        (130, 24, 4, 33, (1, 3), False),
    ],
)
def test_sizes(host, monkeypatch, C, H, T, N, shape, reverse):
    """Features of no stage, units and rows of no tile, more rows than groups hold at once."""
    (plan,) = plans_of(C, H)
    check(host, monkeypatch, [random_tape(plan, T, N, reverse=reverse)], shape)


@pytest.mark.parametrize(
    ("precision", "lengths", "held"),
    [("bf16", True, False), ("fp32", False, True), ("bf16", True, True), ("fp32", False, False)],
)
def test_units_that_stay(host, monkeypatch, precision, lengths, held):
    (plan,) = plans_of(5, 20, zoneout=0.2)
    tape = random_tape(plan, 6, 5, lengths=lengths, held=held, reverse=True)
    check(host, monkeypatch, [tape], precision=precision)


def test_no_state_before_and_real_inputs(host, monkeypatch):
    (plan,) = plans_of(5, 20)
    for reverse in (False, True):
        tape = random_tape(plan, 6, 5, reverse=reverse)
        x = torch.randn(6, 5, 5)
        check(host, monkeypatch, [replace(tape, x=x, h0=None)])


def test_both_directions(host, monkeypatch):
    plans = plans_of(5, 40, bidirectional=True)
    tapes = both_directions(plans, random_tape(plans[0], 6, 5, lengths=True))
    check(host, monkeypatch, tapes, (2, 2))


@pytest.mark.parametrize("seed", range(4))
def test_random_plans(host, monkeypatch, seed):
    """Saturation at every operator, zero points anywhere, sums that float does not hold."""
    case = random_case(seed, "w8a8")
    out = outputs(case.plan, case.x, case.h0, case.lengths, case.reverse)
    tape = Tape(case.plan, case.x, case.h0, out, case.lengths, case.reverse)
    check(host, monkeypatch, [tape])


@pytest.mark.parametrize("operator", ["gate.g_pre", "matmul.Wx"])
def test_wider_operators_between_bytes(host, monkeypatch, operator):
    config = QuantConfig.int8().replace(operator, bitwidth=16)
    (plan,) = plans_of(5, 20, config)
    check(host, monkeypatch, [random_tape(plan, 6, 5)])


def test_sums_that_float_does_not_hold(host, monkeypatch):
    """Of some channels only: the others have the same bits either way."""
    torch.manual_seed(0)
    (plan,) = plans_of(2200, 20)
    w = plan.weights
    reach = w.W.to(torch.int64).abs().sum(1) * plan.x.max_abs + w.Bw.abs()
    beyond = (reach >= 1 << 24).tolist()
    assert any(beyond)
    assert not all(beyond)
    check(host, monkeypatch, [random_tape(plan, 2, 3)], (1, 1))


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("H", [1, 16, 32, 48, 100, 128, 256, 512, 640, 1024, 2048])
def test_shapes_fit(H, clusters):
    for C in (1, 80, 512, 1024):
        padded = (-(-C // 16) * 16, -(-H // 16) * 16)
        for directions in (1, 2):
            for rows in (1, 100, 12800, 1 << 20):
                shape = _native.choose_derivatives(H, rows, padded, 3072, clusters)
                if shape is None:
                    assert C + H > (1024 if clusters else 900)
                    continue
                made, share = shape.grid(H, rows, directions, 132)
                grid = grid_of(made)
                across = -(-H // (16 * shape.unit_warps))
                assert grid.shared_bytes < (227 if clusters else 99) << 10
                assert share % 8 == 0
                groups = grid.blocks[0] // across * shape.groups
                assert rows <= share * groups < rows + share * shape.groups
                assert grid.threads <= 384
    assert _native.choose_derivatives(16, 1 << 31, (16, 16), 3072, True) is None
