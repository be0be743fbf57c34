"""Training options of a QuantGRU: their rules, their noise, the parameters of learned scales."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from numbers import Real

import torch
from torch import Tensor

from quant_gru.autograd.learned_scales import COUNT, logarithms
from quant_gru.autograd.state_compression import CHOICES as STASH_BITS
from quant_gru.errors import ConfigError, QuantGRUError
from quant_gru.execution.noise import Noise, draw
from quant_gru.execution.sequence_layout import Sequence
from quant_gru.integer.qparams import QParams
from quant_gru.kernels.dispatch import PRECISIONS
from quant_gru.parameters.schema import Shape

DEFAULTS = {
    "zoneout": 0.0,
    "recurrent_dropout": 0.0,
    "precision": PRECISIONS[0],
    "learn_scales": False,
    "stash_bits": None,
}


def described_options(module: object) -> str:
    """Return the options that differ from their defaults, each as ', name=value'."""
    values = {name: getattr(module, name) for name in DEFAULTS}
    return "".join(f", {name}={v}" for name, v in values.items() if v != DEFAULTS[name])


# --- rules


def probability(name: str, p: object) -> float:
    """Return a number in [0, 1]; raise a ConfigError for anything else."""
    if isinstance(p, bool) or not isinstance(p, Real) or not 0 <= float(p) <= 1:
        raise ConfigError(f"Expected {name} to be a number in [0, 1], got {p!r}")
    return float(p)


def drop_probability(p: object) -> float:
    """Return a valid `recurrent_dropout`; raise a ConfigError for anything else."""
    p = probability("recurrent_dropout", p)
    if p == 1:
        raise ConfigError("Expected recurrent_dropout to be below 1, got 1")
    return p


def known_precision(precision: str) -> str:
    """Return a valid `precision`; raise a ConfigError for anything else."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"Expected precision to be one of {', '.join(PRECISIONS)}, got {precision!r}"
        )
    return precision


def possible_stash_bits(bits: int | None) -> int | None:
    """Return valid `stash_bits`; raise a ConfigError for anything else."""
    if bits is not None and (type(bits) is not int or bits not in STASH_BITS):
        raise ConfigError(f"Expected stash_bits to be 4, 8 or None, got {bits!r}")
    return bits


# --- noise


def noise_of(
    sequence: Sequence,
    zoneout_mask: object,
    training: bool,
    shape: Shape,
    dropout: float,
    recurrent_dropout: float,
) -> Noise | None:
    """Return the random masks of a forward in training, None otherwise.

    `zoneout_mask` is the caller's mask of updates, see `QuantGRU.forward`.
    """
    if not training:
        if zoneout_mask is not None:
            raise QuantGRUError(
                "Expected zoneout_mask to be None in eval mode, where states are "
                "interpolated, got a mask"
            )
        return None
    if zoneout_mask is not None and not isinstance(zoneout_mask, Tensor):
        raise QuantGRUError(
            f"Expected zoneout_mask to be a tensor, got {type(zoneout_mask).__name__}"
        )
    return draw(
        sequence.values.device,
        dropout=dropout if shape.num_layers > 1 else 0.0,
        zoneout=shape.zoneout,
        recurrent_dropout=recurrent_dropout,
        updates=None if zoneout_mask is None else _updates(sequence, zoneout_mask, shape),
    )


def _updates(sequence: Sequence, mask: Tensor, sizes: Shape) -> Tensor:
    """Convert a caller's zoneout mask to bool (layers * directions, T, N, H)."""
    T, N, H = sequence.steps, sequence.zeros[1], sizes.hidden_size
    cells = sizes.num_layers * sizes.directions
    shape = (T, N, H) if sequence.batched else (T, H)
    if tuple(mask.shape) not in ((cells, *shape), *([shape] if cells == 1 else [])):
        raise QuantGRUError(
            f"Expected zoneout_mask to be of shape {(cells, *shape)}, got {tuple(mask.shape)}"
        )
    if mask.device != sequence.values.device:
        raise QuantGRUError(
            f"Expected zoneout_mask to be on the input's device {sequence.values.device}, "
            f"got {mask.device}"
        )
    mask = mask.detach().reshape(cells, T, N, H) != 0
    packed = sequence.packed
    if packed is not None and packed.sorted_indices is not None:
        mask = mask.index_select(2, packed.sorted_indices)
    return mask


# --- learned scales


def scale_names(shape: Shape) -> list[str]:
    """Return parameter names of the logarithms per layer and direction, learned or not."""
    return [
        f"log2_scale_l{layer}{suffix}"
        for layer in range(shape.num_layers)
        for suffix in ("", "_reverse")[: shape.directions]
    ]


def add_logarithms(module: torch.nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Give a module the parameters of learned scales, all 0."""
    # inference-mode parameters have no version, so changes would go undetected
    with torch.inference_mode(False):
        for name in names:
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(COUNT, device=device)))


def write_logarithms(parameters: SequenceABC[Tensor], cells: SequenceABC[QParams]) -> None:
    """Copy the logarithms of the scales, if there are any, to the parameters of a module."""
    with torch.no_grad():
        for parameter, cell in zip(parameters, cells, strict=False):
            parameter.copy_(torch.tensor(logarithms(cell), device="cpu"))
