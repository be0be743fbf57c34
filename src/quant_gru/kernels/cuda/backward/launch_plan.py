"""The launches of a layer's backward, prepared once per size; a call only sets addresses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.backward import Gradients, Wanted
from quant_gru.kernel_runtime.cuda.launch import Machine, Prepared
from quant_gru.kernels.cuda.backward.buffers import FEWEST_ROWS, Sizes
from quant_gru.kernels.cuda.backward.final_gemms import Factors, LastProducts, multiply_into
from quant_gru.kernels.cuda.backward.inputs import Call, Precision, weights_of
from quant_gru.kernels.cuda.backward.stages import Stages
from quant_gru.kernels.cuda.forward.planned_launches import multiply_bytes


class Schedule:
    """The launches for calls of one size, for the directions of a layer.

    Args:
        calls: The first calls of that size, one per direction.
        wanted: Which gradients to compute.
        precision: How gradients are multiplied.
        machine: The machine that runs the kernels.

    Attributes:
        memory: The memory of a call.
        at: For each direction, the fields that point to a call's inputs and outputs, by name.
        products: The final GEMMs.
        whole: All work of a call as launches; None if torch multiplies in between.
    """

    def __init__(
        self, calls: Sequence[Call], wanted: Wanted, precision: Precision, machine: Machine
    ) -> None:
        self._frozen = [weakref.ref(call.plan.frozen) for call in calls]
        self._sizes = Sizes(calls, wanted, precision, machine)
        self._wanted, self._precision, self._machine = wanted, precision, machine
        self._lock = threading.Lock()
        self._reverse = [call.reverse for call in calls]
        self._parts: list[weakref.ref[Any] | None] = [None for _ in calls]
        stages = self._stages = Stages(self._sizes, calls, machine)
        self.memory, self.at = stages.memory, stages.at
        factors = [self._factors(d) for d in range(self._sizes.dirs)]
        self.products = LastProducts(machine, self.memory, factors)
        # the launches after the derivatives, if torch is not needed for them
        self._rest: Prepared | None = None
        self.whole: Prepared | None = None
        if self._sizes.recurrence:
            self._rest = machine.join([*stages.recurrence, *stages.projections])
            if self._sizes.fused:
                derivatives = [chunk.launch for chunk in stages.derivatives]
                last = [] if self.products.launch is None else [self.products.launch]
                self.whole = machine.join([stages.operands, *derivatives, self._rest, *last])

    def _factors(self, d: int) -> dict[str, Factors]:
        """Return the factors of the final GEMMs of a direction."""
        buffers = self._stages.buffers[d]
        found: dict[str, Factors] = {}
        if buffers.W.real_weights is not None:
            found["x"] = Factors(buffers.dWx, buffers.W.real_weights, False)
        if buffers.W.real_codes is not None:
            found["W"] = Factors(buffers.dWx, buffers.W.real_codes, True)
        if buffers.R.real_codes is not None:
            found["R"] = Factors(buffers.dRh, buffers.R.real_codes, True)
        return found

    def belongs_to(self, calls: Sequence[Call]) -> bool:
        """Return whether the calls have the plans for which this schedule was prepared."""
        return all(ref() is call.plan.frozen for ref, call in zip(self._frozen, calls, strict=True))

    def run(self, calls: Sequence[Call]) -> list[Gradients]:
        """Compute all gradients of a call."""
        device, N, H, dirs = calls[0].device, self._sizes.N, self._sizes.H, self._sizes.dirs
        memory = torch.empty(self.memory.size, dtype=torch.int8, device=device)
        dh0 = torch.empty((dirs * N, H), dtype=torch.float32, device=device)
        db = torch.empty((2 * dirs, 3 * H), dtype=torch.float32, device=device)
        dh0_at, db_at = dh0.data_ptr(), db.data_ptr()
        with self._lock:
            self.memory.move(memory.data_ptr())
            for d, at in enumerate(self.at):
                at["dh0"].move(dh0_at + 4 * d * N * H)
                at["bw"].move(db_at + 24 * d * H)
                at["br"].move(db_at + 24 * d * H + 12 * H)
            # tensors that must live until all kernels are launched
            keep = self.point(calls)
            found = self._start(memory, dh0, db)
            del keep
            return found

    def point(self, calls: Sequence[Call]) -> list[Any]:
        """Point arguments to the tensors of calls.

        Returns:
            Tensors that must live until all kernels are launched.
        """
        keep: list[Any] = []
        stages = self._stages
        for d, call in enumerate(calls):
            at = self.at[d]
            for name, tensor in call.tensors.items():
                at[name].move(0 if tensor is None else tensor.data_ptr())
            keep.append(self._point_at_weights(d, call))
            states, codes = stages.states[d], stages.codes[d]
            states.stride_t, states.stride_n, states.stride_h = call.grad_out.stride()
            codes.step, codes.next = call.strides
        return keep

    @property
    def follows_plans(self) -> bool:
        """Whether kernels read the plans' own weights, as the last `point` found them."""
        return None not in self._parts

    def _point_at_weights(self, d: int, call: Call) -> dict[str, Tensor] | None:
        """Point arguments to the weights.

        Returns:
            Tensors that must live until all kernels are launched, or None if nothing changed.
        """
        kept = self._parts[d]
        if kept is not None and kept() is call.plan.weights:
            return None
        found, own = weights_of(call.plan)
        for name, tensor in found.items():
            self.at[d][name].move(tensor.data_ptr())
        self._parts[d] = weakref.ref(call.plan.weights) if own else None
        return found

    def start(self, memory: Tensor, stream: int) -> None:
        """Start all launches, and the final GEMMs if they are launches.

        Args:
            memory: The memory of a call, to which arguments point.
            stream: The current stream.
        """
        if self.whole is not None:
            self.whole.start(stream)
            return
        self._start_derivatives(memory, stream)
        if self._rest is not None:
            self._rest.start(stream)
        else:
            self._start_recurrence(memory, stream)
            for launch in self._stages.projections:
                launch.start(stream)
        if self.products.launch is not None:
            self.products.launch.start(stream)

    def _start(self, memory: Tensor, dh0: Tensor, db: Tensor) -> list[Gradients]:
        sizes, wanted, products = self._sizes, self._wanted, self.products
        made: list[dict[str, Tensor]] = []
        for d, rooms in enumerate(products.results):
            made.append({name: products.new(d, name, memory.device) for name in rooms})
            for name, to in rooms.items():
                to.move(made[d][name].data_ptr())
        self.start(memory, self._machine.stream())
        real = memory.view(self._precision.dtype)
        biases, states = db.unbind(), [dh0] if sizes.dirs == 1 else dh0.chunk(sizes.dirs)
        results = []
        for d in range(sizes.dirs):

            def found(name: str, d: int = d) -> Tensor:
                return made[d][name] if made[d] else products.made(d, name, real)

            results.append(
                Gradients(
                    found("x").view(sizes.T, sizes.N, sizes.C) if wanted.x else None,
                    states[d],
                    found("W") if wanted.W else None,
                    found("R") if wanted.R else None,
                    biases[2 * d] if wanted.bw else None,
                    biases[2 * d + 1] if wanted.br else None,
                    self._state_gradients(d, memory) if wanted.h else None,
                )
            )
        return results

    def _start_derivatives(self, memory: Tensor, stream: int) -> None:
        stages, planes = self._stages, self._sizes.planes
        stages.operands.start(stream)
        words = memory.view(torch.int32)
        for first, count, launch in stages.derivatives:
            for buffers in stages.buffers:
                for i, of in enumerate((buffers.W, buffers.R)):
                    if of.sums is None:
                        continue
                    taken = max(planes[i] * count, FEWEST_ROWS)
                    multiply_bytes(
                        of.codes.of(memory, planes[i] * first, taken),
                        of.weights.of(memory).t(),
                        of.sums.of(words, 0, taken),
                    )
            launch.start(stream)

    def _start_recurrence(self, memory: Tensor, stream: int) -> None:
        """Start a recurrence that is not one launch for all directions."""
        if self._sizes.grid is not None:
            words = memory.view(torch.int32)
            # one direction after the other, since each may need the whole GPU
            for buffers, launch in zip(self._stages.buffers, self._stages.recurrence, strict=True):
                buffers.dRh_words.of(words).fill_(-1)
                launch.start(stream)
            return
        for d, reverse in enumerate(self._reverse):
            self._start_steps(d, reverse, memory, stream)

    def _start_steps(self, d: int, reverse: bool, memory: Tensor, stream: int) -> None:
        """Run a GEMM and a launch per step, for weights that do not fit registers."""
        sizes, buffers = self._sizes, self._stages.buffers[d]
        real = memory.view(self._precision.dtype)
        assert buffers.R.real_weights is not None
        assert buffers.step is not None
        R = buffers.R.real_weights.of(real)
        product = buffers.step.of(memory.view(torch.float32))
        p, launch = self._stages.states[d], self._stages.recurrence[d]
        p.started = 0
        for t in range(sizes.T) if reverse else reversed(range(sizes.T)):
            p.t = t
            launch.start(stream)
            multiply_into(buffers.dRh.of(real, t * sizes.N, sizes.N), R, product)
            p.started = 1
        p.t = -1
        launch.start(stream)

    def _state_gradients(self, d: int, memory: Tensor) -> Tensor:
        """Return a copy of the gradients of the states, so that the rest of memory is freed."""
        found = self._stages.buffers[d].d.of(memory.view(torch.float32)).clone()
        return found.view(self._sizes.T, self._sizes.N, self._sizes.H)
