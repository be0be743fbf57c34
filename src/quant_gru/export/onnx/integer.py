"""The integer profile: one layer and direction, equal to the plan code for code."""

from __future__ import annotations

from collections.abc import Sequence

from quant_gru.export.onnx.builder import Builder, Value
from quant_gru.export.onnx.exact import Product, Term, look_up, quantized, real, weighted_sum
from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum

CONTAINERS = {"torch.int8": "INT8", "torch.uint8": "UINT8", "torch.int16": "INT16"}
CONTAINERS |= {"torch.int32": "INT32", "torch.int64": "INT64"}


class IntegerCell:
    """One layer and direction. Values are codes less their zero point, carried in float64.

    Args:
        plan: The plan of this layer and direction.

    Attributes:
        state_type: ONNX type of the state between steps.
        code_type: ONNX type of the state's codes.
        collected_type: ONNX type of what a Scan collects.
    """

    state_type = "DOUBLE"

    def __init__(self, plan: CellPlan) -> None:
        self.plan = plan
        self.code_type = CONTAINERS[str(plan.h.container)]
        self.collected_type = "INT32" if plan.h.max_abs < 1 << 31 else "INT64"
        w = plan.weights
        self._input = Product("matmul.Wx", w.W, w.Bw, plan.shift_Bw, plan.x, w.Wx)
        self._recurrent = Product("matmul.Rh", w.R, w.Br, plan.shift_Br, plan.h, w.Rh)

    def read(self, b: Builder, x: Value) -> Value:
        """Quantize the real input of the first layer, float32 (T, N, C)."""
        border = self.plan.border
        codes = quantized(b, x, border)
        moved = border.zero_point - self.plan.x.zero_point
        return b.op("Add", codes, b.float64(moved)) if moved else codes

    def join(
        self,
        b: Builder,
        sums: Sequence[WeightedSum],
        below: Sequence[Quantizer],
        halves: Sequence[Value],
    ) -> Value:
        """Return input codes from what the directions of the layer below collected.

        Args:
            b: The builder.
            sums: The sum for each direction below.
            below: The quantizer of output.h of each direction below.
            halves: What each direction below collected (T, N, H).
        """
        parts = [
            weighted_sum(b, "input.x", total, [Term((b.cast(half, "DOUBLE"),), h.max_abs)])
            for total, h, half in zip(sums, below, halves, strict=True)
        ]
        return parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=-1)

    def project(self, b: Builder, x: Value) -> list[tuple[Value, str]]:
        """Return what a step reads of the input, for all steps at once: three of (T, N, H)."""
        parts = b.ops("Split", 3, self._input(b, x), axis=-1, num_outputs=3)
        return [(part, "DOUBLE") for part in parts]

    def start(self, b: Builder, h0: Value) -> Value:
        """Quantize the real initial state, float32 (N, H)."""
        return quantized(b, h0, self.plan.h)

    def step(self, b: Builder, inputs: Sequence[Value], h: Value) -> Value:
        """Return the state after a step, from the projected input and the state before."""
        plan = self.plan
        sums, tables, one = plan.frozen.sums, plan.frozen.tables, plan.frozen.one
        q = plan.frozen.quantizers

        def total(name: str, *terms: Term) -> Term:
            return Term((weighted_sum(b, name, sums[name], terms),), q[name].max_abs)

        def table(name: str, pre: str, v: Term) -> Term:
            found = look_up(b, name, tables[name], q[pre], v.factors[0])
            return Term((found,), q[name].max_abs)

        def product(name: str, left: Term, right: Term) -> Term:
            """Return the product as a value of its own, or unrounded if it is fused."""
            both = Term((*left.factors, *right.factors), left.bound * right.bound)
            return total(name, both) if name in sums else both

        Wx_z, Wx_r, Wx_g = (Term((v,), q["matmul.Wx"].max_abs) for v in inputs)
        Rh_z, Rh_r, Rh_g = (
            Term((v,), q["matmul.Rh"].max_abs)
            for v in b.ops("Split", 3, self._recurrent(b, h), axis=-1, num_outputs=3)
        )
        state = Term((h,), q["output.h"].max_abs)
        z = table("gate.z_out", "gate.z_pre", total("gate.z_pre", Wx_z, Rh_z))
        r = table("gate.r_out", "gate.r_pre", total("gate.r_pre", Wx_r, Rh_r))
        rRh = product("op.rRh", r, Rh_g)
        g = table("gate.g_out", "gate.g_pre", total("gate.g_pre", Wx_g, rRh))
        old = product("op.old_contrib", z, state)
        one_minus_z = Term((b.op("Sub", b.float64(one), *z.factors),), plan.frozen.one_minus_z)
        new = product("op.new_contrib", one_minus_z, g)
        after = total("output.h", old, new)
        zoneout = plan.frozen.zoneout
        if zoneout is None:
            return after.factors[0]
        return weighted_sum(b, "output.h", zoneout, (state, after))

    def collect(self, b: Builder, h: Value) -> Value:
        """Return what a Scan collects of a step: integers."""
        return b.cast(h, self.collected_type)

    def real(self, b: Builder, collected: Value) -> Value:
        """Return the real values, float32, of what was collected."""
        return real(b, collected, self.plan.h)

    def keep(self, b: Builder, runs: Value, new: Value, old: Value) -> Value:
        """Return the new state of rows that still run, bool (N, 1), and the old one of others."""
        return b.op("Where", runs, new, old)

    def from_codes(self, b: Builder, codes: Value) -> Value:
        """Return the state from codes of output.h."""
        return b.op("Sub", b.cast(codes, "DOUBLE"), b.float64(self.plan.h.zero_point))

    def to_codes(self, b: Builder, h: Value) -> Value:
        """Return codes of output.h from the state."""
        return b.cast(b.op("Add", h, b.float64(self.plan.h.zero_point)), self.code_type)
