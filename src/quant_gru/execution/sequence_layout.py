"""Conversion of nn.GRU's input shapes to (T, N, C) or rows of a PackedSequence, and back."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.errors import QuantGRUError
from quant_gru.integer.call_form import Packing, inward, outward
from quant_gru.kernel_runtime.cuda.graph_capture import capturing, index_of
from quant_gru.kernels import _native
from quant_gru.kernels.dispatch import executor_of
from quant_gru.parameters.schema import Shape

_MOST_KEPT = 8192  # numbers of a layout that is kept: 64 KiB


@dataclass(eq=False)
class Sequence:
    """An input and its layout.

    Attributes:
        values: (T, N, C), or the rows (rows, C) of a PackedSequence; of the caller's dtype.
        states: (layers * directions, N, H) of the caller's dtype, in the caller's order; None if
            not given.
        packing: How rows are packed; None for padded sequences.
        zeros: The shape of states.
        dtype: dtype of the executors; None for the caller's dtypes.
        packed: The original PackedSequence, if any.
        batched: Whether the caller's input has a batch dimension.
        batch_first: Whether the caller's batch dimension comes first.
    """

    values: Tensor
    states: Tensor | None
    packing: Packing | None
    zeros: tuple[int, int, int]
    dtype: torch.dtype | None
    packed: PackedSequence | None
    batched: bool
    batch_first: bool

    @property
    def steps(self) -> int:
        """T."""
        return self.values.shape[0] if self.packing is None else self.packing.T

    @property
    def x(self) -> Tensor:
        """The input as (T, N, C), in the executors' dtype; rows are sorted if it was packed."""
        return inward(self.values, None, self.packing, self.dtype)[0]

    @property
    def h0(self) -> Tensor:
        """States before the first step (layers * directions, N, H); zeros if none were given."""
        if self.states is not None:
            return inward(None, self.states, self.packing, self.dtype)[1]
        dtype = self.dtype or self.values.dtype
        return torch.zeros(self.zeros, dtype=dtype, device=self.values.device)

    @property
    def lengths(self) -> Tensor | None:
        """Steps of each row, int64 (N,) on the input's device; None if all rows have T."""
        return None if self.packing is None else self.packing.lengths

    def restore(
        self, y: Tensor, h_n: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Convert results to the caller's form and to `dtype`.

        Args:
            y: Output (T, N, D*H).
            h_n: Last states (layers * directions, N, H).
            dtype: dtype of both results.
        """
        y, h_n = outward(y, h_n, self.packing, self.values.shape[0])
        if y.dtype is not dtype:
            y, h_n = y.to(dtype), h_n.to(dtype)
        return self.finish(y, h_n)

    def finish(self, y: Tensor, h_n: Tensor) -> tuple[Tensor | PackedSequence, Tensor]:
        """Return output and last states in the shapes of the caller.

        Args:
            y: (T, N, D*H), or (rows, D*H) if packed.
            h_n: (layers * directions, N, H) in the caller's order.
        """
        if self.packed is not None:
            _, batch_sizes, sorted_indices, unsorted = self.packed
            return PackedSequence(y, batch_sizes, sorted_indices, unsorted), h_n
        if not self.batched:
            return y.squeeze(1), h_n.squeeze(1)
        return y.transpose(0, 1) if self.batch_first else y, h_n


def _packing_of(packed: PackedSequence) -> tuple[Packing, int]:
    """Return the layout of a PackedSequence and its number of rows, without a device sync."""
    data, batch_sizes = packed.data, packed.batch_sizes
    # torch reads out of bounds if these are wrong
    if batch_sizes.dim() != 1 or batch_sizes.dtype is not torch.int64 or not len(batch_sizes):
        raise QuantGRUError(
            "Expected batch_sizes of a PackedSequence to be int64 of shape (T,) with at least one "
            f"step, got {batch_sizes.dtype} of shape {tuple(batch_sizes.shape)}"
        )
    if not (batch_sizes.is_cpu and batch_sizes.is_contiguous()):
        batch_sizes = batch_sizes.cpu().contiguous()
    T = batch_sizes.shape[0]
    N, rows, wrong, sizes = _native.packed_rows(_address("batch_sizes", batch_sizes), T)
    if wrong >= 0:
        after = f" after {int(batch_sizes[wrong - 1])}" if wrong else ""
        raise QuantGRUError(
            "Expected batch_sizes of a PackedSequence not to be negative and not to grow, "
            f"got {int(batch_sizes[wrong])} at step {wrong}{after}"
        )
    if rows > data.shape[0]:
        raise QuantGRUError(
            f"Expected a PackedSequence to have the {rows} rows of its batch_sizes, "
            f"got {data.shape[0]}"
        )
    device = data.device
    layout = _layout(device, sizes, N)
    sorted_indices = _checked_order("sorted_indices", packed.sorted_indices, N, device)
    unsorted = _checked_order("unsorted_indices", packed.unsorted_indices, N, device)
    return Packing(T, N, layout, sorted_indices, unsorted), rows


@cache
def packing_on(device: torch.device) -> _native.PackingOf:
    """Return a function that finds the packing of a PackedSequence on a device in native code.

    It returns None for what `normalize` must check or change. The caller ensures that no function
    transform is active.
    """
    return _native.PackingOf(Tensor, index_of(device), partial(_layout, device), Packing)


def _layout(device: torch.device, sizes: bytes, N: int) -> Tensor:
    """Return the layout of a `Packing`, without a device sync.

    Args:
        device: The device of the layout.
        sizes: The batch sizes.
        N: The first of them.
    """
    if capturing(device):
        raise QuantGRUError(
            "Expected a tensor while a CUDA graph is captured, got a PackedSequence: its "
            "batch_sizes are read on the host, which a replay does not do"
        )
    if torch.compiler.is_compiling():
        return _made_layout(device, sizes, N)
    # on another stream the copy may not have happened yet
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    is_kept = N + len(sizes) // 8 < _MOST_KEPT
    return (_kept_layout if is_kept else _plain_layout)(device, stream, sizes, N)


def _plain_layout(device: torch.device, stream: int, sizes: bytes, N: int) -> Tensor:
    """Make a layout that is a plain tensor, whatever records or transforms this call."""
    # not torch.inference_mode, which takes longer than the rest
    with torch._C._InferenceMode(False), torch._C._DisableFuncTorch():
        return _made_layout(device, sizes, N)


# GRUs that read the same sequence share it. Few are kept: where every batch has sizes of its own,
# their addresses repeat then, and graphs of launches can be replayed.
_kept_layout = lru_cache(maxsize=2)(_plain_layout)


def _made_layout(device: torch.device, sizes: bytes, N: int) -> Tensor:
    numbers = (ctypes.c_int64 * (N + len(sizes) // 8 + 1))()
    _native.packed_layout(sizes, N, ctypes.addressof(numbers))
    return executor_of(device).uploaded(numbers, device)


def _address(name: str, values: Tensor) -> int:
    """Return the address of values of a PackedSequence that are read on the host."""
    with suppress(RuntimeError):
        if found := values.data_ptr():
            return found
    raise QuantGRUError(
        f"Expected {name} of a PackedSequence to be numbers, which are read on the host, got "
        "values that torch.func or a tracer stands in for"
    )


def _checked_order(name: str, order: Tensor | None, N: int, device: torch.device) -> Tensor | None:
    if order is None:
        return None
    if order.dtype is not torch.int64 or order.shape != (N,) or order.device != device:
        raise QuantGRUError(
            f"Expected {name} of a PackedSequence to be int64 of shape ({N},) on {device}, got "
            f"{order.dtype} of shape {tuple(order.shape)} on {order.device}"
        )
    order = order if order.is_contiguous() else order.contiguous()
    wrong = _native.wrong_index(_address(name, order), N) if N and device.type == "cpu" else -1
    if wrong >= 0:
        raise QuantGRUError(
            f"Expected {name} of a PackedSequence to be in 0..{N - 1}, got {int(order[wrong])} "
            f"at row {wrong}"
        )
    return order


def normalize(
    input: Tensor | PackedSequence,
    hx: Tensor | None,
    shape: Shape,
    batch_first: bool,
    like: Tensor,
    dtype: torch.dtype | None = None,
) -> Sequence:
    """Check an input of nn.GRU and bring it to one layout.

    Args:
        input: (T, N, C), (N, T, C) if `batch_first`, (T, C), or a PackedSequence.
        hx: (layers * directions, N, H), or (layers * directions, H) for unbatched input; None for
            zeros.
        shape: The sizes of the GRU.
        batch_first: Whether N comes before T in batched tensors.
        like: A tensor of the module; inputs must be on its device.
        dtype: dtype of the executors; None for the caller's dtypes.

    Raises:
        QuantGRUError: A shape, dtype or device is not supported.
    """
    input_size, hidden_size = shape.input_size, shape.hidden_size
    states = shape.num_layers * shape.directions
    packed = input if isinstance(input, PackedSequence) else None
    check_real("input", input if packed is None else packed.data)
    if hx is not None:
        check_real("hx", hx)
    device = (input.data if isinstance(input, PackedSequence) else input).device
    if device != like.device:
        raise QuantGRUError(f"Expected input to be on the GRU's device {like.device}, got {device}")
    packing, batched = None, True
    if isinstance(input, PackedSequence):
        _check_features(input.data, 2, input_size)
        packing, rows = _packing_of(input)
        values = input.data if rows == len(input.data) else input.data[:rows]
        N = packing.N
    else:
        if input.dim() not in (2, 3):
            raise QuantGRUError(
                f"Expected input to be 2-D (unbatched) or 3-D, got shape {tuple(input.shape)}"
            )
        _check_features(input, input.dim(), input_size)
        batched = input.dim() == 3
        values = input if batched else input.unsqueeze(1)
        values = values.transpose(0, 1) if batched and batch_first else values
        if values.shape[0] == 0:
            raise QuantGRUError(
                f"Expected input to have at least one time step, got shape {tuple(input.shape)}"
            )
        N = values.shape[1]
    if hx is not None:
        expected = (states, N, hidden_size) if batched else (states, hidden_size)
        if tuple(hx.shape) != expected:
            hint = ""
            if batched and packing is None:
                order = "(N, T, C)" if batch_first else "(T, N, C)"
                hint = f" (batch_first={batch_first}: inputs are {order})"
            raise QuantGRUError(
                f"Expected hx to be of shape {expected}, got {tuple(hx.shape)}{hint}"
            )
        if hx.device != device:
            raise QuantGRUError(
                f"Expected hx to be on the input's device {device}, got {hx.device}"
            )
        hx = hx if batched else hx.unsqueeze(1)
    zeros = (states, N, hidden_size)
    return Sequence(values, hx, packing, zeros, dtype, packed, batched, batch_first)


def check_real(thing: str, value: object) -> None:
    """Check that a value is a dense tensor of real numbers.

    Args:
        thing: The name of the value, for the message.
        value: What the caller gave.

    Raises:
        QuantGRUError: It is something else.
    """
    if not isinstance(value, Tensor):
        got = type(value).__name__
        hint = f"; pass torch.from_numpy({thing})" if got == "ndarray" else ""
        raise QuantGRUError(f"Expected {thing} to be a tensor, got {got}{hint}")
    if not value.is_floating_point():
        raise QuantGRUError(f"Expected {thing} to be floating point, got {value.dtype}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else value.layout
        raise QuantGRUError(f"Expected {thing} to be a dense tensor, got {kind}")


def _check_features(x: Tensor, dims: int, input_size: int) -> None:
    if x.dim() != dims or x.shape[-1] != input_size:
        raise QuantGRUError(
            f"Expected input to have {input_size} features in its last dimension, "
            f"got shape {tuple(x.shape)}"
        )
