"""The quantizer: the only conversion from real values to codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quant_gru.config.fields import DEFAULT_ROUNDING
from quant_gru.errors import QuantGRUError

MIN_SCALE = 2.0**-126
MAX_SCALE = 2.0**127

# The largest |code - zero_point| with a zero point outside of the codes: exact in float32.
FARTHEST = 2**21

CONTAINERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def code_limits(bits: int, signed: bool) -> tuple[int, int]:
    """Return the smallest and largest code, e.g. (-128, 127) or (0, 255) for 8 bits."""
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def container_dtype(lo: int, hi: int) -> torch.dtype:
    """Return the smallest of int8, uint8, int16, int32, int64 that holds all codes in [lo, hi]."""
    for dtype in CONTAINERS:
        info = torch.iinfo(dtype)
        if info.min <= lo and hi <= info.max:
            return dtype
    raise QuantGRUError(f"Expected codes to fit 64 bits, got the range [{lo}, {hi}]")


def rounded(y: Tensor, rule: str) -> Tensor:
    """Return real values rounded to integers, as real values; NaN stays NaN.

    Args:
        y: Real values.
        rule: One of `ROUNDINGS` except ``double``, which needs a multiplier.
    """
    if rule == "half_even":
        return torch.round(y)
    if rule == "floor":
        return torch.floor(y)
    whole = torch.trunc(y)
    # exact, unlike y + 0.5
    rest = y - whole
    down = rest <= -0.5 if rule == "half_away" else rest < -0.5
    # infinite values have no rest
    return torch.where(y.isinf(), y, whole + (rest >= 0.5).to(y.dtype) - down.to(y.dtype))


@dataclass(frozen=True)
class Quantizer:
    """Real value = `scale * (code - zero_point)`, with codes in [lo, hi].

    Attributes:
        bits: Width of a code, 1..32.
        signed: Codes are [-2^(bits-1), 2^(bits-1)-1] if True, [0, 2^bits-1] otherwise.
        scale: A normal float32 number, stored as a Python float.
        zero_point: The code of the real value 0, inside [lo, hi] unless `far`.
        far: Whether the zero point may lie outside of the codes: 0 then has no code of its own.
        rounding: The rule for real values; plans set that of their configuration.
    """

    bits: int
    signed: bool
    scale: float
    zero_point: int = 0
    far: bool = False
    rounding: str = DEFAULT_ROUNDING

    def __post_init__(self) -> None:
        if not (isinstance(self.bits, int) and 1 <= self.bits <= 32):
            raise QuantGRUError(f"Expected bits to be an integer in 1..32, got {self.bits!r}")
        if not MIN_SCALE <= self.scale <= MAX_SCALE:
            raise QuantGRUError(
                f"Expected scale to be a normal positive float32 number, got {self.scale!r}"
            )
        nearest = float(torch.tensor(self.scale, dtype=torch.float32, device="cpu"))
        if nearest != self.scale:
            raise QuantGRUError(
                f"Expected scale to be a float32 number, got {self.scale!r}; the nearest is "
                f"{nearest!r}"
            )
        if self.far:
            reach = max(abs(self.lo - self.zero_point), abs(self.hi - self.zero_point))
            if reach > FARTHEST and self.is_outside:
                raise QuantGRUError(
                    f"Expected zero_point to be within {FARTHEST} of all codes, "
                    f"got {self.zero_point}"
                )
        elif self.is_outside:
            raise QuantGRUError(
                f"Expected zero_point to be in [{self.lo}, {self.hi}], got {self.zero_point}"
            )

    @cached_property
    def lo(self) -> int:
        """Smallest code."""
        return code_limits(self.bits, self.signed)[0]

    @cached_property
    def hi(self) -> int:
        """Largest code."""
        return code_limits(self.bits, self.signed)[1]

    @property
    def is_outside(self) -> bool:
        """Whether the zero point is no code."""
        return not self.lo <= self.zero_point <= self.hi

    @cached_property
    def inner(self) -> Quantizer:
        """The quantizer with the nearest code as zero point: its values are less by `offset`."""
        if not self.is_outside:
            return self
        return replace(self, zero_point=min(max(self.zero_point, self.lo), self.hi), far=False)

    @cached_property
    def offset(self) -> float:
        """The real value of the zero point of `inner`; 0 if this zero point is a code."""
        return self.scale * (self.inner.zero_point - self.zero_point)

    @cached_property
    def max_abs(self) -> int:
        """V: the largest |code - zero point| of `inner`."""
        zero_point = self.inner.zero_point
        return max(abs(self.lo - zero_point), abs(self.hi - zero_point))

    @cached_property
    def container(self) -> torch.dtype:
        """Dtype of the codes at the interface."""
        return container_dtype(self.lo, self.hi)

    def quantize(self, x: Tensor) -> Tensor:
        """Return the codes of `x`, int64, same shape: `clamp(round(x / s), lo-z, hi-z) + z`.

        The division is in float32, `rounding` says how, and infinities saturate. NaN becomes the
        code of 0; the caller tracks NaN separately.
        """
        y = self._rounded(x)
        y = y.masked_fill(y.isnan(), 0.0)
        clamped = y.clamp(self.lo - self.zero_point, self.hi - self.zero_point)
        return clamped.to(torch.int64) + self.zero_point

    def inside(self, x: Tensor) -> Tensor:
        """Return a bool mask, same shape: False where `quantize` clamps, and for NaN."""
        y = self._rounded(x)
        return (y >= self.lo - self.zero_point) & (y <= self.hi - self.zero_point)

    def _rounded(self, x: Tensor) -> Tensor:
        # s must be a tensor on x's device: CUDA replaces division by a CPU scalar with a
        # multiplication by its reciprocal, which rounds differently.
        s = torch.full((), self.scale, dtype=torch.float32, device=x.device)
        y = rounded(x.detach().to(torch.float32) / s, self.rounding)
        # float32 represents the limits of up to 24 bits exactly
        return y if self.bits <= 24 else y.to(torch.float64)

    def dequantize(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return real values `s * (codes - z)`, same shape; exact in float32 up to 24 bits."""
        s = torch.full((), self.scale, dtype=dtype, device=codes.device)
        return (codes.to(torch.int64) - self.zero_point).to(dtype) * s
