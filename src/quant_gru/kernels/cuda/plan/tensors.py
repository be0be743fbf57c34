"""A plan's numbers as kernel arguments: C structures, filled on the host without a device sync.

Numbers that depend on weights stay in device tensors. The structures hold addresses and scalars.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan, WeightPart
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.integer.weights import power_of_two
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernel_runtime.cuda.streams import made_on
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.plan.structure import (
    LARGEST,
    MAGIC,
    SMALLEST,
    byte_offset,
    form_of,
    frozen_numbers,
    planes_of,
)
from quant_gru.kernels.cuda.structs import KINDS, MatrixC

CHANGES = _native.UpdateChanges()
"""Counts changes of what updates in place write, of all plans; prepared updates hold until then."""
_LONG = 512  # features; with about three times as many, typical sums of two planes exceed int32


# Numbers are kept as long as the weight part that they were derived from.
_packed: weakref.WeakKeyDictionary[Any, tuple[Any, Numbers]] = weakref.WeakKeyDictionary()

# properties that hold derived tensors; each one comes after the properties that it depends on
DERIVED = ("multipliers", "_columns", "gemm", "tiles", "exact_float", "of_bytes")


def _overwrite(kept: Any, new: Any) -> None:
    if isinstance(kept, Tensor):
        kept.copy_(new)
    else:
        for each, other in zip(kept, new, strict=True):
            _overwrite(each, other)


class _cached(cached_property[Any]):
    """A cached property. While a graph is captured, it is recomputed at every use."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        if capturing(instance.device):
            return self.func(instance)
        made = super().__get__(instance, owner)
        instance.count_derived()
        return made


class Numbers:
    """The numbers of one plan on its device.

    Attributes:
        derived: Number of cached values that were derived from the plan's tensors. They have to be
            rewritten when the plan's tensors change in place.
    """

    def __init__(self, plan: CellPlan) -> None:
        self.derived = 0
        # no reference to the plan: a weak dictionary keyed by its weight part holds this object
        self.form = form_of(plan)
        self.device = plan.weights.W.device
        self.H, self.C = plan.hidden_size, plan.input_size
        self.x, self.h = plan.x, plan.h
        self._keep: list[Tensor] = []
        self._fragments: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        q, w = plan.frozen.quantizers, plan.weights
        self._Wx, self._Rh = q["matmul.Wx"], q["matmul.Rh"]
        self.x_offset, self.h_offset = byte_offset(self.x), byte_offset(self.h)
        # a frozen GRU keeps its integers in smaller dtypes
        self._W, self._R = w.W, w.R
        self._B = (w.Bw.to(torch.int64), w.Br.to(torch.int64))
        self._multipliers = (_multipliers(w.Wx), _multipliers(w.Rh))
        self._shifts = (plan.shift_Bw, plan.shift_Br)
        self._widths = (w.bits_W, w.bits_R)
        self.frozen = frozen_numbers(plan.frozen)
        made_on(self.device)

    def count_derived(self) -> None:
        """Record that a value was derived from the plan's tensors and cached."""
        self.derived += 1
        CHANGES.count += 1
        made_on(self.device)

    def _pointer(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._keep.append(tensor)
        return tensor.data_ptr()

    @_cached
    def multipliers(self) -> tuple[Tensor, Tensor]:
        """M / 2^k of each channel of W x and R h, exact in float64 (3H,)."""
        found = []
        for M, k in self._multipliers:
            found.append(M.to(torch.float64) * power_of_two(-k))
        return found[0], found[1]

    def _matrix(self, which: int, codes: Tensor) -> Any:
        c: Any = MatrixC()
        operand, out = ((self.x, self._Wx), (self.h, self._Rh))[which]
        M, k = self._multipliers[which]
        c.codes, c.kind = self._pointer(codes), KINDS[codes.dtype]
        c.bias = self._pointer(self._B[which])
        c.M, c.k = self._pointer(M), self._pointer(k)
        c.bias_shift, c.zero = self._shifts[which], operand.zero_point
        c.lo, c.hi = out.lo - out.zero_point, out.hi - out.zero_point
        c.code_lo = c.lo
        if self.form.narrow:
            c.m = self._pointer(self.multipliers[which])
        return c

    @_cached
    def W(self) -> Any:
        """W in row-major order, for the input projection."""
        return self._matrix(0, self._W)

    @_cached
    def _columns(self) -> tuple[Tensor, ...]:
        return tuple(w.t().to(torch.int32).contiguous() for w in (self._W, self._R))

    @_cached
    def transposed(self) -> tuple[Any, Any]:
        """W and R transposed, for the kernel of wide integers."""
        W, R = (self._matrix(i, w) for i, w in enumerate(self._columns))
        return W, R

    @_cached
    def gemm(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Operands of byte GEMMs for W and for R.

        Returns:
            For each matrix, the weights as int8 (padded features, columns), and the folded bias and
            zero points as int64 (3H,). 8-bit codes have 3H columns and padding. 16-bit codes have
            3H columns of high bytes, 3H columns of low bytes less 128, and a column of ones.
        """
        return self._gemm(0), self._gemm(1)

    def _gemm(self, which: int) -> tuple[Tensor, Tensor]:
        operand, offset = ((self.x, self.x_offset), (self.h, self.h_offset))[which]
        codes = (self._W, self._R)[which].to(torch.int64)
        sums = codes.sum(dim=1)
        folded = self._B[which] + (offset - operand.zero_point) * sums
        if planes_of(operand.bits) == 2:
            folded = folded + 128 * sums
        rows = [codes]
        if planes_of(self._widths[which]) == 2:
            rows = [codes >> 8, (codes & 255) - 128, torch.ones_like(codes[:1])]
        planes = torch.cat(rows)
        features = codes.shape[1]
        # cuBLAS has no kernel for many rows if the number of columns is an odd multiple of 8
        columns, padded = -(-planes.shape[0] // 16) * 16, _padded(features)
        weights = planes.new_zeros((columns, padded), dtype=torch.int8)
        weights[: planes.shape[0], :features] = planes.to(torch.int8)
        return weights.t(), folded

    @_cached
    def tiles(self) -> Tensor:
        """8-bit W in the layout of wgmma_pingpong.cuh: int8 (tiles, panels, 3, 64, 128)."""
        codes = self._W.to(torch.int8).view(3, self.H, self.C)
        tiles, panels = -(-self.H // 64), -(-self.C // 128)
        wide = codes.new_zeros((3, tiles * 64, panels * 128))
        wide[:, : self.H, : self.C] = codes
        rows = wide.view(3, tiles, 64, panels, 8, 16).permute(1, 3, 0, 2, 4, 5)
        # 128-byte swizzle: the index of each 16 bytes is combined with the row by XOR
        row, place = torch.arange(64, device=codes.device), torch.arange(8, device=codes.device)
        at = (row[:, None, None] % 8 ^ place[:, None]).expand(rows.shape)
        return rows.gather(4, at).view(tiles, panels, 3, 64, 128)

    @property
    def W_bits(self) -> int:
        """Width of codes of W."""
        return self._widths[0]

    @property
    def R_bits(self) -> int:
        """Width of codes of R."""
        return self._widths[1]

    @property
    def x_planes(self) -> int:
        """Bytes of a code of x inside a kernel."""
        return planes_of(self.x.bits)

    @property
    def long_sums(self) -> bool:
        """Whether sums of two planes of x exceed int32 too often for kernels that require int32."""
        return self.x_planes == 2 and self.C > _LONG

    @property
    def added(self) -> int:
        """A bound on what is added to W x before rounding to a byte; see `finish_held`.

        Twice that with rules other than half_even: float32 then has steps of the multiplier there.
        """
        lo = self._Wx.lo - self._Wx.zero_point
        even = abs(lo + 127 if lo % 2 else lo + 128)
        return 2 * abs(lo) + 1 if self.form.rounding else even

    @_cached
    def exact_float(self) -> tuple[Tensor, Tensor]:
        """Two flags for W x and two flags for R h, each pair int32 (2,).

        Unless a case below applies, both flags say that float32 holds every accumulator and
        multiplier exactly.

        W x, one plane of x: the first flag also says that results are below the magic number of
        float32: adding it keeps them positive, and the bits of positive numbers are ordered as
        integers. The second flag also says that the multipliers are powers of two and that float32
        holds the value before rounding to a byte, `added` included.

        W x, two planes of x: the first flag says that int32 holds every accumulator and every
        rounded value before the clamp, and float32 every multiplier. With `long_sums`, only the
        second plane's accumulator is considered. The second flag also says that multipliers are
        integers in units of 2^-31, and at most 2.

        R h with `in_int32`: the first flag says that int32 holds every accumulator and every
        multiplier in units of 2^-32. The second flag says so of sums over half of the features.
        """
        found = []
        for which, (codes, operand) in enumerate(((self._W, self.x), (self._R, self.h))):
            sizes = codes.to(torch.int64).abs()
            reach = sizes.sum(dim=1) * operand.max_abs + self._B[which].abs()
            m = self.multipliers[which]
            if which == 1 and self.form.in_int32:
                units = m * 2.0**32
                whole = units == units.round()
                fits = [
                    (reach < 1 << 31) & (units < 2.0**31) & whole,
                    (self._reach_of_halves(sizes) < 1 << 31) & (units < 2.0**30) & whole,
                ]
            else:
                normal = (m == 0) | ((m > SMALLEST) & (m < LARGEST))
                fits = [(reach < 1 << 24) & normal] * 2
                if which == 0 and self.x_planes == 2:
                    units = m * 2.0**31
                    # sums of the second plane are below 2^28
                    held = self.gemm[0][1].abs() < 1 << 30 if self.long_sums else reach < 1 << 31
                    held = held & (reach.to(torch.float64) * m < 2.0**30) & normal
                    fits = [held, held & (units == units.round()) & (m <= 2)]
                elif which == 0:
                    # integers in units of min(m, 1)
                    power, below = torch.frexp(m)[0] == 0.5, m.clamp(max=1)
                    most = reach * m.clamp(min=1) + self.added / below
                    fits = [fits[0] & (reach * m < MAGIC), fits[0] & power & (most <= 1 << 24)]
            found.append(torch.stack([each.all() for each in fits]).to(torch.int32))
        return found[0], found[1]

    def _reach_of_halves(self, sizes: Tensor) -> Tensor:
        """Return bounds (3H,) of R h sums over half of the features, bias included."""
        middle = -(-self.H // 128) * 64
        halves = torch.maximum(sizes[:, :middle].sum(dim=1), sizes[:, middle:].sum(dim=1))
        # bounds of stored codes; the kernel may store low bytes less 128
        fold = self.h_offset - self.h.zero_point
        folded = self._B[1] + fold * self._R.to(torch.int64).sum(dim=1)
        return halves * ((1 << 15) + 128) + sizes.sum(dim=1) * 128 + folded.abs()

    @_cached
    def of_bytes(self) -> tuple[Tensor, Tensor]:
        """Folded bias and zero points of W x, int32 (3H,), and multipliers, float32 (3H,)."""
        return self.gemm[0][1].to(torch.int32), self.multipliers[0].to(torch.float32)

    def fragments(self, features: int, units: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return R as the A operand of the MMA instruction, with its bias and multipliers.

        Args:
            features: H padded to a multiple of 64.
            units: H padded to a multiple of 16.

        Returns:
            int32 [plane][group of 16 units][block of 64 features][half][gate][register][lane];
            float64 (3, units), folded bias and zero point in accumulator units;
            float64 (3, units), multipliers m.
        """
        kept = self._fragments.get((features, units))
        if kept is None:
            kept = self._pack(features, units)
            if not capturing(self.device):
                self._fragments[features, units] = kept
                self.count_derived()
        return kept

    def packed(self) -> dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]:
        """Return all cached results of `fragments`, by its arguments."""
        return self._fragments

    def refresh(self, names: Iterable[str] | None = None, first: int = 0) -> None:
        """Rewrite derived tensors after the plan's tensors changed in place.

        Args:
            names: The properties to rewrite, if they are cached; None for all.
            first: Skip this many of the first cached fragments.
        """
        for name in DERIVED if names is None else names:
            if name in self.__dict__:
                _overwrite(self.__dict__[name], getattr(type(self), name).func(self))
        for size, kept in list(self._fragments.items())[first:]:
            _overwrite(kept, self._pack(*size))

    def _pack(self, features: int, units: int) -> tuple[Tensor, Tensor, Tensor]:
        H = self.H
        R = self._R.to(torch.int64).reshape(3, H, H)
        padded = R.new_zeros((3, units, features))
        padded[:, :H, :H] = R
        planes = [padded]
        if self.form.weight_bytes == 2:
            # the low byte is unsigned; int8 has the same bits
            planes = [(padded & 255) - ((padded & 128) << 1), padded >> 8]
        bytes_ = torch.stack(planes).to(torch.int8)
        # unit = 16 group + 8 row8 + lane8, feature = 64 block + 16 quad + 8 j + 4 half + i
        split = bytes_.reshape(len(planes), 3, units // 16, 2, 8, features // 64, 4, 2, 2, 4)
        ordered = split.permute(0, 2, 5, 7, 1, 8, 3, 4, 6, 9).contiguous()
        fragments = ordered.flatten().view(torch.int32)
        sums = R.sum(dim=2)
        folded = self._B[1].reshape(3, H) + (self.h_offset - self.h.zero_point) * sums
        bias = folded.new_zeros((3, units), dtype=torch.float64)
        m = torch.zeros_like(bias)
        bias[:, :H] = folded.to(torch.float64)
        m[:, :H] = self.multipliers[1].reshape(3, H)
        return fragments, bias, m


def numbers_of(plan: CellPlan) -> Numbers:
    """Return the numbers of a plan, which are created at their first use."""
    kept = _packed.get(plan.weights)
    if kept is not None and kept[0]() is plan.frozen:
        return kept[1]
    numbers = Numbers(plan)
    if not capturing(plan.weights.W.device):
        # a captured graph computes nothing before its replay
        _packed[plan.weights] = (weakref.ref(plan.frozen), numbers)
    return numbers


def kept_numbers(part: WeightPart) -> Numbers | None:
    """Return the cached numbers of a weight part, or None."""
    kept = _packed.get(part)
    return None if kept is None else kept[1]


def _multipliers(each: WeightedSum) -> tuple[Tensor, Tensor]:
    """Return M and k of all channels, each int64 (3H,)."""
    (M,), k = each.multipliers, each.shift
    assert isinstance(M, Tensor)
    assert isinstance(k, Tensor)
    return M.to(torch.int64), k.to(torch.int64)


def _padded(features: int) -> int:
    return -(-max(features, 1) // 16) * 16
