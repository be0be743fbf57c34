"""Selection of the kernel for the input projection of a direction, in native code."""

from __future__ import annotations

from kernel_runtime.cuda.launch import Machine
from quant_gru.kernels import _native
from quant_gru.kernels._native import (
    Chip,
    Overlap,
    ProjectionSize,
    Selection,
    Shape,
    TiledReals,
    Warpgroups,
)
from quant_gru.kernels.cpu.plan_packing import pack_quantizer
from quant_gru.kernels.cuda.plan.tensors import Numbers

RealBlocks = TiledReals | Warpgroups
POLICY = _native.ProjectionPolicy()
"""What experiments change, such as whether recurrences start before their projections end."""


def chip_of(machine: Machine) -> Chip:
    """Return what projections depend on of a machine."""
    return Chip(machine.arch, machine.clusters())


def size_of(numbers: Numbers, shape: Shape, T: int, N: int) -> ProjectionSize:
    """Return the projection of T steps of N rows.

    Args:
        numbers: Numbers of the plan.
        shape: Shape of the recurrence that reads the result.
        T: Steps.
        N: Rows.
    """
    return ProjectionSize(T, N, numbers.C, numbers.W_bits, pack_quantizer(numbers.x), shape)


def overlap_of(machine: Machine, numbers: Numbers, shape: Shape, T: int, N: int) -> Overlap | None:
    """Return the projection that overlaps with one direction's recurrence; None if none pays."""
    size = size_of(numbers, shape, T, N)
    return _native.overlap_of(chip_of(machine), size, numbers.form, POLICY)


def select(
    machine: Machine,
    numbers: Numbers,
    shape: Shape,
    T: int,
    N: int,
    *,
    real_values: bool = False,
    overlap: Overlap | None = None,
) -> Selection:
    """Return the projection that measured fastest among those applicable.

    Args:
        machine: The machine that runs it.
        numbers: Numbers of the plan.
        shape: Shape of the recurrence that reads the result.
        T: Steps.
        N: Rows.
        real_values: Whether x is given as real values; otherwise it is given as codes.
        overlap: The overlap with the recurrence, or None.
    """
    size = size_of(numbers, shape, T, N)
    return _native.select_projection(chip_of(machine), size, real_values, overlap, POLICY)
