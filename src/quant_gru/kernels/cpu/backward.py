"""The backward of the integer GRU in native code: straight-through gradients in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.integer.backward import Gradients, Tape, Wanted, straight_through
from quant_gru.kernel_runtime.allocators import empty
from quant_gru.kernels.cpu import executor
from quant_gru.kernels.cpu.plan_packing import pack_weights
from quant_gru.kernels.shapes import check_backward

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
    check_backward(tape, grad_out, grad_last)
    if variant == executor.REFERENCE or not T or not N:
        return straight_through(tape, grad_out, grad_last, wanted).in_float32()
    layer = executor.layer_of(plan, variant)
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
