"""The backward of a layer on a GPU: straight-through, and as parallel in time as it can be.

Three phases. Gates and clamps of all steps are made again from the saved codes, in the integers of
the forward, and give the slopes of every element: all that follows is linear in the gradients. The
gradients of the states go back step by step. Those of both projections, and the products with
inputs, states and weights, are again made for all steps at once. Nothing is added atomically: the
same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quant_gru._errors import QuantGRUError
from quant_gru.integer.backward import Gradients, Tape, Wanted, straight_through
from quant_gru.kernels.cuda import back_planner
from quant_gru.kernels.cuda.back_planner import BackShape
from quant_gru.kernels.cuda.back_structures import (
    SLOPES_C,
    BackC,
    BackStepC,
    FragmentsC,
    OuterC,
    codes_of,
    weights_of,
)
from quant_gru.kernels.cuda.executor import multiply_bytes, numbers_of
from quant_gru.kernels.cuda.frozen import byte_offset, planes_of
from quant_gru.kernels.cuda.launch import PLAIN, Grid, Kernel, Machine
from quant_gru.kernels.cuda.structures import KINDS

_THREADS = 256
_FEWEST_ROWS = 32  # torch._int_mm takes more than 16
_PRODUCT_BYTES = 32 << 20  # of the int32 sums of W x, or of R h, at once
_LARGEST_HALF = 30000.0
_SUMMED = 256  # chunks of rows whose sums are added in the end
_CHANNEL_BYTES = 24
_BLOCKS = 2112  # that fill a GPU: 16 for each multiprocessor of the largest


@dataclass(frozen=True)
class Precision:
    """How gradients are multiplied.

    Attributes:
        planes: Parts of bfloat16 of a gradient in the recurrence.
        exact_weights: Weights of more than 8 bits are multiplied in two parts, not rounded.
        half: Slopes are kept in half precision.
        operand: Type of the operands of the products after the recurrence: 0 bfloat16, 1 float32.
    """

    planes: int
    exact_weights: bool
    half: bool
    operand: int


PRECISIONS = {
    "bf16": Precision(1, False, True, 0),
    "tf32": Precision(2, True, False, 1),
    "fp32": Precision(3, True, False, 1),
}
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def backward(
    tapes: Sequence[Tape],
    grad_out: Sequence[Tensor],
    grad_last: Sequence[Tensor],
    wanted: Wanted | None = None,
    precision: str = "bf16",
    machine: Machine | None = None,
) -> list[Gradients]:
    """Backpropagate through one layer, both directions in the same launches where they are alike.

    The gradients are those of `quant_gru.integer.backward.straight_through`, up to rounding:
    ||error|| / ||gradient|| is below 1e-5 for 'fp32', 1e-3 for 'tf32' and 1e-2 for 'bf16'. Plans
    with operators of more than 16 bits take `straight_through` itself, in float64.

    Args:
        tapes: What the forward of each direction took in and gave.
        grad_out: Gradient of each direction's dequantized outputs (T, N, H), any strides.
        grad_last: Gradient of each direction's dequantized last state (N, H).
        wanted: Which gradients to compute; None for all.
        precision: 'fp32', 'tf32' or 'bf16'.
        machine: Where kernels run; None for the codes' GPU.

    Returns:
        Float32 gradients of each direction.

    Raises:
        QuantGRUError: The precision is unknown, or a kernel is not loaded while a graph is captured.
    """
    wanted = wanted or Wanted()
    chosen = PRECISIONS.get(precision)
    if chosen is None:
        raise QuantGRUError(
            f"Expected precision to be one of {', '.join(PRECISIONS)}, got {precision!r}"
        )
    device = tapes[0].x.device
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _backward(tapes, grad_out, grad_last, wanted, chosen, precision, machine)
    return _backward(tapes, grad_out, grad_last, wanted, chosen, precision, machine)


def _backward(
    tapes: Sequence[Tape],
    grad_out: Sequence[Tensor],
    grad_last: Sequence[Tensor],
    wanted: Wanted,
    chosen: Precision,
    precision: str,
    machine: Machine | None,
) -> list[Gradients]:
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        # where the user lets float32 products be rounded, these would be, too
        chosen = Precision(chosen.planes, chosen.exact_weights, chosen.half, 2)
    calls = [
        _Call(tape, out, last) for tape, out, last in zip(tapes, grad_out, grad_last, strict=True)
    ]
    if not all(call.form.narrow for call in calls):
        return [_in_float64(*each, wanted) for each in zip(tapes, grad_out, grad_last, strict=True)]
    if not calls[0].rows:
        return [call.nothing(wanted) for call in calls]
    if machine is None:
        from quant_gru.kernels.cuda.driver import machine_of

        machine = machine_of(tapes[0].x.device)
    if len({call.key for call in calls}) > 1:
        return [_Layer([call], wanted, chosen, machine).run()[0] for call in calls]
    return _Layer(calls, wanted, chosen, machine).run()


def _in_float64(tape: Tape, grad_out: Tensor, grad_last: Tensor, wanted: Wanted) -> Gradients:
    exact = straight_through(tape, grad_out, grad_last, wanted)
    return Gradients(
        *(
            None if each is None else each.to(torch.float32)
            for each in (exact.x, exact.h0, exact.W, exact.R, exact.bw, exact.br)
        )
    )


class _Call:
    """Tensors and numbers of one direction."""

    def __init__(self, tape: Tape, grad_out: Tensor, grad_last: Tensor) -> None:
        plan = self.plan = tape.plan
        T, N, C = tape.x.shape
        H = plan.hidden_size
        self.T, self.N, self.C, self.H, self.rows = T, N, C, H, T * N
        for name, each, shape in (
            ("grad_out", grad_out, (T, N, H)),
            ("grad_last", grad_last, (N, H)),
            ("h0", tape.h0, (N, H)),
            ("out", tape.out, (T, N, H)),
        ):
            if each.shape != shape:
                raise QuantGRUError(f"Expected {name} to be {shape}, got {tuple(each.shape)}")
        self.x = tape.x.to(plan.x.container).contiguous()
        self.h0 = tape.h0.to(plan.h.container).contiguous()
        self.out = tape.out.to(plan.h.container).contiguous()
        lengths = tape.lengths
        self.lengths = (
            None if lengths is None else lengths.to(tape.x.device, torch.int64).contiguous()
        )
        held = tape.held
        self.held = None if held is None else held.to(torch.bool).contiguous()
        self.reverse = tape.reverse
        self.grad_out = grad_out.to(torch.float32)
        self.grad_last = grad_last.to(torch.float32).contiguous()
        numbers = numbers_of(plan)
        self.form, self.cells = numbers.form, numbers.frozen.cells
        w = plan.weights
        # the smallest multiple of 16 bytes that holds a row, for W and for R
        self.padded = [-(-max(K, 1) // 16) * 16 for K in (C, H)]
        self.weight_planes = [planes_of(w.bits_W), planes_of(w.bits_R)]
        self.planes = [planes_of(plan.x.bits), planes_of(plan.h.bits)]
        self.columns = [-(-(3 * H if p == 1 else 6 * H + 1) // 16) * 16 for p in self.weight_planes]

    @property
    def key(self) -> tuple[object, ...]:
        """What directions of a launch have in common."""
        shape = (self.T, self.N, self.C, self.H)
        return (shape, self.form, *self.planes, *self.weight_planes, self.fits_half)

    @property
    def fits_half(self) -> bool:
        """Whether all slopes are far from the largest number of half precision."""
        q = self.plan.frozen.quantizers
        z, r, g, h, Rh = (
            q[name].max_abs * q[name].scale
            for name in ("gate.z_out", "gate.r_out", "gate.g_out", "output.h", "matmul.Rh")
        )
        z_slope, r_slope = z * (1 + z), r * (1 + r)
        return max((h + g) * z_slope, (1 + z) * max(1.0, r, Rh * r_slope), z) < _LARGEST_HALF

    def nothing(self, wanted: Wanted) -> Gradients:
        """The gradients of no steps or no rows."""

        def zeros(wanted: bool, *shape: int) -> Tensor | None:
            return self.grad_last.new_zeros(shape) if wanted else None

        H3 = 3 * self.H
        return Gradients(
            zeros(wanted.x, self.T, self.N, self.C),
            self.grad_last.clone(),
            zeros(wanted.W, H3, self.C),
            zeros(wanted.R, H3, self.H),
            zeros(wanted.bw, H3),
            zeros(wanted.br, H3),
        )


class _Layer:
    """One backward: its launches in order, and what they hand on."""

    def __init__(
        self, calls: Sequence[_Call], wanted: Wanted, precision: Precision, machine: Machine
    ) -> None:
        self.calls, self.wanted, self.precision, self.machine = calls, wanted, precision, machine
        first = calls[0]
        self.T, self.N, self.H, self.rows = first.T, first.N, first.H, first.rows
        self.dirs = len(calls)
        self.half = precision.half and first.fits_half
        self.dtype = _DTYPES[precision.operand]
        self.macros: dict[str, object] = {
            **PLAIN,
            "OPERAND": precision.operand,
            "HALF": int(self.half),
            "DIRS": self.dirs,
        }
        self.chunk = self._chunk_rows()
        weight_planes = 2 if precision.exact_weights and first.weight_planes[1] == 2 else 1
        self.shape = back_planner.choose(
            self.H, self.N, self.dirs, precision.planes, weight_planes, machine.clusters()
        )

    def run(self) -> list[Gradients]:
        """All gradients."""
        self._prepare()
        self._slopes()
        d, dh0, dRh = self._back()
        return self._products(d, dh0, dRh)

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.calls[0].x.device)

    def _chunk_rows(self) -> int:
        """Rows of an integer product at once."""
        call = self.calls[0]
        row = 4 * max(c * p for c, p in zip(call.columns, call.planes, strict=True))
        chunks = max(1, -(-self.rows * row // _PRODUCT_BYTES))
        return -(-self.rows // chunks)

    def _prepare(self) -> None:
        """Weights and codes as operands."""
        wanted, H, operand = self.wanted, self.H, self.precision.operand
        weights: Any = weights_of(self.dirs)()
        weights.H = H
        taken: Any = codes_of(self.dirs)()
        taken.rows, taken.chunk = self.rows, self.chunk
        self.gemm: list[list[tuple[Tensor, Tensor]]] = []
        self.channels: list[list[Tensor]] = []
        self.real_weights: list[list[Tensor | None]] = []
        self.real_codes: list[list[Tensor | None]] = []
        for d, call in enumerate(self.calls):
            plan, w = call.plan, call.plan.weights
            sums = (w.Wx, w.Rh)
            real_wanted = (wanted.x, self.shape is None)
            code_wanted = (wanted.W, wanted.R)
            self.gemm.append([])
            self.channels.append([])
            self.real_weights.append([])
            self.real_codes.append([])
            for i, (codes, bias, q) in enumerate(((w.W, w.Bw, plan.x), (w.R, w.Br, plan.h))):
                K, padded, planes = (call.C, H)[i], call.padded[i], call.planes[i]
                columns = call.columns[i]
                p = weights.w[2 * d + i]
                bytes_ = self._new(columns, padded, dtype=torch.int8)
                channels = self._new(3 * H * _CHANNEL_BYTES, dtype=torch.int8)
                real = self._new(3 * H, K, dtype=self.dtype) if real_wanted[i] else None
                (M,), k = sums[i].multipliers, sums[i].shift
                held = [_int64(each) for each in (bias, M, k)]
                codes = codes.contiguous()
                scales = w.scales[("weight.W", "weight.R")[i]].contiguous()
                self._keep(codes, scales, *held)
                p.codes, p.scales, p.kind = codes.data_ptr(), scales.data_ptr(), KINDS[codes.dtype]
                p.bias, p.M, p.k = (each.data_ptr() for each in held)
                p.bytes, p.channels, p.real = bytes_.data_ptr(), channels.data_ptr(), _at(real)
                p.K, p.padded, p.planes = K, padded, call.weight_planes[i]
                p.offset, p.zero, p.max_abs = byte_offset(q), q.zero_point, q.max_abs
                p.activation_planes, p.activation_scale = planes, q.scale
                c = taken.c[2 * d + i]
                rows = self._new(planes * self.rows + _FEWEST_ROWS, padded, dtype=torch.int8)
                operands = self._new(self.rows, K, dtype=self.dtype) if code_wanted[i] else None
                c.codes = (call.x, call.out)[i].data_ptr()
                c.before = call.h0.data_ptr() if i else None
                c.bytes, c.real = rows.data_ptr(), _at(operands)
                c.kind, c.K, c.padded, c.planes = KINDS[q.container], K, padded, planes
                c.offset, c.zero, c.shift, c.reverse = p.offset, p.zero, self.N, call.reverse
                self.gemm[d].append((rows, bytes_.t()))
                self.channels[d].append(channels)
                self.real_weights[d].append(real)
                self.real_codes[d].append(operands)
        macros = {**PLAIN, "OPERAND": operand, "HALF": 1, "DIRS": self.dirs}
        blocks = (-(-3 * H // 8), 2 * self.dirs)
        launch = self.machine.launch
        launch(Kernel.of("operands", "weights", macros), Grid(blocks, _THREADS), weights)
        blocks = (min(-(-self.rows // 8), 2048), 2 * self.dirs)
        launch(Kernel.of("operands", "unpack", macros), Grid(blocks, _THREADS), taken)
        if self.shape is not None:
            self._transpose(self.shape, macros)

    def _transpose(self, shape: BackShape, macros: dict[str, object]) -> None:
        self.fragments = self._new(self.dirs, shape.fragments, dtype=torch.int32)
        records = (FragmentsC * self.dirs)()
        for d, call in enumerate(self.calls):
            p: Any = records[d]
            R = call.plan.weights.R.contiguous()
            self._keep(R)
            p.codes, p.to, p.kind = R.data_ptr(), self.fragments[d].data_ptr(), KINDS[R.dtype]
            p.H, p.U, p.CL, p.MT, p.KS = self.H, shape.units, shape.blocks, shape.tiles, shape.split
            p.KP, p.WP, p.groups = shape.depth, shape.weight_planes, shape.groups
            p.count = shape.fragments
        blocks = (-(-shape.fragments // _THREADS), self.dirs)
        kernel = Kernel.of("operands", "transpose", macros)
        self.machine.launch(kernel, Grid(blocks, _THREADS), records)

    def _slopes(self) -> None:
        """Slopes of all elements, from both projections made again."""
        first, H = self.calls[0], self.H
        form = first.form
        words = 2 if self.half else 4
        self.of_R = self._new(self.dirs, self.rows * H * words, dtype=torch.int32)
        self.of_W = self._new(self.dirs, self.rows * H * words, dtype=torch.int32)
        records: Any = (SLOPES_C[form.real] * self.dirs)()
        sums = [
            [
                self._new(p * self.chunk + _FEWEST_ROWS, c, dtype=torch.int32)
                for p, c in zip(call.planes, call.columns, strict=True)
            ]
            for call in self.calls
        ]
        for d, call in enumerate(self.calls):
            p, q = records[d], call.plan.frozen.quantizers
            for i, (to, name) in enumerate(((p.W, "matmul.Wx"), (p.R, "matmul.Rh"))):
                to.product = sums[d][i].data_ptr()
                to.channels = self.channels[d][i].data_ptr()
                to.columns, to.planes = call.columns[i], call.planes[i]
                to.weight_planes = call.weight_planes[i]
                to.lo, to.hi = q[name].lo - q[name].zero_point, q[name].hi - q[name].zero_point
            p.out, p.h0, p.lengths = call.out.data_ptr(), call.h0.data_ptr(), _at(call.lengths)
            p.held, p.h_kind = _at(call.held), KINDS[call.plan.h.container]
            p.of_R, p.of_W = self.of_R[d].data_ptr(), self.of_W[d].data_ptr()
            p.T, p.N, p.H, p.reverse = self.T, self.N, H, call.reverse
            p.s_z, p.s_r, p.s_g = (q[f"gate.{gate}_out"].scale for gate in "zrg")
            p.s_h, p.s_Rh = call.plan.h.scale, q["matmul.Rh"].scale
            p.cell = call.cells[form.real]
        kernel = Kernel.of(
            "slopes",
            "slopes_of",
            {
                **self.macros,
                "REAL": form.real,
                "QG_WORDS": int(form.words),
                **dict(zip(("TZ", "TR", "TG"), form.tables, strict=True)),
                **form.products,
            },
        )
        for start in range(0, self.rows, self.chunk):
            count = min(self.chunk, self.rows - start)
            for d, call in enumerate(self.calls):
                for i in range(2):
                    rows, weights = self.gemm[d][i]
                    planes = call.planes[i]
                    taken = max(planes * count, _FEWEST_ROWS)
                    at = planes * start
                    multiply_bytes(rows[at : at + taken], weights, sums[d][i][:taken])
                records[d].first, records[d].rows = start, count
            across = -(-H // 32) * self.dirs
            blocks = (min(-(-count // 8), max(1, _BLOCKS // across)), across)
            self.machine.launch(kernel, Grid(blocks, _THREADS, 1, form.table_bytes), records)

    def _back(self) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        """Gradients of all states, of the first, and maybe those of R h as operands."""
        d = self._new(self.dirs, self.rows * self.H)
        dh0 = self._new(self.dirs, self.N, self.H)
        shape = self.shape
        if shape is None:
            return d, dh0, [self._back_steps(i, d[i], dh0[i]) for i in range(self.dirs)]
        records = (BackC * self.dirs)()
        for i, call in enumerate(self.calls):
            p: Any = records[i]
            scales = call.plan.weights.scales["weight.R"].contiguous()
            self._keep(scales)
            p.weights, p.slopes = self.fragments[i].data_ptr(), self.of_R[i].data_ptr()
            p.scales, p.grad_out = scales.data_ptr(), call.grad_out.data_ptr()
            p.grad_last, p.lengths = call.grad_last.data_ptr(), _at(call.lengths)
            p.d, p.dh0 = d[i].data_ptr(), dh0[i].data_ptr()
            p.T, p.N, p.H, p.reverse = self.T, self.N, self.H, call.reverse
            p.stride_t, p.stride_n, p.stride_h = call.grad_out.stride()
        macros = {**PLAIN, **shape.macros(self.half, self.precision.operand, self.dirs)}
        blocks = (-(-self.N // shape.rows) * shape.blocks, self.dirs)
        grid = Grid(blocks, shape.threads, shape.blocks, shape.shared_bytes)
        self.machine.launch(Kernel.of("back", "back", macros), grid, records)
        return d, dh0, None

    def _back_steps(self, i: int, d: Tensor, dh0: Tensor) -> Tensor:
        """A product and a launch for each step: for weights that fit no registers."""
        call, H, N = self.calls[i], self.H, self.N
        dRh = self._new(self.rows, 3 * H, dtype=self.dtype)
        product = self._new(N, H)
        R = self.real_weights[i][1]
        assert R is not None
        p: Any = BackStepC()
        p.product, p.slopes = product.data_ptr(), self.of_R[i].data_ptr()
        p.grad_out, p.grad_last = call.grad_out.data_ptr(), call.grad_last.data_ptr()
        p.lengths, p.d, p.dh = _at(call.lengths), d.data_ptr(), dh0.data_ptr()
        p.dRh, p.N, p.H, p.scale = dRh.data_ptr(), N, H, call.plan.h.scale
        p.stride_t, p.stride_n, p.stride_h = call.grad_out.stride()
        kernel = Kernel.of("back_step", "back_step", self.macros)
        grid = Grid((N, -(-H // _THREADS)), _THREADS)
        for t in range(self.T) if call.reverse else reversed(range(self.T)):
            p.t = t
            self.machine.launch(kernel, grid, p)
            _multiply(dRh[t * N : (t + 1) * N], R, product)
            p.started = 1
        p.t = -1
        self.machine.launch(kernel, grid, p)
        return dRh

    def _products(self, d: Tensor, dh0: Tensor, dRh: list[Tensor] | None) -> list[Gradients]:
        """Gradients of inputs, weights and biases."""
        wanted, H = self.wanted, self.H
        biases = wanted.bw or wanted.br
        chunk = max(64, -(-self.rows // _SUMMED))
        chunks = -(-self.rows // chunk)
        records = (OuterC * self.dirs)()
        db = self._new(self.dirs, 2, 3 * H)
        partial = self._new(self.dirs, chunks * 6 * H)
        found: list[tuple[Tensor | None, Tensor | None]] = []
        for i, call in enumerate(self.calls):
            p: Any = records[i]
            dWx = self._new(self.rows, 3 * H, dtype=self.dtype) if wanted.W or wanted.x else None
            made = None if dRh is None else dRh[i]
            if made is None and wanted.R:
                made = self._new(self.rows, 3 * H, dtype=self.dtype)
                p.dRh = made.data_ptr()
            found.append((dWx, made))
            p.d, p.of_R, p.of_W = d[i].data_ptr(), self.of_R[i].data_ptr(), self.of_W[i].data_ptr()
            p.dWx, p.db = _at(dWx), db[i].data_ptr()
            p.partial = partial[i].data_ptr() if biases else None
            p.rows, p.H, p.chunk, p.chunks = self.rows, H, chunk, chunks
            p.scale_x, p.scale_h = call.plan.x.scale, call.plan.h.scale
        wide = 2 if H % 2 == 0 else 1
        macros = {**self.macros, "WIDE": wide}
        grid = Grid((chunks, -(-H // (32 * wide)) * self.dirs), _THREADS, 1, 8 * 6 * 32 * 4 * wide)
        launch = self.machine.launch
        launch(Kernel.of("outer", "outer", macros), grid, records)
        if biases:
            grid = Grid((-(-6 * H // 32), self.dirs), _THREADS, 1, 8 * 32 * 4)
            launch(Kernel.of("outer", "outer_sums", macros), grid, records)
        results = []
        for i, call in enumerate(self.calls):
            of_Wx, of_Rh = found[i]
            x_codes, h_codes = self.real_codes[i]
            W = self.real_weights[i][0]
            results.append(
                Gradients(
                    self._product(of_Wx, W, wanted.x, (self.T, self.N, call.C)),
                    dh0[i],
                    self._product(_t(of_Wx), x_codes, wanted.W, (3 * H, call.C)),
                    self._product(_t(of_Rh), h_codes, wanted.R, (3 * H, H)),
                    db[i, 0] if wanted.bw else None,
                    db[i, 1] if wanted.br else None,
                )
            )
        return results

    def _product(
        self, a: Tensor | None, b: Tensor | None, wanted: bool, shape: tuple[int, ...]
    ) -> Tensor | None:
        if not wanted:
            return None
        assert a is not None
        assert b is not None
        result = self._new(a.shape[0], b.shape[1])
        _multiply(a, b, result)
        return result.view(shape)

    def _keep(self, *tensors: Tensor) -> None:
        """Hold what launches of this call read."""
        self._kept = [*getattr(self, "_kept", ()), *tensors]


def _multiply(a: Tensor, b: Tensor, result: Tensor) -> None:
    """A product of operands, in float32."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=result)
    elif a.dtype == torch.bfloat16 and a.is_cuda:
        torch.mm(a, b, out_dtype=torch.float32, out=result)
    else:
        result.copy_(a.to(torch.float64) @ b.to(torch.float64))


def _int64(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value.to(torch.int64).contiguous()


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _t(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.t()
