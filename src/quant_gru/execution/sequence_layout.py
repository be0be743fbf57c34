"""The shapes nn.GRU takes, brought to one: (T, N, C) with lengths, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from kernel_runtime.cuda.graph_capture import capturing
from quant_gru._errors import QuantGRUError
from quant_gru.kernels import _native


@dataclass(frozen=True)
class Sequence:
    """An input in the form that executors take.

    Attributes:
        x: (T, N, C).
        hx: (layers * directions, N, H), or None where none was given.
        zeros: The shape of hx.
        lengths: int64 (N,) on x's device, or None where all rows have T steps.
        packed: The PackedSequence this came from, if any; rows are in its sorted order.
        places: Where rows of its data stand in x, of T * N, int64 on x's device.
        batched: Whether the caller gave a batch dimension.
        batch_first: Whether the caller's batch dimension comes first.
    """

    x: Tensor
    hx: Tensor | None
    zeros: tuple[int, int, int]
    lengths: Tensor | None
    packed: PackedSequence | None
    places: Tensor | None
    batched: bool
    batch_first: bool

    @property
    def h0(self) -> Tensor:
        """States before the first step (layers * directions, N, H); zeros where none were given."""
        if self.hx is not None:
            return self.hx
        return torch.zeros(self.zeros, dtype=self.x.dtype, device=self.x.device)

    def restore(
        self, y: Tensor, h_n: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Output (T, N, D*H) and last states (layers * directions, N, H) in the caller's form.

        Both are of the dtype then.
        """
        if y.dtype is not dtype:
            y, h_n = y.to(dtype), h_n.to(dtype)
        if self.packed is not None and self.places is not None:
            _, batch_sizes, sorted_indices, unsorted = self.packed
            data = y.flatten(0, 1).index_select(0, self.places)
            output = PackedSequence(data, batch_sizes, sorted_indices, unsorted)
            return output, h_n if unsorted is None else h_n.index_select(1, unsorted)
        if not self.batched:
            return y.squeeze(1), h_n.squeeze(1)
        return y.transpose(0, 1) if self.batch_first else y, h_n


def to_device(value: Tensor | PackedSequence, device: torch.device) -> Tensor | PackedSequence:
    """`value` on `device`."""
    return value.to(device=device)  # type: ignore[call-arg]


def _places_of(batch_sizes: Tensor, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where rows of a PackedSequence's data stand among T * N, and the length of each of N rows.

    Both are int64 on the device, which is not waited for.

    Args:
        batch_sizes: Of the PackedSequence, int64 (T,), contiguous on the CPU.
        rows: How many rows its data has.
        device: Where its data is.
    """
    T, address = batch_sizes.shape[0], batch_sizes.data_ptr()
    wanted, wrong = _native.rows_of(address, T)
    if wrong >= 0:
        after = f" after {int(batch_sizes[wrong - 1])}" if wrong else ""
        raise QuantGRUError(
            "Expected batch_sizes of a PackedSequence not to be negative and not to grow, "
            f"got {int(batch_sizes[wrong])} at step {wrong}{after}"
        )
    if wanted > rows:
        raise QuantGRUError(
            f"Expected a PackedSequence to have the {wanted} rows of its batch_sizes, got {rows}"
        )
    N = int(batch_sizes[0])
    # whatever PyTorch's default device is
    both = torch.empty(
        wanted + N, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
    )
    _native.place_rows(address, T, N, wanted, both.data_ptr())
    both = both.to(device, non_blocking=True)
    return both[:wanted], both[wanted:]


def _padded(packed: PackedSequence, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """All steps of all rows (T, N, C), zeros beyond their lengths, and what `_places_of` gives."""
    data, batch_sizes = packed.data, packed.batch_sizes
    if capturing(data.device):
        raise QuantGRUError(
            "Expected a tensor while a CUDA graph is captured, got a PackedSequence: its "
            "batch_sizes are read on the host, which a replay does not do"
        )
    # torch reads beyond the data where these are wrong
    if batch_sizes.dim() != 1 or batch_sizes.dtype is not torch.int64 or not len(batch_sizes):
        raise QuantGRUError(
            "Expected batch_sizes of a PackedSequence to be int64 of shape (T,) with at least one "
            f"step, got {batch_sizes.dtype} of shape {tuple(batch_sizes.shape)}"
        )
    places, lengths = _places_of(batch_sizes.cpu().contiguous(), data.shape[0], data.device)
    T, N, rows = batch_sizes.shape[0], lengths.shape[0], places.shape[0]
    data = data if data.dtype is dtype else data.to(dtype)
    # all rows in one piece: steps one after the other would be a copy each
    x = data.new_zeros(T * N, data.shape[1])
    x.index_copy_(0, places, data if rows == data.shape[0] else data[:rows])
    return x.view(T, N, data.shape[1]), places, lengths


def normalize(
    input: Tensor | PackedSequence,
    hx: Tensor | None,
    *,
    input_size: int,
    hidden_size: int,
    states: int,
    batch_first: bool,
    like: Tensor,
    dtype: torch.dtype | None = None,
) -> Sequence:
    """Bring an input of nn.GRU's kinds to (T, N, C).

    Args:
        input: (T, N, C), (N, T, C) if `batch_first`, (T, C), or a PackedSequence.
        hx: (states, N, H), or (states, H) for unbatched input; None for zeros.
        input_size: C.
        hidden_size: H.
        states: Layers times directions.
        batch_first: Whether N comes before T in batched tensors.
        like: A tensor of the module: inputs have to be on its device.
        dtype: What input and states are cast to; None for what they are.

    Raises:
        QuantGRUError: A shape or dtype that does not fit.
    """
    packed = input if isinstance(input, PackedSequence) else None
    _check_real("input", input if packed is None else packed.data)
    if hx is not None:
        _check_real("hx", hx)
    device = (input.data if isinstance(input, PackedSequence) else input).device
    if device != like.device:
        raise QuantGRUError(f"Expected input to be on the GRU's device {like.device}, got {device}")
    lengths = places = None
    batched = True
    if isinstance(input, PackedSequence):
        _check_features(input.data, 2, input_size)
        x, places, lengths = _padded(input, dtype or input.data.dtype)
    else:
        if input.dim() not in (2, 3):
            raise QuantGRUError(
                f"Expected input to be 2-D (unbatched) or 3-D, got shape {tuple(input.shape)}"
            )
        _check_features(input, input.dim(), input_size)
        batched = input.dim() == 3
        x = input if dtype is None or input.dtype is dtype else input.to(dtype)
        x = x if batched else x.unsqueeze(1)
        x = x.transpose(0, 1) if batched and batch_first else x
        if x.shape[0] == 0:
            raise QuantGRUError(
                f"Expected input to have at least one time step, got shape {tuple(input.shape)}"
            )
    N = x.shape[1]
    expected = (states, N, hidden_size) if batched else (states, hidden_size)
    h0 = None
    if hx is not None:
        if tuple(hx.shape) != expected:
            raise QuantGRUError(f"Expected hx to be of shape {expected}, got {tuple(hx.shape)}")
        if hx.device != x.device:
            raise QuantGRUError(
                f"Expected hx to be on the input's device {x.device}, got {hx.device}"
            )
        h0 = hx if dtype is None or hx.dtype is dtype else hx.to(dtype)
        h0 = h0 if batched else h0.unsqueeze(1)
        if packed is not None and packed.sorted_indices is not None:
            h0 = h0.index_select(1, packed.sorted_indices)
    zeros = (states, N, hidden_size)
    return Sequence(x, h0, zeros, lengths, packed, places, batched, batch_first)


def _check_real(thing: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise QuantGRUError(f"Expected {thing} to be a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise QuantGRUError(f"Expected {thing} to be floating point, got {value.dtype}")
    if value.layout is not torch.strided:
        raise QuantGRUError(f"Expected {thing} to be a dense tensor, got {value.layout}")


def _check_features(x: Tensor, dims: int, input_size: int) -> None:
    if x.dim() != dims or x.shape[-1] != input_size:
        raise QuantGRUError(
            f"Expected input to have {input_size} features in its last dimension, "
            f"got shape {tuple(x.shape)}"
        )
