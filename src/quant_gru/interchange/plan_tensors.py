"""All numbers of a plan as named integer tensors, for readers that cannot derive them."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.integer.tables import Table
from quant_gru.integer.weighted_sum import WeightedSum

SUMS = (
    "gate.z_pre",
    "gate.r_pre",
    "op.rRh",
    "gate.g_pre",
    "op.old_contrib",
    "op.new_contrib",
    "output.h",
)


def suffix_of(layer: int, direction: int) -> str:
    """Return the end of the names of a cell's tensors, such as '_l0_reverse'."""
    return f"_l{layer}{'_reverse' if direction else ''}"


def derived_tensors(plan: GRUPlan) -> dict[str, Tensor]:
    """Return everything of a plan that is not in the buffers of a frozen GRU.

    Every name ends in the suffix of its cell. All tensors are int64 unless stated:

    - `cell`: (3,) `one`, `shift_Bw`, `shift_Br`.
    - `quantizer.NAME`: (3,) `lo`, `hi`, `zero_point`; `scale.NAME`: float32 (1,).
    - `sum.NAME`: (2,) or (3,) the shift k and the multiplier of each term.
    - `table.NAME.bounds` (S,) and `table.NAME.coefficients` (S, d + 1), in the smallest dtype;
      `table.NAME.numbers`: (6,) `last`, `shift`, `zero_point`, `lo`, `hi`, `segment_shift` or -1.
    - `between`: (directions of the layer below, 2) k and multiplier, for layers above the first.

    Args:
        plan: A plan on the CPU.
    """
    found: dict[str, Tensor] = {}
    for layer, cells in enumerate(plan.cells):
        for direction, cell in enumerate(cells):
            numbers = _cell(cell)
            if layer:
                below = plan.between[layer - 1][direction]
                numbers["between"] = _integers([_numbers(each) for each in below])
            suffix = suffix_of(layer, direction)
            found.update({name + suffix: tensor for name, tensor in numbers.items()})
    return found


def sums_of_cell(plan: GRUPlan, layer: int, direction: int) -> list[int]:
    """Return the derived numbers of a cell in the order of files.

    They are `one`; shift and multipliers of each sum of `SUMS` that the cell has, and of zoneout;
    and those of the sums that convert the states of the layer below.
    """
    frozen = plan.cells[layer][direction].frozen
    numbers = [frozen.one]
    for name in SUMS:
        if name in frozen.sums:
            numbers += _numbers(frozen.sums[name])
    if frozen.zoneout is not None:
        numbers += _numbers(frozen.zoneout)
    if layer:
        for below in plan.between[layer - 1][direction]:
            numbers += _numbers(below)
    return numbers


def _cell(cell: CellPlan) -> dict[str, Tensor]:
    frozen = cell.frozen
    found = {"cell": _integers([frozen.one, cell.shift_Bw, cell.shift_Br])}
    for name, q in {**frozen.quantizers, "input.x": frozen.border}.items():
        found[f"quantizer.{name}"] = _integers([q.lo, q.hi, q.zero_point])
        found[f"scale.{name}"] = torch.tensor([q.scale], dtype=torch.float32, device="cpu")
    for name, weighted_sum in frozen.sums.items():
        found[f"sum.{name}"] = _integers(_numbers(weighted_sum))
    if frozen.zoneout is not None:
        found["sum.zoneout"] = _integers(_numbers(frozen.zoneout))
    for name, table in frozen.tables.items():
        found.update({f"table.{name}.{key}": value for key, value in _table(table).items()})
    return found


def _table(table: Table) -> dict[str, Tensor]:
    u = -1 if table.segment_shift is None else table.segment_shift
    numbers = [table.last, table.shift, table.zero_point, table.lo, table.hi, u]
    return {
        "bounds": table.bounds,
        "coefficients": table.coefficients,
        "numbers": _integers(numbers),
    }


def _numbers(weighted_sum: WeightedSum) -> list[int]:
    return [int(weighted_sum.shift), *map(int, weighted_sum.multipliers)]


def _integers(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
