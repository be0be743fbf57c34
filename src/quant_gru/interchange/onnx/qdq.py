"""The qdq profile: QuantizeLinear and DequantizeLinear at every operator, float between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import ZONEOUT_SHIFT, CellPlan
from quant_gru.integer.quantizer import Quantizer, code_limits
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.interchange.onnx import real_weights
from quant_gru.interchange.onnx.builder import CONTAINERS, Builder, Value
from quant_gru.interchange.row_scales import ROWS

_TYPES = {"UINT8": np.uint8, "INT16": np.int16, "UINT16": np.uint16}
_BITS = {"UINT8": (8, False), "INT16": (16, True), "UINT16": (16, False)}


def stored(name: str, quantizer: Quantizer) -> tuple[str, int]:
    """Return the ONNX type of codes, and what is added to a code in it.

    Codes of up to 8 bits are unsigned: ONNX Runtime makes int8 activations unsigned by itself on
    x86, and 1.32 refuses some of the models that result.

    Raises:
        QuantGRUError: The quantizer has more than 16 bits.
    """
    if quantizer.bits > 16:
        raise QuantGRUError(
            f"Expected at most 16 bits for QuantizeLinear, got {quantizer.bits} "
            f"(operator {name!r}); use profile 'integer'"
        )
    if quantizer.bits <= 8:
        return "UINT8", 128 if quantizer.signed else 0
    return "INT16" if quantizer.hi < 1 << 15 else "UINT16", 0


def quantize(b: Builder, name: str, v: Value, quantizer: Quantizer) -> Value:
    """Return codes of real values; codes of other widths than 8 and 16 are clamped before."""
    dtype, added = stored(name, quantizer)
    lo, hi, zero = quantizer.lo, quantizer.hi, quantizer.zero_point
    if (lo + added, hi + added) != code_limits(*_BITS[dtype]):
        limits = (b.float32(quantizer.scale * (end - zero)) for end in (lo, hi))
        v = b.op("Clip", v, *limits)
    zero_point = b.constant(zero + added, _TYPES[dtype])
    scale, domain = b.float32(quantizer.scale), b.domain_of(dtype)
    return b.op("QuantizeLinear", v, scale, zero_point, domain=domain)


def dequantize(b: Builder, name: str, codes: Value, quantizer: Quantizer) -> Value:
    """Return the real values, float32, of codes."""
    dtype, added = stored(name, quantizer)
    zero_point = b.constant(quantizer.zero_point + added, _TYPES[dtype])
    scale, domain = b.float32(quantizer.scale), b.domain_of(dtype)
    return b.op("DequantizeLinear", codes, scale, zero_point, domain=domain)


class QdqCell:
    """One layer and direction. Values are real; the state between steps is a code.

    Args:
        plan: The plan of this layer and direction.

    Attributes:
        state_type: ONNX type of the state between steps.
        code_type: ONNX type of the state's codes at the border of a step.
        collected_type: ONNX type of what a Scan collects.
    """

    collected_type = "FLOAT"

    def __init__(self, plan: CellPlan) -> None:
        self.plan = plan
        self.state_type, self._added = stored("output.h", plan.h)
        self.code_type = CONTAINERS[str(plan.h.container)]

    def _at(self, b: Builder, name: str, v: Value) -> Value:
        """Return `v` rounded to codes of an operator; unchanged if the operator is fused."""
        quantizer = self.plan.frozen.quantizers.get(name)
        if quantizer is None:
            return v
        return dequantize(b, name, quantize(b, name, v, quantizer), quantizer)

    def _product(self, b: Builder, name: str, v: Value) -> Value:
        """Return the product of a weight with v (rows, K): (rows, 3H)."""
        # outside of a Scan, so that weights become real once and not at every step
        weight = real_weights.dequantized(b, self.plan, name, unsigned=True)
        # ONNX Runtime makes MatMul of 8-bit weights a MatMulNBits, which rounds its input
        bias = b.float32(real_weights.bias(self.plan, name).numpy())
        if real_weights.bias_fits_int32(self.plan, name):
            found = b.op("Gemm", v, weight, bias, transB=1)
        else:
            # ONNX Runtime makes the bias of a Gemm an int32 in units of the accumulator, and clips
            found = b.op("Add", b.op("Gemm", v, weight, transB=1), bias)
        return self._at(b, ROWS[name][1], found)

    def read(self, b: Builder, x: Value) -> Value:
        """Quantize the real input of the first layer, float32 (T, N, C)."""
        return self._at(b, "input.x", x)

    def join(
        self,
        b: Builder,
        sums: Sequence[WeightedSum],
        below: Sequence[Quantizer],
        halves: Sequence[Value],
    ) -> Value:
        """Return the input from what the directions of the layer below collected."""
        v = halves[0] if len(halves) == 1 else b.op("Concat", *halves, axis=-1)
        return self._at(b, "input.x", v)

    def project(self, b: Builder, x: Value) -> list[tuple[Value, str, int]]:
        """Return what a step reads of the input, for all steps at once: three of (T, N, H)."""
        C, H = self.plan.input_size, self.plan.hidden_size
        rows = b.op("Reshape", x, b.int64([-1, C]))
        sizes = b.op("Concat", b.op("Shape", x, start=0, end=-1), b.int64([H]), axis=0)
        parts = b.ops("Split", 3, self._product(b, "weight.W", rows), axis=-1, num_outputs=3)
        return [(b.op("Reshape", part, sizes), "FLOAT", H) for part in parts]

    def start(self, b: Builder, h0: Value) -> Value:
        """Quantize the real initial state, float32 (N, H)."""
        return quantize(b, "output.h", h0, self.plan.h)

    def once(self, b: Builder, x: Value, v: Value | None, h0: Value) -> tuple[Value, Value]:
        """Return the states before and after the one step of a sequence; as `IntegerCell.once`."""
        axis = b.int64([0])
        v = b.op("Squeeze", self.read(b, x) if v is None else v, axis)
        before, after = self.after(b, v, self.start(b, b.op("Squeeze", h0, axis)))
        return b.op("Unsqueeze", before, axis), b.op("Unsqueeze", after, axis)

    def after(self, b: Builder, v: Value, h: Value) -> tuple[Value, Value]:
        """Return a state (N, H) and the one after a step with the input (N, C)."""
        return h, self.step(b, [part for part, _, _ in self.project(b, v)], h)

    def step(self, b: Builder, inputs: Sequence[Value], h: Value) -> Value:
        """Return the state after a step, from the projected input and the state before."""
        Wx_z, Wx_r, Wx_g = inputs
        state = dequantize(b, "output.h", h, self.plan.h)
        Rh = self._product(b, "weight.R", state)
        Rh_z, Rh_r, Rh_g = b.ops("Split", 3, Rh, axis=-1, num_outputs=3)
        z = b.op("Sigmoid", self._at(b, "gate.z_pre", b.op("Add", Wx_z, Rh_z)))
        z = self._at(b, "gate.z_out", z)
        r = b.op("Sigmoid", self._at(b, "gate.r_pre", b.op("Add", Wx_r, Rh_r)))
        r = self._at(b, "gate.r_out", r)
        rRh = self._at(b, "op.rRh", b.op("Mul", r, Rh_g))
        g = b.op("Tanh", self._at(b, "gate.g_pre", b.op("Add", Wx_g, rRh)))
        g = self._at(b, "gate.g_out", g)
        old = self._at(b, "op.old_contrib", b.op("Mul", z, state))
        new = b.op("Mul", b.op("Sub", b.float32(1), z), g)
        new = self._at(b, "op.new_contrib", new)
        after = quantize(b, "output.h", b.op("Add", old, new), self.plan.h)
        zoneout = self.plan.frozen.zoneout
        if zoneout is None:
            return after
        kept = int(zoneout.multipliers[0]) / (1 << ZONEOUT_SHIFT)
        new = b.op("Mul", b.float32(1 - kept), dequantize(b, "output.h", after, self.plan.h))
        return quantize(
            b, "output.h", b.op("Add", b.op("Mul", b.float32(kept), state), new), self.plan.h
        )

    def collect(self, b: Builder, h: Value) -> Value:
        """Return what a Scan collects of a step: real values."""
        return dequantize(b, "output.h", h, self.plan.h)

    def real(self, b: Builder, collected: Value) -> Value:
        """Return the real values, float32, of what was collected."""
        return collected

    def shown(self, b: Builder, h: Value) -> tuple[Value, Value]:
        """Return what `join` takes of the state after the only step, and its real values."""
        found = self.collect(b, h)
        return found, found

    def keep(self, b: Builder, runs: Value, new: Value, old: Value) -> Value:
        """Return the new state of rows that still run, bool (N, 1), and the old one of others."""
        # ONNX Runtime has no Where of 16-bit integers
        found = b.op("Where", runs, b.cast(new, "INT32"), b.cast(old, "INT32"))
        return b.cast(found, self.state_type)

    def from_codes(self, b: Builder, codes: Value) -> Value:
        """Return the state from codes of output.h."""
        return self._moved(b, codes, self._added, self.state_type)

    def to_codes(self, b: Builder, h: Value) -> Value:
        """Return codes of output.h from the state."""
        return self._moved(b, h, -self._added, self.code_type)

    def _moved(self, b: Builder, codes: Value, added: int, dtype: str) -> Value:
        if self.code_type == self.state_type:
            return codes
        if added:
            codes = b.op("Add", b.cast(codes, "INT32"), b.constant(added, np.int32))
        return b.cast(codes, dtype)
