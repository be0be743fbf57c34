"""Which input projection a call gets: the same in prepared calls as in the executor."""

import pytest
import torch
from host_machine import Host
from projection_blocks import overlap_of, select

from kept import shared
from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer.call_form import CallForm
from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernels import _native
from quant_gru.kernels._native import Method
from quant_gru.kernels.cuda.forward import executor
from quant_gru.kernels.cuda.forward.stack import Stack
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.projection.select import POLICY
from quant_gru.kernels.cuda.recurrence import planner

PROJECTIONS = {
    "project": Method.CODES_FEW_ROWS,
    "finish": Method.GEMM,
    "project_bytes": Method.CODES_TILED,
    "project_passing": Method.CODES_TILED,
    "project_few": Method.REALS_FEW_ROWS,
    "project_reals": Method.REALS_TILED,
    "project_groups": Method.REALS_TILED,
}
SIZES = [(1, 1), (2, 32), (13, 5), (50, 32), (300, 32)]
SHAPES = [(5, 20), (64, 128), (400, 64), (512, 256)]


class Recorder(Host):
    """A GPU on which nothing runs; knows which projections have been asked of it."""

    def __init__(self, folder, resident, arch) -> None:
        super().__init__(folder, resident)
        self.arch = arch
        self.projections: list[tuple[Kernel, tuple[int, int], int, int]] = []

    def prepare(self, kernel, grid, arguments):
        self._record(kernel, grid)
        return super().prepare(kernel, grid, arguments)

    def launch(self, kernel, grid, arguments):
        self._record(kernel, grid)

    def _record(self, kernel, grid):
        if kernel.function in PROJECTIONS:
            place = (grid.blocks, grid.threads, grid.shared_bytes)
            self.projections.append((kernel, *place))

    def taken(self):
        """The projections since the last time, and the way each is made."""
        found, self.projections = self.projections, []
        return found, [PROJECTIONS[kernel.function] for kernel, *_ in found]


@pytest.fixture(params=[(None, "sm_80"), (None, "sm_90a"), ({1: 80}, "sm_80")], ids=str)
def machine(request, tmp_path):
    return Recorder(tmp_path, *request.param)


@shared
def plan_of(config, C, H):
    torch.manual_seed(0)
    gru = QuantGRU(C, H, config=getattr(QuantConfig, config)()).eval()
    gru.calibrate(torch.randn(4, 2, C))
    gru.finalize_calibration()
    with torch.no_grad():
        return gru._plan()


@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
@pytest.mark.parametrize(("C", "H"), SHAPES)
def test_prepared_calls_and_the_executor_choose_alike(machine, monkeypatch, config, C, H):
    """Codes are all that the executor reads, and its projection ends before its recurrence."""
    monkeypatch.setattr(POLICY, "reads_reals", False)
    monkeypatch.setattr(POLICY, "overlaps", False)
    monkeypatch.setattr(torch, "_int_mm", lambda a, b, out: None)  # slow on a CPU
    plan = plan_of(config, C, H)
    stack = Stack(plan, machine)
    for T, N in SIZES:
        if stack.schedule(T, N, CallForm()) is None:
            continue  # its weights fit no registers
        prepared, ways = machine.taken()
        cell, codes = plan.cells[0][0], torch.zeros(T, N, C, dtype=torch.int32)
        h0 = torch.zeros(N, H, dtype=torch.int32)
        executor.run(cell, codes, h0, machine=machine)
        assert machine.taken() == (prepared, ways)
        assert len(ways) == 1


@pytest.mark.parametrize("config", ["int8", "w8a16", "int16"])
@pytest.mark.parametrize(("C", "H"), SHAPES)
@pytest.mark.parametrize("real_values", [False, True])
def test_what_is_selected_is_launched(machine, config, C, H, real_values):
    """Prepared calls read real values, so that theirs are the launches to compare with."""
    plan = plan_of(config, C, H)
    numbers = numbers_of(plan.cells[0][0])
    stack = Stack(plan, machine)
    for T, N in SIZES:
        shape = planner.choose(numbers.form, H, N, 1, machine.clusters())
        if shape is None:
            continue
        found = overlap_of(machine, numbers, shape, T, N)
        selection = select(machine, numbers, shape, T, N, real_values=real_values, overlap=found)
        assert (selection.reals is not None) == (selection.method == Method.REALS_TILED)
        assert (selection.codes is not None) == (selection.method == Method.CODES_TILED)
        assert real_values or not selection.reads_reals
        if real_values:
            stack.schedule(T, N, CallForm())
            assert machine.taken()[1] == [selection.method]


def test_every_way_is_selected(tmp_path):
    """The sizes of these tests reach all projections."""
    machine, found = Recorder(tmp_path, None, "sm_90a"), set()
    for config, (C, H) in (("int8", SHAPES[1]), ("int16", SHAPES[0]), ("int8", SHAPES[2])):
        numbers = numbers_of(plan_of(config, C, H).cells[0][0])
        for T, N in SIZES:
            shape = planner.choose(numbers.form, H, N, 1, machine.clusters())
            for real_values in (False, True):
                way = select(machine, numbers, shape, T, N, real_values=real_values)
                found.add(way.method)
    assert found == set(Method)


def test_sums_of_bytes_are_those_that_int32_holds():
    """With more features, products of two bytes that are -128 would add up to 2^31."""
    most, shape = (1 << 31) // (128 * 128), planner.make_shape(16, 1, 1, 1, 1)
    chip = _native.Chip("sm_90a", {1: 132, 2: 66})
    for features, method in ((most - 1, Method.GEMM), (most, Method.CODES_FEW_ROWS)):
        size = _native.ProjectionSize(65, 1, features, 16, (16, True, 1.0, 0), shape)
        found = _native.select_projection(chip, size, False, None, POLICY)
        assert found.method == method
