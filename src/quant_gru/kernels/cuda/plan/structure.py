"""The frozen part of a plan as kernel arguments, and the choice of kernels for a plan."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan, FrozenPart
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import EXACT_BITS, Table
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernels.cuda.gates.compressed_table import CODES as SEGMENT
from quant_gru.kernels.cuda.gates.compressed_table import compress, extrapolated, most_segments
from quant_gru.kernels.cuda.gates.saturating import CODES, ENTRIES, first_entry, saturated_numbers
from quant_gru.kernels.cuda.machine import COLD, refuse_in_capture
from quant_gru.kernels.cuda.structs import CELL_C, SUM_C, SUMS, TableC

NARROW_BITS = 16
PRE_ACTIVATION = {
    "gate.z_out": "gate.z_pre",
    "gate.r_out": "gate.r_pre",
    "gate.g_out": "gate.g_pre",
}
_MAGIC = {"float": 12582912.0, "double": 6755399441055744.0}
# how kernels read a table: one entry per code in shared or global memory, quadratics, compressed
DIRECT, DIRECT_GLOBAL, QUADRATIC, COMPRESSED = 0, 1, 2, 3
MOST_SHARED = 227 << 10  # bytes per block, for compute capabilities 9 and 10
SMALLEST, LARGEST = 1e-20, 1e20  # multipliers and their products stay normal in float32
_SEGMENTS = 256  # tables reserve room for a multiple of this many quadratics


class Gates(NamedTuple):
    """The gate arithmetic of a kernel.

    Attributes:
        real: 'float' or 'double'.
        tables: How the tables of z, r and g are read; see arithmetic.cuh and compressed_table.cuh.
        table_bytes: Bytes of shared memory for the tables.
    """

    real: str
    tables: tuple[int, int, int]
    table_bytes: int


@dataclass(frozen=True)
class Form:
    """The structural properties of a plan, which select and specialize its kernels.

    Attributes:
        narrow: All widths are at most 16 bits, and sums fit 64 bits.
        real: 'float' if the gate arithmetic is exact in float32, otherwise 'double'.
        words: Some sums need 64-bit integers.
        weight_bytes: Bytes of a code of R.
        state_bytes: Bytes of a state code inside a kernel.
        wide_input: Codes of matmul.Wx need 16 bits.
        out_bytes: Bytes of a state code at the interface.
        tables: How the tables of z, r and g are read; see arithmetic.cuh.
        table_bytes: Bytes of shared memory for the tables.
        fused: Which of op.rRh, op.old_contrib, op.new_contrib are rounded to codes.
        zoneout: The new state includes a fraction of the previous state.
        own: Gate arithmetic of the persistent recurrence, if other kernels use a different one.
        saturated: Whether the persistent recurrence uses the gates of saturating.cuh.
        powers: Multipliers of products are powers of two.
    """

    narrow: bool
    real: str
    words: bool
    weight_bytes: int
    state_bytes: int
    wide_input: bool
    out_bytes: int
    tables: tuple[int, int, int]
    table_bytes: int
    fused: tuple[bool, bool, bool]
    zoneout: bool = False
    own: Gates | None = None
    saturated: bool = False
    powers: bool = False

    @property
    def recurrence(self) -> Gates:
        """The gate arithmetic of the persistent recurrence."""
        return self.own or Gates(self.real, self.tables, self.table_bytes)

    @property
    def in_int32(self) -> bool:
        """Whether the persistent recurrence has 16-bit codes in float32 and sums R h in int32."""
        return self.recurrence.real != self.real

    @property
    def structure(self) -> Form:
        """The form without its choice of gate arithmetic. Every such choice is exact."""
        return replace(
            self,
            real="double",
            words=False,
            tables=(DIRECT_GLOBAL, DIRECT_GLOBAL, DIRECT_GLOBAL),
            table_bytes=0,
            own=None,
            saturated=False,
            powers=False,
        )

    @property
    def products(self) -> dict[str, int]:
        """Macros: which products are requantized to codes, and whether zoneout is on."""
        names = ("QG_RRH", "QG_OLD", "QG_NEW", "QG_ZONEOUT")
        return dict(zip(names, map(int, (*self.fused, self.zoneout)), strict=True))


class FrozenNumbers:
    """The gate arithmetic and tables, created once; piecewise tables need a host sync.

    Attributes:
        modes: How double arithmetic reads the tables of z, r and g.
        near: The same for devices with large shared memory.
        codes: Number of entries of these tables, one per input code.
        segments: Number of segments of these tables.
    """

    def __init__(self, frozen: FrozenPart) -> None:
        self._keep: list[Tensor] = []
        q = frozen.quantizers
        tables = [frozen.tables[name] for name in PRE_ACTIVATION]
        pres = [q[name] for name in PRE_ACTIVATION.values()]
        self.codes = [_entries(pre)[1] for pre in pres]
        self.segments = [table.coefficients.shape[0] for table in tables]
        self.modes = [_mode(*each) for each in zip(tables, pres, strict=True)]
        self.near = list(self.modes)
        self._tables = [self._table(*each) for each in zip(tables, pres, strict=True)]
        for i, table in enumerate(self._tables):
            if table.lines:
                self.near[i] = COMPRESSED
        self.cells = {real: self._cell(frozen, real) for real in CELL_C}
        self.saturated = saturated_numbers(frozen)

    def _cell(self, frozen: FrozenPart, real: str) -> Any:
        q, magic = frozen.quantizers, _MAGIC[real]
        Wx, Rh, h = q["matmul.Wx"], q["matmul.Rh"], q["output.h"]
        cell: Any = CELL_C[real]()
        for field, name in SUMS.items():
            if name in frozen.sums:
                setattr(cell, field, _sum(frozen.sums[name], real))
        if frozen.zoneout is not None:
            cell.zoneout = _sum(frozen.zoneout, real)
        cell.z, cell.r, cell.g = self._tables
        cell.one, cell.one_integer = frozen.one, frozen.one
        cell.Rh_lo, cell.Rh_hi = magic + (Rh.lo - Rh.zero_point), magic + (Rh.hi - Rh.zero_point)
        cell.Wx_offset = Wx.zero_point - Wx.lo
        cell.h_zero, cell.h_offset = h.zero_point, byte_offset(h)
        return cell

    def _table(self, table: Table, pre: Quantizer) -> Any:
        c: Any = TableC()
        if pre.bits <= NARROW_BITS:
            first, c.entries = _entries(pre)
            codes = torch.arange(first, first + c.entries, device=table.bounds.device)
            outputs = table(codes.clamp(pre.lo, pre.hi)) - table.zero_point
            c.direct = self._pointer(outputs.to(torch.float32))
            if pre.bits > EXACT_BITS:
                self._add_compressed(c, outputs, pre.lo - pre.zero_point)
        c.bounds = self._pointer(table.bounds.to(torch.int64))
        c.coefficients = self._pointer(table.coefficients.to(torch.int64))
        c.pre_lo, c.pre_zero, c.least = _entries(pre)[0], pre.zero_point, pre.lo
        c.segments, c.degree = table.coefficients.shape[0], table.coefficients.shape[1] - 1
        c.shift, c.last = table.shift, table.last
        c.lo, c.hi = table.lo - table.zero_point, table.hi - table.zero_point
        c.segment_shift, c.scale = table.segment_shift or 0, 2.0**-table.shift
        return c

    def _add_compressed(self, c: Any, outputs: Tensor, first: int) -> None:
        # segments begin at multiples of 16 codes, and kernels copy them in pairs
        before = first % SEGMENT
        found = compress(extrapolated(outputs, before, -(before + len(outputs)) % (2 * SEGMENT)))
        if found is not None:
            c.lines, c.line_count = self._pointer(found), len(found)
            c.line_origin = first - before

    def _pointer(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._keep.append(tensor)
        return tensor.data_ptr()

    def fill(self, record: Any, form: Form) -> None:
        """Set the gate arithmetic in the arguments of a recurrence launch."""
        record.cell = self.cells[form.recurrence.real]
        if form.saturated:
            record.saturated = self.saturated

    def table_bytes(self, tables: Sequence[int]) -> int:
        """Return the bytes of shared memory that tables need when read in the given modes.

        The result does not depend on the first and last code of a table. Directions with different
        zero points can therefore share a launch.
        """
        size = {
            DIRECT: lambda i: (self.codes[i] + 1) // 2 * 8,
            DIRECT_GLOBAL: lambda i: 0,
            QUADRATIC: lambda i: 24 * -(-self.segments[i] // _SEGMENTS) * _SEGMENTS,
            COMPRESSED: lambda i: 8 * most_segments(self.codes[i]) + 8,
        }
        return sum(size[mode](i) for i, mode in enumerate(tables))


_frozen: weakref.WeakKeyDictionary[FrozenPart, FrozenNumbers] = weakref.WeakKeyDictionary()


def frozen_numbers(frozen: FrozenPart) -> FrozenNumbers:
    """Return the numbers of a frozen part, which are created at their first use."""
    found = _frozen.get(frozen)
    if found is None:
        device = next(iter(frozen.tables.values())).bounds.device
        refuse_in_capture(device, COLD)
        found = _frozen[frozen] = FrozenNumbers(frozen)
    return found


def gates_of(several: Sequence[FrozenNumbers], real: str, *, near: bool = False) -> Gates:
    """Return the gate arithmetic of a launch, for all its directions.

    Args:
        several: The numbers of each direction.
        real: 'float' or 'double'.
        near: Whether the device has large shared memory.
    """
    z, r, g = (_table_mode(several, gate, real, near) for gate in range(3))
    return Gates(real, (z, r, g), max(each.table_bytes((z, r, g)) for each in several))


def _table_mode(several: Sequence[FrozenNumbers], gate: int, real: str, near: bool) -> int:
    """Return the fastest mode for a gate's tables if directions agree, else global memory."""
    modes = {each.near[gate] for each in several}
    if not near or len(modes) > 1:
        modes = {each.modes[gate] for each in several}
    mode = modes.pop() if len(modes) == 1 else DIRECT_GLOBAL
    return DIRECT_GLOBAL if mode == QUADRATIC and real == "float" else mode


def _entries(pre: Quantizer) -> tuple[int, int]:
    """Return the first entry's code and the number of entries, for one entry per code."""
    if pre.hi - pre.lo < CODES:
        return first_entry(pre) + pre.zero_point, ENTRIES
    return pre.lo, pre.hi - pre.lo + 1


def _mode(table: Table, pre: Quantizer) -> int:
    """Return the fastest mode that reads a table exactly."""
    if pre.bits <= EXACT_BITS:
        return DIRECT
    if pre.bits > NARROW_BITS or table.segment_shift is None or table.coefficients.shape[1] != 3:
        return DIRECT_GLOBAL
    length = 1 << table.segment_shift
    sizes = (
        abs(c0) + abs(c1) * length + abs(c2) * length**2
        for c0, c1, c2 in table.coefficients.tolist()
    )
    return QUADRATIC if max(sizes) < 1 << 53 else DIRECT_GLOBAL


def planes_of(bits: int) -> int:
    """Return the bytes of a code inside a kernel, by its width in bits."""
    return 1 if bits <= 8 else 2


def byte_offset(q: Quantizer) -> int:
    """Return the offset that is subtracted from codes to fit signed 8 or 16 bits."""
    return 0 if q.signed else 1 << (7 if q.bits <= 8 else 15)


def form_of(plan: CellPlan) -> Form:
    """Return the form of a plan, from its widths and frozen numbers only."""
    w, q, frozen = plan.weights, plan.frozen.quantizers, plan.frozen
    sums = frozen.sums
    several = [each for each in sums.values() if len(each.multipliers) > 1]
    if frozen.zoneout is not None:
        several.append(frozen.zoneout)
    product = frozen.largest_product
    narrow = (
        max(each.bits for each in q.values()) <= NARROW_BITS
        and max(w.bits_W, w.bits_R) <= NARROW_BITS
        and all(each.tier != "e" for each in several)
        and max(w.bound_Wx, w.bound_Rh) < 1 << 52
        and product < 1 << 53
    )
    weight_bytes = 1 if w.bits_R <= 8 else 2
    state_bytes = 1 if plan.h.bits <= 8 else 2
    in_float = (
        narrow
        and weight_bytes == state_bytes == 1
        and all(each.tier == "a" for each in several)
        and product < 1 << 24
        and all(_fits_float(each) for each in sums.values())
    )
    real = "float" if in_float else "double"
    numbers = frozen_numbers(frozen)
    powers = all(_is_power(each) for each in sums.values() if len(each.multipliers) == 1)
    in_int32 = (
        narrow
        and not in_float
        and (weight_bytes, state_bytes) == (1, 2)
        and frozen.one_minus_z < 1 << 24
        and set(numbers.near) <= {DIRECT, COMPRESSED}
        and all(each.tier == "a" for each in several)
        and all(map(_fits_float, sums.values()))
        and powers
    )
    own = None
    if narrow and (in_int32 or COMPRESSED in numbers.near) and _has_large_shared_memory(w.R.device):
        step = "float" if in_int32 else real
        own = gates_of([numbers], step, near=True)
    _, tables, table_bytes = gates_of([numbers], real)
    return Form(
        narrow,
        real,
        any(each.tier == "d" for each in several),
        weight_bytes,
        state_bytes,
        q["matmul.Wx"].bits > 8,
        torch.empty((), dtype=plan.h.container, device="meta").element_size(),
        tables,
        table_bytes,
        ("op.rRh" in sums, "op.old_contrib" in sums, "op.new_contrib" in sums),
        frozen.zoneout is not None,
        own,
        in_float and own is None and set(tables) == {DIRECT} and numbers.saturated is not None,
        powers,
    )


def joint_form(directions: Sequence[tuple[Form, FrozenNumbers]]) -> Form | None:
    """Return the form of one recurrence launch for several directions, or None if impossible.

    Directions may differ in their gate arithmetic: the launch uses one that is exact for all. If
    all directions have the same form, it is returned unchanged.

    Args:
        directions: The form and the frozen numbers of each direction.
    """
    forms = [form for form, _ in directions]
    first, several = forms[0], [numbers for _, numbers in directions]
    if all(form == first for form in forms):
        return first
    if not first.narrow or any(form.structure != first.structure for form in forms):
        return None
    real = "float" if all(form.real == "float" for form in forms) else "double"
    own = None
    if all(form.own is not None for form in forms):
        gates = gates_of(several, real, near=True)
        if all(form.in_int32 for form in forms) and set(gates.tables) <= {DIRECT, COMPRESSED}:
            own = gates._replace(real="float")
        elif COMPRESSED in gates.tables:
            own = gates
    _, tables, table_bytes = gates_of(several, real)
    return replace(
        first,
        real=real,
        words=any(form.words for form in forms),
        tables=tables,
        table_bytes=table_bytes,
        own=own,
        saturated=all(form.saturated for form in forms),
        powers=all(form.powers for form in forms),
    )


def _has_large_shared_memory(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _is_power(each: WeightedSum) -> bool:
    M = int(each.multipliers[0])
    return M & (M - 1) == 0


def _fits_float(each: WeightedSum) -> bool:
    ratios = (int(M) * 2.0 ** -int(each.shift) for M in each.multipliers)
    return all(m == 0 or SMALLEST < m < LARGEST for m in ratios)


def _sum(each: WeightedSum, real: str) -> ctypes.Structure:
    c: Any = SUM_C[real]()
    magic = _MAGIC[real]
    lo, hi = each.lo - each.zero_point, each.hi - each.zero_point
    for i, M in enumerate(each.multipliers):
        c.M[i] = int(M)
        c.m[i] = _ldexp(int(M), -int(each.shift))
    c.lo, c.hi, c.low, c.high = magic + lo, magic + hi, lo, hi
    c.k, c.in_words = int(each.shift), each.tier == "d"
    return c  # type: ignore[no-any-return]


def _ldexp(M: int, exponent: int) -> float:
    """Return M * 2^exponent, or 0 on overflow, which occurs only in wide plans that ignore it."""
    try:
        return M * 2.0**exponent
    except OverflowError:
        return 0.0
