"""The backward of the integer GRU on the native kernels: straight-through gradients in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru._errors import QuantGRUError
from quant_gru.integer.backward import Gradients, Tape, Wanted, straight_through
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels.cpu import executor

CHUNK_ITEMS = 512
"""Rows times steps that are taken at once: few, so that what is known of them stays in a cache."""


def backward(
    tape: Tape,
    grad_out: Tensor,
    grad_last: Tensor,
    wanted: Wanted,
    variant: str,
    threads: int | None = None,
    chunk_items: int = CHUNK_ITEMS,
) -> Gradients:
    """Backpropagate through time; as `straight_through`, in float32.

    Gates and clamps are rebuilt from the codes, chunk after chunk, by the kernels of the forward.
    The result has the same bits for any number of threads and any size of chunks. Operators of
    more than 16 bits take the way of `straight_through`.

    Args:
        tape: What the forward took in and gave, on the CPU.
        grad_out: Gradient of the dequantized outputs (T, N, H).
        grad_last: Gradient of the dequantized last state (N, H).
        wanted: Which gradients to compute.
        variant: One of `executor.choices()`.
        threads: At most this many; None for torch.get_num_threads().
        chunk_items: About how many rows times steps are taken at once; fewer where they would need
            more than 32 MiB.
    """
    plan, (T, N, C), H = tape.plan, tape.x.shape, tape.plan.hidden_size
    _check_shapes(tape, grad_out, grad_last)
    if variant == executor.REFERENCE or not executor.is_narrow(plan):
        return _in_float32(straight_through(tape, grad_out, grad_last, wanted))
    if not T or not N:
        return _empty(tape, grad_last, wanted)
    found = Gradients(
        _result(wanted.x, T, N, C),
        torch.empty((N, H), dtype=torch.float32, device="cpu"),
        _result(wanted.W, 3 * H, C),
        _result(wanted.R, 3 * H, H),
        _result(wanted.bw, 3 * H),
        _result(wanted.br, 3 * H),
        _result(wanted.h, T, N, H),
    )
    grad_out = grad_out.detach().to("cpu", torch.float32).resolve_neg()
    if grad_out.stride(2) != 1 and H > 1:
        grad_out = grad_out.contiguous()
    grad_last = grad_last.detach().to("cpu", torch.float32).resolve_neg().contiguous()
    # addresses are taken of what lives until the call returns
    tensors = {
        **_inputs(tape),
        "grad_out": grad_out,
        "grad_last": grad_last,
        "dx": found.x,
        "dh0": found.h0,
        "dh": found.h,
        "dW": found.W,
        "dR": found.R,
        "dbw": found.bw,
        "dbr": found.br,
    }
    executor._layer_of(plan, variant).backward(
        {
            **{name: 0 if v is None else v.data_ptr() for name, v in tensors.items()},
            **_numbers(plan),
            "T": T,
            "N": N,
            "reverse": tape.reverse,
            "grad_step": grad_out.stride(0),
            "grad_row": grad_out.stride(1),
            "chunk_items": chunk_items,
            "threads": torch.get_num_threads() if threads is None else threads,
        }
    )
    return found


def _result(wanted: bool, *shape: int) -> Tensor | None:
    return torch.empty(shape, dtype=torch.float32, device="cpu") if wanted else None


def _inputs(tape: Tape) -> dict[str, Tensor | None]:
    """What the forward took in and gave, and codes and scales of weights, contiguous."""
    plan = tape.plan
    w = plan.weights
    assert tape.h0 is not None
    return {
        "x": tape.x.to("cpu", plan.x.container).contiguous(),
        "h0": tape.h0.to("cpu", plan.h.container).contiguous(),
        "out": tape.out.to("cpu", plan.h.container).contiguous(),
        "held": None if tape.held is None else tape.held.to("cpu", torch.bool).contiguous(),
        "lengths": (
            None if tape.lengths is None else tape.lengths.to("cpu", torch.int64).contiguous()
        ),
        "W": w.W.to("cpu").contiguous(),
        "R": w.R.to("cpu").contiguous(),
        "W_scales": w.scales["weight.W"].to("cpu", torch.float32).contiguous(),
        "R_scales": w.scales["weight.R"].to("cpu", torch.float32).contiguous(),
    }


def _numbers(plan: CellPlan) -> dict[str, float]:
    """Bytes of codes of weights, and scales of activations."""
    q = plan.frozen.quantizers
    return {
        "W_bytes": plan.weights.W.element_size(),
        "R_bytes": plan.weights.R.element_size(),
        "s_x": plan.x.scale,
        "s_h": plan.h.scale,
        "s_Rh": q["matmul.Rh"].scale,
        "s_z": q["gate.z_out"].scale,
        "s_r": q["gate.r_out"].scale,
        "s_g": q["gate.g_out"].scale,
    }


def _check_shapes(tape: Tape, grad_out: Tensor, grad_last: Tensor) -> None:
    """Addresses are taken of what has the right shape alone."""
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
    """Without steps or rows, nothing reaches the weights."""
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
