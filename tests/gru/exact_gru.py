"""The definition of the integer GRU once more, number by number in Python's exact arithmetic.

Written from the text of the definition alone: quantizers, weight scales and table coefficients are
taken from the module, everything else (multipliers, shifts, biases, the cell) is computed anew.
"""

import math
from fractions import Fraction

import numpy as np
import torch

f32 = np.float32


def clamp(value, lo, hi):
    return min(max(value, lo), hi)


class Q:
    """A quantizer: bits, signed, scale, zero point."""

    def __init__(self, bits, unsigned, scale, zero_point):
        self.bits, self.s, self.z = bits, scale, zero_point
        self.lo = 0 if unsigned else -(2 ** (bits - 1))
        self.hi = 2**bits - 1 if unsigned else 2 ** (bits - 1) - 1
        self.V = max(abs(self.lo - self.z), abs(self.hi - self.z))

    def code(self, x):
        """The code, and whether it was inside the limits before the clamp."""
        y = int(np.rint(f32(x) / f32(self.s))) + self.z  # a float32 division, ties to even
        return clamp(y, self.lo, self.hi), self.lo <= y <= self.hi

    def real(self, codes):
        return (torch.tensor(codes, dtype=torch.float64) - self.z) * self.s


def weighted_sum(terms, Ms, k, out):
    """The code, and whether it was inside the limits before the clamp."""
    total = sum(M * v for M, v in zip(Ms, terms, strict=True))
    exact = Fraction(total, 2**k) if k >= 0 else Fraction(total * 2**-k)
    code = round(exact) + out.z  # round() of a Fraction: ties to even
    return clamp(code, out.lo, out.hi), out.lo <= code <= out.hi


def one_term(ratio, width):
    """M in [2^(p-1), 2^p) and k."""
    p = 24 if width <= 16 or width > 32 else 16
    mantissa, exponent = math.frexp(ratio)
    M, k = round(Fraction(mantissa) * 2**p), p - exponent
    return (M // 2, k - 1) if M == 2**p else (M, k)


def several_terms(ratios, V, out, pot):
    """The multipliers and the shift of section 2."""

    def multipliers(k):
        return [round(Fraction(r) * Fraction(2) ** k) for r in ratios]

    def total(Ms):
        return sum(M * v for M, v in zip(Ms, V, strict=True))

    def error(k):
        rounded = (Fraction(M) / Fraction(2) ** k for M in multipliers(k))
        return sum(abs(Fraction(r) - m) * v for r, m, v in zip(ratios, rounded, V, strict=True))

    def half(k):
        return Fraction(2) ** (k - 1) if k >= 1 else 0

    def fits_128_bits(k):
        Ms = multipliers(k)
        return max(Ms) < 2**63 and total(Ms) + half(k) < 2**127

    tiers = (
        lambda k: total(multipliers(k)) < 2**24,
        lambda k: total(multipliers(k)) + half(k) < 2**31,
        lambda k: total(multipliers(k)) + half(k) < 2**53,
        lambda k: total(multipliers(k)) + half(k) < 2**62,
    )
    fast = next(k for k in range(400, -400, -1) if max(multipliers(k)) < 2**24)
    if not pot:
        of_tiers = (next(k for k in range(fast, -400, -1) if tier(k)) for tier in tiers)
        enough = (k for k in of_tiers if max(multipliers(k)).bit_length() >= out.bits + 4)
        fast = next(enough, fast)
    k = fast
    in_float32 = tiers[0](fast) and max(V) <= 2**16
    if error(fast) > (Fraction(1, 2) if in_float32 else Fraction(1, 16)):
        larger = [k for k in range(fast + 1, fast + 150) if fits_128_bits(k)]
        k = next((k for k in larger if error(k) <= Fraction(1, 16)), max(larger, default=fast))
    Ms = multipliers(k)
    while pot and all(M % 2 == 0 for M in Ms):
        Ms, k = [M // 2 for M in Ms], k - 1
    return Ms, k


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def corrected(b, w, codes, s, mean, bits):
    """The bias of a row with the mean error of its weights; see section 8."""
    if mean is None:
        return b
    K = (len(w) - 1).bit_length()
    B, E = 50 - bits - K, math.frexp(max(map(abs, mean.values)))[1]
    P, total = math.frexp(s)[1], 0
    for value, code, m in zip(w, codes, mean.values, strict=True):
        e = float(value) - s * code
        t = round(math.ldexp(e, -P) * math.ldexp(m, B - E))
        total += clamp(t, -(2 ** (51 - K)), 2 ** (51 - K))
    return f32(float(b) + math.ldexp(total, P + E - B))


class Cell:
    """One layer and direction."""

    def __init__(self, gru, layer, reverse):
        suffix = f"_l{layer}{'_reverse' if reverse else ''}"
        found = gru.get_quant_config(None, layer, reverse)
        self.q = {
            name: Q(o["bitwidth"], o["is_unsigned"], o["scale"], o["zero_point"])
            for name, o in found.items()
            if not name.startswith("weight.") and o["bitwidth"] is not None
        }
        self.pot = gru.config.scale_kind == "pot"
        self.plan = gru._plan().cells[layer][int(reverse)]
        self.activation = gru.config.activation
        H = self.H = gru.hidden_size
        self.rows = [*range(H, 2 * H), *range(H), *range(2 * H, 3 * H)]  # z, r, g
        self.codes, self.sums = {}, {}
        q = self.q
        self.one = round(1 / q["gate.z_out"].s)
        for weight, bias, name, x, y in (
            ("weight.W", "weight.bw", "ih", "input.x", "matmul.Wx"),
            ("weight.R", "weight.br", "hh", "output.h", "matmul.Rh"),
        ):
            w = getattr(gru, f"weight_{name}{suffix}").detach().float().numpy()
            b = getattr(gru, f"bias_{name}{suffix}", torch.zeros(3 * H)).detach().float().numpy()
            n, nb = found[weight]["bitwidth"], found[bias]["bitwidth"]
            s, sb = (self._scales(found[each]["scale"]) for each in (weight, bias))
            lo, hi = -(2 ** (n - 1)), 2 ** (n - 1) - 1
            codes = [[clamp(int(np.rint(v / f32(s[i]))), lo, hi) for v in w[i]] for i in self.rows]
            if weight == "weight.W":
                mean = gru._state.scales[layer][int(reverse)].input_mean
                rows = dict(zip(self.rows, codes, strict=True))
                b = [corrected(b[i], w[i], rows[i], s[i], mean, n) for i in range(3 * H)]
            lo, hi = -(2 ** (nb - 1)), 2 ** (nb - 1) - 1
            biases = [clamp(int(np.rint(b[i] / f32(sb[i]))), lo, hi) for i in self.rows]
            # beyond 32 bits together, biases are wider than the text says, and in coarser units
            limit = 2**30 if max(n, q[x].bits) <= 8 else 2**46 if n + q[x].bits <= 32 else 2**62
            shift = max(0, n + q[x].bits - 48)
            B = [
                clamp(round((code * sb[i]) / (s[i] * q[x].s * 2**shift)), -limit, limit)
                for code, i in zip(biases, self.rows, strict=True)
            ]
            Mk = [one_term((s[i] * q[x].s) / q[y].s, n + q[x].bits) for i in self.rows]
            self.codes[weight], self.codes[bias] = codes, biases
            self.codes[f"accumulator.{bias.partition('.')[2]}"] = B
            B = [b << shift for b in B]
            setattr(self, y.partition(".")[2], (codes, B, Mk, q[x], q[y]))

    def _scales(self, given):
        times = 3 * self.H // len(given)
        return [s for s in given for _ in range(times)]

    def product(self, v, K):
        codes, B, Mk, x, y = K
        rows = zip(codes, B, Mk, strict=True)
        return [
            weighted_sum([sum(c * (u - x.z) for c, u in zip(w, v, strict=True)) + b], [M], k, y)
            for w, b, (M, k) in rows
        ]

    def keep(self, name, found):
        code, inside = found
        self.step[name].append(code)
        self.inside[name].append(inside)
        return code

    def sum_of(self, name, *terms):
        """Each term is (value, scale, V)."""
        out = self.q[name]
        if name not in self.sums:
            ratios = [scale / out.s for _, scale, _ in terms]
            self.sums[name] = several_terms(ratios, [V for _, _, V in terms], out, self.pot)
        Ms, k = self.sums[name]
        return self.keep(name, weighted_sum([v for v, _, _ in terms], Ms, k, out))

    def term(self, name, a, b):
        """A product handed on: its own code, or itself where it is fused."""
        (u, su, Vu, nu), (v, sv, Vv, nv) = a, b
        if name not in self.q:
            return u * v, su * sv, Vu * Vv
        out = self.q[name]
        M, k = one_term(su * sv / out.s, nu + nv)
        code = self.keep(name, weighted_sum([u * v], [M], k, out))
        return code - out.z, out.s, out.V

    def table(self, name, code):
        """Table of the plan, against the function where the definition says it is exact."""
        pre, out = self.q[name.replace("_out", "_pre")], self.q[name]
        t = self.plan.frozen.tables[name]
        bounds, q = t.bounds.tolist(), clamp(code, int(t.bounds[0]), t.last)
        segment = max(i for i, first in enumerate(bounds) if first <= q)
        row = t.coefficients[segment].tolist()
        y = sum(c * (q - bounds[segment]) ** p for p, c in enumerate(row))
        f, ends = (math.tanh, (-1, 1)) if name == "gate.g_out" else (sigmoid, (0, 1))
        lo, hi = (clamp(round(end / out.s) + out.z, out.lo, out.hi) for end in ends)
        found = clamp(round(Fraction(y, 2**t.shift)) + out.z, lo, hi)
        if self.activation == "exact":
            real = round(f(pre.s * (code - pre.z)) / out.s)
            yardstick = clamp(real, out.lo - out.z, out.hi - out.z) + out.z
            allowed = 0 if pre.bits <= 12 else max(1, 2 ** (out.bits - 16))
            assert abs(found - yardstick) <= allowed, (name, code, found, yardstick)
        self.step[name].append(found)
        return found - out.z

    def run(self, x, h):
        """One step: input codes (C,), state codes (H,) -> state codes."""
        q, H = self.q, self.H
        self.step, self.inside = {name: [] for name in q}, {name: [] for name in q}
        self.step["input.x"] = list(x)
        Wx = [self.keep("matmul.Wx", each) for each in self.product(x, self.Wx)]
        Rh = [self.keep("matmul.Rh", each) for each in self.product(h, self.Rh)]
        qx, qh, q_h = q["matmul.Wx"], q["matmul.Rh"], q["output.h"]
        z_q, r_q, g_q = q["gate.z_out"], q["gate.r_out"], q["gate.g_out"]
        one_minus = max(abs(self.one - (z_q.lo - z_q.z)), abs(self.one - (z_q.hi - z_q.z)))
        for j in range(H):

            def gate(i, name, j=j):
                pre = self.sum_of(
                    f"gate.{name}_pre",
                    (Wx[i * H + j] - qx.z, qx.s, qx.V),
                    (Rh[i * H + j] - qh.z, qh.s, qh.V),
                )
                return self.table(f"gate.{name}_out", pre)

            z, r = gate(0, "z"), gate(1, "r")
            rRh = self.term(
                "op.rRh",
                (r, r_q.s, r_q.V, r_q.bits),
                (Rh[2 * H + j] - qh.z, qh.s, qh.V, qh.bits),
            )
            pre = self.sum_of("gate.g_pre", (Wx[2 * H + j] - qx.z, qx.s, qx.V), rRh)
            g = self.table("gate.g_out", pre)
            old = self.term(
                "op.old_contrib",
                (z, z_q.s, z_q.V, z_q.bits),
                (h[j] - q_h.z, q_h.s, q_h.V, q_h.bits),
            )
            new = self.term(
                "op.new_contrib",
                (self.one - z, z_q.s, one_minus, z_q.bits),
                (g, g_q.s, g_q.V, g_q.bits),
            )
            self.sum_of("output.h", old, new)
        return self.step["output.h"]


def definition(gru, x, h0):
    """Codes of all operators by the names of `trace_codes`, as nested lists; and the masks."""
    T, N, _ = x.shape
    found, inside = {}, {}
    directions = 2 if gru.bidirectional else 1
    below = None
    for layer in range(gru.num_layers):
        cells = [Cell(gru, layer, reverse) for reverse in (False, True)[:directions]]
        inputs = [None] * directions
        for d, cell in enumerate(cells):
            q_x = cell.q["input.x"]
            if below is None:
                inputs[d] = [
                    [[q_x.code(v) for v in x[t, n].tolist()] for n in range(N)] for t in range(T)
                ]
                continue
            inputs[d] = [[[] for _ in range(N)] for _ in range(T)]
            for lower, out in below:
                q_h = lower.q["output.h"]
                M, k = one_term(q_h.s / q_x.s, 16)  # 24 bits, whatever the width
                for t in range(T):
                    for n in range(N):
                        inputs[d][t][n] += [
                            weighted_sum([h - q_h.z], [M], k, q_x) for h in out[t][n]
                        ]
        outputs = []
        for d, cell in enumerate(cells):
            suffix = f"_l{layer}{'_reverse' if d else ''}"
            start = h0[layer * directions + d]
            h = [[cell.q["output.h"].code(v) for v in row.tolist()] for row in start]
            inside[f"output.h0{suffix}"] = [[ok for _, ok in row] for row in h]
            h = [[code for code, _ in row] for row in h]
            found[f"output.h0{suffix}"] = [list(row) for row in h]
            steps, masks = [None] * T, [None] * T
            for t in reversed(range(T)) if d else range(T):
                steps[t], masks[t] = [], []
                for n in range(N):
                    h[n] = cell.run([code for code, _ in inputs[d][t][n]], h[n])
                    steps[t].append(cell.step)
                    masks[t].append({**cell.inside, "input.x": [ok for _, ok in inputs[d][t][n]]})
            for name in cell.q:
                found[name + suffix] = [[row[name] for row in rows] for rows in steps]
                inside[name + suffix] = [[row[name] for row in rows] for rows in masks]
            for name, codes in cell.codes.items():
                found[name + suffix] = codes
            outputs.append((cell, found["output.h" + suffix]))
        below = outputs
    return found, inside
