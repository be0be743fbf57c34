"""Selection of the kernel for the input projection of a direction, in native code."""

from __future__ import annotations

from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernels import _native
from quant_gru.kernels._native import Chip

POLICY = _native.ProjectionPolicy()
"""What experiments change, such as whether recurrences start before their projections end."""


def chip_of(machine: Device) -> Chip:
    """Return what projections depend on of a machine."""
    return Chip(machine.arch, machine.clusters())
