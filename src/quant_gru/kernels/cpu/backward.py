"""The backward of the integer GRU in native code: straight-through gradients in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.backward import Gradients, Tape, Wanted, straight_through
from quant_gru.kernel_runtime.allocators import empty
from quant_gru.kernels.cpu import executor
from quant_gru.kernels.cpu.plan_packing import pack_weights

CHUNK_ITEMS = 512
"""Rows times steps per chunk: few, so that the buffers of a chunk stay in a cache."""


def backward(
    tape: Tape,
    grad_out: Tensor,
    grad_last: Tensor,
    wanted: Wanted,
    variant: str,
    threads: int | None = None,
    chunk_items: int = CHUNK_ITEMS,
) -> Gradients:
    """Backpropagate through time, like `straight_through`, in float32.

    For each chunk, the kernels of the forward rebuild gates and clamps from the codes. The result
    has the same bits for any number of threads and any chunk size.

    Args:
        tape: Inputs and outputs of the forward, on the CPU.
        grad_out: Gradient of the dequantized outputs (T, N, H).
        grad_last: Gradient of the dequantized last state (N, H).
        wanted: Which gradients to compute.
        variant: One of `executor.choices()`.
        threads: Maximum number of threads; None for torch.get_num_threads().
        chunk_items: Approximate number of rows times steps per chunk. It is reduced if a chunk
            would need more than 32 MiB.

    Raises:
        QuantGRUError: A tensor has the wrong shape.
    """
    plan, (T, N, _) = tape.plan, tape.x.shape
    _check_shapes(tape, grad_out, grad_last)
    if variant == executor.REFERENCE:
        return _in_float32(straight_through(tape, grad_out, grad_last, wanted))
    layer = executor.layer_of(plan, variant)
    if not T or not N:
        return _empty(tape, grad_last, wanted)
    found = _results(tape, wanted)
    tensors = _inputs(tape, grad_out, grad_last)
    tensors |= {f"d{name}": getattr(found, name) for name in _GRADIENTS}
    grads = tensors["grad_out"]
    assert grads is not None
    keep: list[Tensor] = []
    layer.backward(
        {
            **pack_weights(plan, keep),
            **{name: 0 if v is None else v.data_ptr() for name, v in tensors.items()},
            "reverse": tape.reverse,
            "T": T,
            "N": N,
            "grad_step": grads.stride(0),
            "grad_row": grads.stride(1),
            "chunk_items": chunk_items,
            "threads": torch.get_num_threads() if threads is None else threads,
        }
    )
    del keep
    return found


_GRADIENTS = ("x", "h0", "h", "W", "R", "bw", "br")


def _inputs(tape: Tape, grad_out: Tensor, grad_last: Tensor) -> dict[str, Tensor | None]:
    """Return the tensors that native code reads; only `grad_out` may be strided (steps, rows)."""
    plan = tape.plan
    grad_out = _plain(grad_out.detach(), torch.float32, contiguous=False)
    if grad_out.stride(2) != 1 and plan.hidden_size > 1:
        grad_out = grad_out.contiguous()
    assert tape.h0 is not None
    return {
        "x": _plain(tape.x, plan.x.container),
        "h0": _plain(tape.h0, plan.h.container),
        "out": _plain(tape.out, plan.h.container),
        "held": None if tape.held is None else _plain(tape.held, torch.bool),
        "lengths": None if tape.lengths is None else _plain(tape.lengths, torch.int64),
        "grad_out": grad_out,
        "grad_last": _plain(grad_last.detach(), torch.float32),
    }


def _plain(t: Tensor, dtype: torch.dtype, contiguous: bool = True) -> Tensor:
    """Return `t` on the CPU in `dtype`. The checks cost less than an unneeded conversion."""
    if t.dtype is not dtype or not t.is_cpu or t.is_neg():
        t = t.to("cpu", dtype).resolve_neg()
    return t if not contiguous or t.is_contiguous() else t.contiguous()


def _results(tape: Tape, wanted: Wanted) -> Gradients:
    """Return uninitialized tensors for the wanted gradients."""
    (T, N, C), H = tape.x.shape, tape.plan.hidden_size

    def result(wanted: bool, *shape: int) -> Tensor | None:
        return empty(shape) if wanted else None

    return Gradients(
        result(wanted.x, T, N, C),
        empty((N, H)),
        result(wanted.W, 3 * H, C),
        result(wanted.R, 3 * H, H),
        result(wanted.bw, 3 * H),
        result(wanted.br, 3 * H),
        result(wanted.h, T, N, H),
    )


def _check_shapes(tape: Tape, grad_out: Tensor, grad_last: Tensor) -> None:
    """Raise an error if a tensor whose address native code will read has the wrong shape."""
    (T, N, _), plan = tape.x.shape, tape.plan
    H = plan.hidden_size
    shapes = [
        ("x", tape.x, (T, N, plan.input_size)),
        ("h0", tape.h0, (N, H)),
        ("out", tape.out, (T, N, H)),
        ("grad_out", grad_out, (T, N, H)),
        ("grad_last", grad_last, (N, H)),
        ("lengths", tape.lengths, (N,)),
        ("held", tape.held, (T, N, H)),
    ]
    for name, tensor, shape in shapes:
        if tensor is not None and tensor.shape != shape:
            raise QuantGRUError(
                f"Expected {name} to be of shape {shape}, got {tuple(tensor.shape)}"
            )


def _in_float32(g: Gradients) -> Gradients:
    def single(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.to(torch.float32)

    W, R, bw, br = (single(each) for each in (g.W, g.R, g.bw, g.br))
    return Gradients(single(g.x), g.h0.to(torch.float32), W, R, bw, br, single(g.h))


def _empty(tape: Tape, grad_last: Tensor, wanted: Wanted) -> Gradients:
    """Return the gradients of a call without steps or rows, in which those of weights are zero."""
    (T, N, C), H = tape.x.shape, tape.plan.hidden_size

    def zeros(wanted: bool, *shape: int) -> Tensor | None:
        return torch.zeros(shape, dtype=torch.float32, device="cpu") if wanted else None

    return Gradients(
        zeros(wanted.x, T, N, C),
        grad_last.detach().to("cpu", torch.float32, copy=True),
        zeros(wanted.W, 3 * H, C),
        zeros(wanted.R, 3 * H, H),
        zeros(wanted.bw, 3 * H),
        zeros(wanted.br, 3 * H),
        zeros(wanted.h, T, N, H),
    )
