"""Integer entry points: codes as inputs and outputs, and traces of every operator."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.execution.layers import CellRun, border_codes, run_codes
from quant_gru.execution.sequence_layout import Sequence, check_real
from quant_gru.integer import cell as reference
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.live_weights import settled


def integer_forward(
    plan: GRUPlan, x: Tensor, h0: Tensor | None, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """See `QuantGRU.forward_integer`."""
    first = plan.cells[0]
    if any(cell.x != first[0].x for cell in first):
        raise QuantGRUError(
            "Expected one quantizer for both directions, got two that differ (operator 'input.x')"
        )
    cells = [cell for layer in plan.cells for cell in layer]
    x = checked_codes("x_codes", "input.x", x, [first[0].x])
    if x.dim() not in (2, 3) or x.shape[-1] != first[0].input_size:
        raise QuantGRUError(
            f"Expected x_codes to be 2-D or 3-D with {first[0].input_size} features last, "
            f"got shape {tuple(x.shape)}"
        )
    batched = x.dim() == 3
    codes = x if batched else x.unsqueeze(1)
    codes = codes.transpose(0, 1) if batched and batch_first else codes
    N, H = codes.shape[1], first[0].hidden_size
    if h0 is None:
        zeros = [torch.full((N, H), cell.h.zero_point, device=x.device) for cell in cells]
        states = torch.stack(zeros)
    else:
        expected = (len(cells), N, H) if batched else (len(cells), H)
        if tuple(getattr(h0, "shape", expected)) != expected:
            raise QuantGRUError(f"Expected h_codes of shape {expected}, got {tuple(h0.shape)}")
        states = checked_codes("h_codes", "output.h", h0, [cell.h for cell in cells])
        states = states if batched else states.unsqueeze(1)
    runs = list(run_codes(plan, [codes] * len(first), states))
    top = runs[-len(plan.cells[-1]) :]
    y = torch.cat([run.out for run in top], dim=-1)
    h_n = torch.stack([run.last for run in runs])
    if not batched:
        return y.squeeze(1), h_n.squeeze(1)
    return y.transpose(0, 1) if batch_first else y, h_n


def quantize_state(plan: GRUPlan, hx: object) -> Tensor:
    """See `QuantGRU.quantize_state`; NaN is an error."""
    cells = [cell for layer in plan.cells for cell in layer]
    check_real("hx", hx)
    assert isinstance(hx, Tensor)
    if hx.dim() not in (2, 3) or (hx.shape[0], hx.shape[-1]) != (len(cells), cells[0].hidden_size):
        expected = f"({len(cells)}, N, {cells[0].hidden_size})"
        raise QuantGRUError(f"Expected hx to be of shape {expected}, got {tuple(hx.shape)}")
    device = cells[0].weights.W.device
    if hx.device != device:
        raise QuantGRUError(f"Expected hx on the GRU's device {device}, got {hx.device}")
    if bool(hx.isnan().any()):
        raise QuantGRUError(
            "Expected hx without NaN, which has no code, got some (operator 'output.h')"
        )
    container = reduce(torch.promote_types, (cell.h.container for cell in cells))
    parts = [cell.h.quantize(h) for cell, h in zip(cells, hx.detach().float(), strict=True)]
    return torch.stack([part.to(container) for part in parts])


def trace_codes(plan: GRUPlan, sequence: Sequence) -> dict[str, Tensor]:
    """See `QuantGRU.trace_codes`."""
    # the result contains codes of weights, which must not change later
    plan = settled(plan)
    inputs, states = border_codes(plan, sequence.x, sequence.h0)
    found: dict[str, Tensor] = {}
    runs = run_codes(plan, inputs, states, sequence.lengths)
    for run in runs:
        suffix = f"_l{run.layer}{'_reverse' if run.direction else ''}"
        for name, codes in cell_codes(run).items():
            found[name + suffix] = codes.cpu()
    return found


def cell_codes(run: CellRun) -> dict[str, Tensor]:
    """Return the codes of all operators of one layer and direction, each in its container."""
    plan, w = run.plan, run.plan.weights
    before = reference.states_before(run.out, run.h0, run.direction == 1)
    record = reference.trace(plan, run.x, before)
    activations = {"input.x": run.x, **record.codes, "output.h": run.out}
    found = {
        name: codes.to(plan.frozen.quantizers[name].container)
        for name, codes in activations.items()
    }
    return {
        **found,
        "output.h0": run.h0.to(plan.h.container),
        "weight.W": w.W,
        "weight.R": w.R,
        "weight.bw": w.bw,
        "weight.br": w.br,
        "accumulator.bw": w.Bw,
        "accumulator.br": w.Br,
    }


def checked_codes(thing: str, name: str, codes: object, quantizers: list[Quantizer]) -> Tensor:
    """Return `codes` in a dtype that PyTorch supports, after checking their range."""
    if not isinstance(codes, Tensor):
        raise QuantGRUError(
            f"Expected {thing} to be a tensor, got {type(codes).__name__} (operator {name!r})"
        )
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise QuantGRUError(
            f"Expected {thing} to be integers, got {codes.dtype} (operator {name!r})"
        )
    if codes.dtype in (torch.uint16, torch.uint32, torch.uint64):
        codes = codes.to(torch.int64)
    parts = [codes] if len(quantizers) == 1 else codes.unbind()
    for part, quantizer in zip(parts, quantizers, strict=True):
        if part.numel() and not quantizer.lo <= int(part.min()) <= int(part.max()) <= quantizer.hi:
            raise QuantGRUError(
                f"Expected {thing} to be in [{quantizer.lo}, {quantizer.hi}], "
                f"got {int(part.min())}..{int(part.max())} (operator {name!r})"
            )
    return codes
