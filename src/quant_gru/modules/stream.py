"""Step-by-step inference: one time step per call, with the state in integers."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quant_gru.config import QuantConfig
from quant_gru.config.choice import described
from quant_gru.errors import QuantGRUError
from quant_gru.execution.integer_io import checked_codes
from quant_gru.execution.layers import run_codes
from quant_gru.execution.sequence_layout import check_real
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels import _native
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.live_weights import settled


class Stream(_native.Stream):
    """A quantized GRU that reads one step at a time.

    `QuantGRU.stream` and `FrozenQuantGRU.stream` create it. It uses the plan at its creation; later
    changes of the module do not affect it. Reading a sequence step by step gives the codes of the
    whole sequence, bit for bit.

    A stream has one state, so it belongs to the thread of its first step. Calls from other threads
    are errors until `reset`, or an assignment to `state`, gives the stream to the next caller.

    Args:
        plan: The plan of a GRU of one direction.
        batch_size: Rows of each step, N.
        config: Widths of the operators, for `repr`.

    Attributes:
        any_thread: True to let any thread run the next step, as in a thread pool. The caller then
            makes sure that steps come one after the other.

    Example:
        >>> stream = gru.stream(batch_size=4)
        >>> steps = [stream(x[:, t]) for t in range(x.shape[1])]
        >>> torch.equal(torch.stack(steps, 1), gru(x)[0])
        True
    """

    def __init__(self, plan: GRUPlan, batch_size: int, config: QuantConfig) -> None:
        super().__init__()
        if len(plan.cells[0]) != 1:
            raise QuantGRUError(
                "Expected a GRU of one direction to stream, got a bidirectional one: its reverse "
                "direction starts at the end of the sequence"
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise QuantGRUError(f"Expected batch_size to be at least 1, got {batch_size!r}")
        self._plan = plan = settled(plan)
        self._cells = [layer[0] for layer in plan.cells]
        self._device = self._cells[0].weights.W.device
        self._N = batch_size
        self._widths = described(config)
        self._H = self._cells[0].hidden_size
        self._shape = torch.Size((batch_size, self._cells[0].input_size))
        self._finite = all(bool(cell.weights.finite) for cell in self._cells)
        # inference tensors could not be reset outside of inference mode
        with torch.inference_mode(False):
            self._codes = [
                torch.empty((batch_size, self._H), dtype=cell.h.container, device=self._device)
                for cell in self._cells
            ]
        self.any_thread = False
        self._connect()
        self.reset()

    def _connect(self) -> None:
        """Pass the states to native code, if it can run the plan."""
        stack = cpu.stack_of(self._plan) if self._device.type == "cpu" else None
        self._is_native = stack is not None
        if stack is not None:
            self._attach(stack.calls, self._N, [codes.data_ptr() for codes in self._codes])

    def __repr__(self) -> str:
        N, C = self._shape
        sizes = f"{C}, {self._H}, num_layers={len(self._cells)}, batch_size={N}"
        return f"Stream({sizes}, {self._widths})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__.update(state)
        self._connect()

    def reset(self) -> None:
        """Restore the zero state for all rows; any thread may run the next step."""
        self._thread: int | None = None
        self._disown()
        for codes, cell in zip(self._codes, self._cells, strict=True):
            codes.fill_(cell.h.zero_point)
        self._nan: Tensor | None = None
        if not self._finite:
            self._nan = torch.ones(self._N, dtype=torch.bool, device=self._device)

    @property
    def state(self) -> Tensor:
        """Codes of output.h of all layers (layers, N, H); assign them to continue from a state.

        The dtype is the container of the first layer. A real state, as `forward` takes and returns
        it, may be assigned as well; it is rounded as `forward` rounds its `hx`, and rows with NaN
        stay NaN. Assigning codes clears the NaN flags.
        """
        return torch.stack([codes.to(self._codes[0].dtype) for codes in self._codes])

    @state.setter
    def state(self, state: Tensor) -> None:
        expected = (len(self._cells), self._N, self._H)
        if tuple(getattr(state, "shape", expected)) != expected:
            raise QuantGRUError(f"Expected a state of shape {expected}, got {tuple(state.shape)}")
        missing = None
        if isinstance(state, Tensor) and state.is_floating_point():
            check_real("state", state)
            real = state.detach().to(self._device, torch.float32)
            found = torch.stack(
                [cell.h.quantize(h) for cell, h in zip(self._cells, real, strict=True)]
            )
            missing = real.isnan().any(-1).any(0)
        else:
            quantizers = [cell.h for cell in self._cells]
            found = checked_codes("state", "output.h", state, quantizers)
        self.reset()
        for own, part in zip(self._codes, found, strict=True):
            own.copy_(part)
        if missing is not None and bool(missing.any()):
            self._nan = missing if self._nan is None else self._nan | missing

    if TYPE_CHECKING:
        # Native code makes a call. It runs a plain step itself.
        def __call__(self, x: Tensor) -> Tensor:
            """Run one step.

            Args:
                x: Real input (N, C), on the device of the plan.

            Returns:
                Output of the top layer (N, H), float32. Rows that received NaN stay NaN until
                `reset`.

            Raises:
                QuantGRUError: `x` does not fit, or another thread uses this stream.
            """
            return super().__call__(x)

    def _general_call(self, x: Tensor) -> Tensor:
        """Run a step that native code leaves to its caller."""
        if self._thread != get_ident():
            self._claim()
        found = self._run_step(x)
        if found is None:
            return self._general_step(x)
        y, nan = found
        if nan:
            return self._complete(x, y)
        return y if self._nan is None else y.masked_fill(self._nan[:, None], torch.nan)

    def _complete(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of a step whose input has a NaN.

        Args:
            x: The input.
            y: The output with 0 in place of NaN.
        """
        self._see_nan(x)
        assert self._nan is not None
        return y.masked_fill(self._nan[:, None], torch.nan)

    def _claim(self) -> None:
        """Give the stream to this thread, unless it belongs to another one."""
        if self._thread is not None and not self.any_thread:
            raise QuantGRUError(
                "Expected one thread to use a stream, got a second one, which would mix two states:"
                " call stream() once for each thread, reset() to hand the stream over, or set "
                "any_thread = True if steps come one after the other from several threads"
            )
        self._thread = get_ident()
        if self._nan is None:
            self._own()

    def _general_step(self, x: Tensor) -> Tensor:
        """Run a step for any input: raise for invalid input, convert valid input to float32."""
        if isinstance(x, Tensor) and x.is_floating_point():
            check_real("x", x)
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape != self._shape:
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise QuantGRUError(
                f"Expected floating-point x of shape {tuple(self._shape)}, got {got}"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise QuantGRUError("Expected x without requires_grad: a stream has no gradients")
        if x.device != self._device:
            raise QuantGRUError(f"Expected x on {self._device}, got {x.device}")
        x = x.detach()
        if self._is_native:
            plain = torch.empty(self._shape, dtype=torch.float32, device="cpu")
            plain.copy_(x)  # returns a tensor of x's class
            return self._general_call(plain)
        self._see_nan(x)
        codes = self._cells[0].border.quantize(x)
        for own, run in zip(
            self._codes, list(run_codes(self._plan, [codes[None]], self._codes)), strict=True
        ):
            own.copy_(run.last)
        y = self._cells[-1].h.dequantize(self._codes[-1])
        return y if self._nan is None else y.masked_fill(self._nan[:, None], torch.nan)

    def _see_nan(self, x: Tensor) -> None:
        rows = x.isnan().any(-1)
        if self._device.type != "cpu" or bool(rows.any()):
            self._nan = rows if self._nan is None else self._nan | rows
            self._disown()  # native code knows nothing of these rows
