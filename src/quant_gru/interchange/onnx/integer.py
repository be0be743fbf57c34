"""The integer profile: one layer and direction, equal to the plan code for code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.interchange.onnx.boundary import code_of, moved, quantized, quantized_beside, real
from quant_gru.interchange.onnx.builder import CONTAINERS, Builder, Value, static_size
from quant_gru.interchange.onnx.exact import (
    LIMITS,
    Rule,
    Term,
    beside,
    clipped,
    number,
    rounded_quotient,
    rule_of,
    scaled,
    stored,
    weighted_sum,
)
from quant_gru.interchange.onnx.lookups import (
    Sums,
    is_listed,
    joins,
    limits,
    listed,
    look_up,
    of_sums,
    places,
)
from quant_gru.interchange.onnx.products import Product

_JOINT = 1 << 15  # entries, zeros among them, up to which one product is faster than two
_DENSE = 8  # units up to which a product with zeros is faster than one without and two Reshape


class IntegerCell:
    """One layer and direction. Values are codes less their zero point, in one float type.

    Args:
        plan: The plan of this layer and direction.

    Attributes:
        state_type: ONNX type of all values, the state between steps among them.
        code_type: ONNX type of the state's codes.
        collected_type: ONNX type of what a Scan collects.
    """

    def __init__(self, plan: CellPlan) -> None:
        self.plan = plan
        self.code_type = CONTAINERS[str(plan.h.container)]
        self.collected_type = "INT32" if plan.h.max_abs < 1 << 31 else "INT64"
        w = plan.weights
        self._input = Product.of("matmul.Wx", w.W, w.Bw, plan.shift_Bw, plan.x, w.Wx)
        self._recurrent = Product.of("matmul.Rh", w.R, w.Br, plan.shift_Br, plan.h, w.Rh)
        self._rules = _rules_of(plan)
        self._bounds = _bounds_of(plan)
        sums = all(rule.fits(self._bounds[name], "FLOAT") for name, rule in self._rules.items())
        products = self._input.fits("FLOAT") and self._recurrent.fits("FLOAT")
        tables = all(is_listed(table) for table in plan.frozen.tables.values())
        self.state_type = "FLOAT" if sums and products and tables else "DOUBLE"
        self._sums = self._sums_of_gates()
        self._rules |= {f"gate.{gate}_pre": sums.rule for gate, sums in self._sums.items()}
        self._units = self._units_of_gates()
        self._is_joint = self._find_joint()

    def _sums_of_gates(self) -> dict[str, Sums]:
        """Return what tables give for sums that are not rounded: of both gates, or of neither."""
        found, frozen = {}, self.plan.frozen
        for gate in "zrg":
            name, pre = f"gate.{gate}_out", f"gate.{gate}_pre"
            rule, bounds = self._rules[pre], self._bounds[pre]
            if rule.fits(bounds, self.state_type):
                found[gate] = of_sums(frozen.tables[name], frozen.quantizers[pre], rule, bounds)
        both = found.get("z") is not None and found.get("r") is not None
        return {
            gate: sums for gate, sums in found.items() if sums is not None and (gate == "g" or both)
        }

    def _units_of_gates(self) -> dict[str, float]:
        """Return what gates are multiples of: multipliers of their products are in the tables."""
        units = dict.fromkeys("zrg", 1.0)
        dense = {gate: is_listed(self.plan.frozen.tables[f"gate.{gate}_out"]) for gate in units}

        def factor(product: str, total: str, index: int) -> float | None:
            """Return the multiplier of a product; None if 64-bit integers compute it."""
            name, at = (product, 0) if product in self._rules else (total, index)
            rule = self._rules[name]
            fits = rule.fits(self._bounds[name], self.state_type)
            return float(rule.factor(at)) if fits else None

        of_r = factor("op.rRh", "gate.g_pre", 1)
        if dense["r"] and of_r:  # a multiplier of 0 leaves nothing to divide by
            units["r"] = of_r
        old, new = (factor(f"op.{n}_contrib", "output.h", i) for i, n in enumerate(("old", "new")))
        # z is in both products, so that its unit must divide them
        if dense["z"] and dense["g"] and old and new and math.frexp(old)[0] == 0.5:
            units["z"], units["g"] = old, new / old
        return units

    def read(self, b: Builder, x: Value) -> Value:
        """Quantize the real input of the first layer, float32 (T, N, C)."""
        border = self.plan.border
        codes = quantized(b, x, border, self.state_type)
        moved = border.zero_point - self.plan.x.zero_point
        dtype = np.float32 if self.state_type == "FLOAT" else np.float64
        return b.op("Add", codes, b.constant(moved, dtype)) if moved else codes

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
        dtype = self.state_type
        parts = [
            weighted_sum(
                b, "input.x", rule_of(total), [Term((b.cast(half, dtype),), h.max_abs)], dtype
            )
            for total, h, half in zip(sums, below, halves, strict=True)
        ]
        return parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=-1)

    def project(self, b: Builder, x: Value) -> list[tuple[Value, str, int]]:
        """Return what a step reads of the input, for all steps at once: gates and candidate."""
        H, dtype = self.plan.hidden_size, self.state_type
        gates, candidate = self._halves(b, self._input(b, x, dtype))
        return [(gates, dtype, 2 * H), (candidate, dtype, H)]

    def _halves(self, b: Builder, v: Value) -> Sequence[Value]:
        """Return update and reset gate side by side, and the candidate, of a product."""
        H = self.plan.hidden_size
        return b.ops("Split", 2, v, b.int64([2 * H, H]), axis=-1)

    def start(self, b: Builder, h0: Value) -> Value:
        """Quantize the real initial state, float32 (N, H)."""
        return quantized(b, h0, self.plan.h, self.state_type)

    def once(self, b: Builder, x: Value, v: Value | None, h0: Value) -> tuple[Value, Value]:
        """Return the states (1, N, H) before and after the one step of a sequence.

        Args:
            b: The builder.
            x: The real input of the first layer, float32 (1, N, C).
            v: The input of another layer, of `join`.
            h0: The real state, float32 (1, N, H).
        """
        C, H = self.plan.input_size, self.plan.hidden_size
        if v is None and self.plan.border != self.plan.x:
            v = self.read(b, x)
        if v is not None:
            return self.after(b, v, self.start(b, h0), lead=(1,))
        parts, kinds, sizes = [x, h0], [self.plan.x, self.plan.h], [C, H]
        N = static_size(x, 1)
        one = next((one for one in map(_scale_of_one, kinds) if one is not None), None)
        if N is not None and one is not None and self.state_type == "FLOAT":
            # the bias is a row of the matrix: in float64 that gains nothing
            parts.append(b.op("Expand", b.float32(1), b.int64([1, N, 1])))
            kinds, sizes = [*kinds, one], [*sizes, 1]
        both = b.op("Concat", *parts, axis=-1)
        both = quantized_beside(b, both, kinds, sizes, self.state_type)
        v, h, *_ = b.ops("Split", len(sizes), both, b.int64(sizes), axis=-1)
        return self.after(b, v, h, both, len(sizes) == 3, (1,))

    def after(
        self,
        b: Builder,
        v: Value,
        h: Value,
        both: Value | None = None,
        last_is_one: bool = False,
        lead: Sequence[int] = (),
    ) -> tuple[Value, Value]:
        """Return a state (*lead, N, H) and the one after a step with input codes (*lead, N, C).

        Args:
            b: The builder.
            v: Input codes less their zero point.
            h: The state.
            both: Both side by side, if they are known so.
            last_is_one: Whether a 1 is behind them in `both`.
            lead: Sizes in front of N.
        """
        H, dtype = self.plan.hidden_size, self.state_type
        kept = Product.identity(self.plan.h, H, self._input.rule)
        product = Product.beside([self._input, Product.stacked([self._recurrent, kept])])
        if not self._is_joint or product.size > _JOINT:
            return h, self.step(b, [part for part, _, _ in self.project(b, v)], h)
        # starting an operator costs more than the zeros between small matrices
        both = b.op("Concat", v, h, axis=-1) if both is None else both
        product = replace(product, last_is_one=last_is_one)
        return h, self._joint_step(b, product(b, both, dtype), h, lead)

    def _find_joint(self) -> bool:
        """Return whether one matrix makes the sums of all gates, and one product all others."""
        frozen, dtype = self.plan.frozen, self.state_type
        names = [f"gate.{gate}_pre" for gate in "zrg"]
        products = [name in self._rules for name in ("op.old_contrib", "op.rRh")]
        names += ["op.old_contrib", "op.rRh"] if all(products) else []
        return (
            all(map(is_listed, frozen.tables.values()))
            and all(products) == any(products)
            and all(self._rules[name].fits(self._bounds[name], dtype) for name in names)
            and all(
                max(self._bounds[name]) < LIMITS[dtype] for name in ("op.old_contrib", "op.rRh")
            )
        )

    def _joint_step(self, b: Builder, found: Value, h: Value, lead: Sequence[int]) -> Value:
        """Return the state after a step, in the fewest operators.

        Args:
            b: The builder.
            found: The products of input and state, the state and as many 1, side by side (.., 8H).
            h: The state.
            lead: Sizes in front of N.
        """
        H, dtype, q = self.plan.hidden_size, self.state_type, self.plan.frozen.quantizers
        entries, offsets = self._listed(b, "zr", self.plan.frozen.one)
        listed_g, of_g = self._listed(b, "g")
        added, offsets = (offsets, [0] * 3) if "z" in self._sums else ([0] * 3, offsets)
        added_g, of_g = (of_g, [0]) if "g" in self._sums else ([0], of_g)
        v = self._sums_beside(b, found, [*added, 0, 0, 1, *added_g], lead)
        gates, sides, Wx_g = b.ops("Split", 3, v, b.int64([3 * H, 3 * H, H]), axis=-1)
        if "z" not in self._sums:
            rule = beside([self._limited(gate) for gate in "zrz"], [H] * 3)
            gates = rounded_quotient(b, gates, rule, dtype)
            gates = clipped(b, gates, rule.lo, rule.hi, dtype)
        gates = b.op("Gather", entries, places(b, gates, offsets, H, dtype), axis=0)
        v = b.op("Mul", gates, sides)
        names, units = ("op.old_contrib", "op.rRh"), [self._units[gate] for gate in "zr"]
        rules = [self._rules[name] for name in names if name in self._rules]
        if rules:
            kept = Rule((np.array(1, object),), np.array(0), rules[0].lo, rules[0].hi)
            rule = beside([*rules, kept], [H] * 3)
            factor = rule.factor(0) / np.repeat([*units, 1.0], H)
            v = rounded_quotient(b, scaled(b, v, factor, dtype), rule, dtype)
        *parts, rest = b.ops("Split", 3, v, axis=-1, num_outputs=3)
        terms = []
        for name, part, unit in zip(names, parts, units, strict=True):
            if rules:
                part = clipped(b, part, self._rules[name].lo, self._rules[name].hi, dtype)
                terms.append(Term((part,), q[name].max_abs))
            else:
                terms.append(Term((part,), self._bounds[name][0], unit))
        old, rRh = terms
        rule, bound = self._limited("g"), self._bounds["gate.g_pre"][0]
        terms = [Term((Wx_g,), bound, rule.factor(0)), rRh]
        pre = weighted_sum(b, "gate.g_pre", rule, terms, dtype)
        g = b.op("Gather", listed_g, places(b, pre, of_g, H, dtype), axis=0)
        bound = self._bounds["op.new_contrib"][0]
        both = Term((rest, g), bound, self._units["z"] * self._units["g"])
        return self._state(b, old, self._product(b, "op.new_contrib", both), h)

    def _listed(
        self, b: Builder, gates: str, one: int | None = None
    ) -> tuple[Value, Sequence[int]]:
        """Return `lookups.listed` of gates, the candidate in the unit of its product."""
        frozen, unit = self.plan.frozen, self._units["z"]
        return listed(
            b,
            [frozen.tables[f"gate.{gate}_out"] for gate in gates],
            [frozen.quantizers[f"gate.{gate}_pre"] for gate in gates],
            self.state_type,
            [self._units[gate] * (unit if gate == "g" else 1) for gate in gates],
            [self._sums[gate] for gate in gates if gate in self._sums],
            one,
        )

    def _sums_beside(
        self, b: Builder, found: Value, added: Sequence[int], lead: Sequence[int]
    ) -> Value:
        """Return the sums that a step needs side by side (.., 7H).

        They are those of update gate, reset gate and update gate; the state, the candidate of its
        product and 0, for what gates are multiplied with; and the input's part of the candidate.

        Args:
            b: The builder.
            found: See `_joint_step`.
            added: What is added to each of the seven.
            lead: Sizes in front of N.
        """
        H, dtype = self.plan.hidden_size, self.state_type
        z, r, g = (
            np.array([*map(self._rules[f"gate.{gate}_pre"].factor, (0, 1))]) for gate in "zrg"
        )
        factors = np.zeros((8, 7))  # from input's product, state's product, state and 1
        factors[[0, 3], 0] = factors[[0, 3], 2] = z
        factors[[1, 4], 1], factors[2, 6] = r, g[0]
        factors[[6, 5], [3, 4]] = 1
        factors[7] = added
        if H > _DENSE:
            parts = b.op("Reshape", found, b.int64([*lead, -1, 8, H]))
            parts = b.op("MatMul", number(b, factors.T, dtype), parts)
            return b.op("Reshape", parts, b.int64([*lead, -1, 7 * H]))
        unit = stored(b, np.eye(H, dtype=np.int64)[None, :, None], dtype)
        matrix = b.op("Mul", number(b, factors[:, None, :, None], dtype), unit)
        return b.op("MatMul", found, b.op("Reshape", matrix, b.int64([8 * H, 7 * H])))

    def step(self, b: Builder, inputs: Sequence[Value], h: Value) -> Value:
        """Return the state after a step, from the projected input and the state before."""
        most = self._bounds["gate.z_pre"]
        Wx = [Term((v,), most[0]) for v in inputs]
        gates, candidate = self._halves(b, self._recurrent(b, h, self.state_type))
        sides = b.op("Concat", h, candidate, axis=-1)
        return self._step(b, Wx, Term((gates,), most[1]), sides)

    def _step(self, b: Builder, Wx: Sequence[Term], Rh_gates: Term, sides: Value) -> Value:
        """Return the state after a step.

        Args:
            b: The builder.
            Wx: The input's product, gates and candidate.
            Rh_gates: The state's product, gates.
            sides: The state and the candidate of its product side by side (N, 2H).
        """
        plan, dtype, q = self.plan, self.state_type, self.plan.frozen.quantizers

        def total(name: str, *terms: Term) -> Term:
            rule = self._limited("g") if name == "gate.g_pre" else self._rules[name]
            return Term((weighted_sum(b, name, rule, terms, dtype),), q[name].max_abs)

        Wx_gates, Wx_g = Wx
        z, old, rRh = self._products(b, self._gates(b, Wx_gates, Rh_gates), sides)
        pre = total("gate.g_pre", Wx_g, rRh)
        g = Term(
            (self._look_up(b, ["g"], pre.factors[0]),), q["gate.g_out"].max_abs, self._units["g"]
        )
        one = number(b, plan.frozen.one * z.unit, dtype)
        one_minus_z = Term((b.op("Sub", one, *z.factors),), plan.frozen.one_minus_z, z.unit)
        new = self._product(b, "op.new_contrib", one_minus_z.times(g))
        return self._state(b, old, new, _halves(b, sides)[0])

    def _state(self, b: Builder, old: Term, new: Term, h: Value) -> Value:
        """Return the state after a step, from its two terms and the state before."""
        dtype, most = self.state_type, self.plan.h.max_abs
        after = weighted_sum(b, "output.h", self._rules["output.h"], (old, new), dtype)
        if self.plan.frozen.zoneout is None:
            return after
        both = Term((h,), most), Term((after,), most)
        return weighted_sum(b, "output.h", self._rules["zoneout"], both, dtype)

    def _products(self, b: Builder, gates: Value, sides: Value) -> tuple[Term, Term, Term]:
        """Return the update gate, its product with the state, and the reset gate's product.

        Args:
            b: The builder.
            gates: Update and reset gate side by side (N, 2H), in `_units`.
            sides: Of `_step`.
        """
        H, dtype, q = self.plan.hidden_size, self.state_type, self.plan.frozen.quantizers
        names, units = ("op.old_contrib", "op.rRh"), [self._units[gate] for gate in "zr"]
        bounds = [self._bounds[name][0] for name in names]
        rules = [self._rules[name] for name in names if name in self._rules]
        z, r = _halves(b, gates)
        update = Term((z,), q["gate.z_out"].max_abs, units[0])
        if len(rules) == 2:
            rule = beside(rules, [H, H])
            both = Term((gates, sides), np.repeat(np.array(bounds, object), H), np.repeat(units, H))
            if rule.fits([both.bound], dtype):  # one operator computes both
                found = _halves(b, weighted_sum(b, names[0], rule, [both], dtype))
                old, rRh = (Term((v,), q[n].max_abs) for v, n in zip(found, names, strict=True))
                return update, old, rRh
        elif not rules and max(bounds) < LIMITS[dtype]:
            found = _halves(b, b.op("Mul", gates, sides))
            old, rRh = (Term((v,), *rest) for v, *rest in zip(found, bounds, units, strict=True))
            return update, old, rRh
        state, candidate = _halves(b, sides)
        old, rRh = (
            self._product(b, name, Term(pair, bound, unit))
            for name, pair, bound, unit in zip(
                names, ((z, state), (r, candidate)), bounds, units, strict=True
            )
        )
        return update, old, rRh

    def _product(self, b: Builder, name: str, both: Term) -> Term:
        """Return a product as a value of its own, or unrounded if it is fused."""
        if name not in self._rules:
            return both
        v = weighted_sum(b, name, self._rules[name], [both], self.state_type)
        return Term((v,), self.plan.frozen.quantizers[name].max_abs)

    def _gates(self, b: Builder, Wx: Term, Rh: Term) -> Value:
        """Return update and reset gate side by side, in `_units`."""
        H, dtype, both = self.plan.hidden_size, self.state_type, ("z", "r")
        rule = beside([self._limited(gate) for gate in both], [H, H])
        v = weighted_sum(b, "gate.z_pre", rule, (Wx, Rh), dtype)
        tables = [self.plan.frozen.tables[f"gate.{gate}_out"] for gate in both]
        if joins(tables):
            return self._look_up(b, both, v)
        parts = zip(both, _halves(b, v), strict=True)
        return b.op("Concat", *(self._look_up(b, [gate], part) for gate, part in parts), axis=-1)

    def _limited(self, gate: str) -> Rule:
        """Return the rule of a pre-activation within the limits of its table."""
        if gate in self._sums:
            return self._sums[gate].rule
        frozen = self.plan.frozen
        table, pre = frozen.tables[f"gate.{gate}_out"], frozen.quantizers[f"gate.{gate}_pre"]
        return self._rules[f"gate.{gate}_pre"].limited(*limits(table, pre))

    def _look_up(self, b: Builder, gates: Sequence[str], v: Value) -> Value:
        frozen = self.plan.frozen
        return look_up(
            b,
            f"gate.{gates[0]}_out",
            [frozen.tables[f"gate.{gate}_out"] for gate in gates],
            [frozen.quantizers[f"gate.{gate}_pre"] for gate in gates],
            v,
            self.state_type,
            self.plan.hidden_size,
            [self._units[gate] for gate in gates],
            [self._sums[gate] for gate in gates if gate in self._sums],
        )

    def collect(self, b: Builder, h: Value) -> Value:
        """Return what a Scan collects of a step: integers."""
        return b.cast(h, self.collected_type)

    def real(self, b: Builder, collected: Value) -> Value:
        """Return the real values, float32, of what was collected."""
        return real(b, collected, self.plan.h)

    def shown(self, b: Builder, h: Value) -> tuple[Value, Value]:
        """Return what `join` takes of the state after the only step, and its real values."""
        return h, real(b, h, self.plan.h, self.state_type)

    def keep(self, b: Builder, runs: Value, new: Value, old: Value) -> Value:
        """Return the new state of rows that still run, bool (N, 1), and the old one of others."""
        return b.op("Where", runs, new, old)

    def from_codes(self, b: Builder, codes: Value) -> Value:
        """Return the state from codes of output.h."""
        return moved(b, codes, self.plan.h, self.state_type)

    def to_codes(self, b: Builder, h: Value) -> Value:
        """Return codes of output.h from the state."""
        return code_of(b, h, self.plan.h, self.state_type, self.code_type)


def _scale_of_one(quantizer: Quantizer) -> Quantizer | None:
    """Return a quantizer for which 1 less its zero point is 1, with the same limits, if it can."""
    lo, hi = (end - quantizer.zero_point for end in (quantizer.lo, quantizer.hi))
    return replace(quantizer, scale=1.0) if lo <= 1 <= hi else None


def _halves(b: Builder, v: Value) -> Sequence[Value]:
    return b.ops("Split", 2, v, axis=-1, num_outputs=2)


def _rules_of(plan: CellPlan) -> dict[str, Rule]:
    """Return the rules of the sums of a step by operator, and of 'zoneout'."""
    sums = dict(plan.frozen.sums)
    if plan.frozen.zoneout is not None:
        sums["zoneout"] = plan.frozen.zoneout
    return {name: rule_of(total) for name, total in sums.items()}


def _bounds_of(plan: CellPlan) -> dict[str, list[int]]:
    """Return the largest magnitude of each term of the sums of a step."""
    frozen, most = plan.frozen, {name: q.max_abs for name, q in plan.frozen.quantizers.items()}
    products = {
        "op.rRh": most["gate.r_out"] * most["matmul.Rh"],
        "op.old_contrib": most["gate.z_out"] * most["output.h"],
        "op.new_contrib": frozen.one_minus_z * most["gate.g_out"],
    }
    part = {name: most.get(name, bound) for name, bound in products.items()}
    return {
        "gate.z_pre": [most["matmul.Wx"], most["matmul.Rh"]],
        "gate.r_pre": [most["matmul.Wx"], most["matmul.Rh"]],
        "gate.g_pre": [most["matmul.Wx"], part["op.rRh"]],
        "output.h": [part["op.old_contrib"], part["op.new_contrib"]],
        "zoneout": [most["output.h"], most["output.h"]],
        **{name: [bound] for name, bound in products.items()},
    }
