"""Operations on saved tensors in the notes' names."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from actnn import codec
from actnn.actnn_interface.config import config
from actnn.actnn_interface.schemes import QScheme
from actnn.errors import ActNNError

__all__ = ["dequantize_activation", "quantize_activation", "quantize_and_pack"]

# (codes, bits, scale of each group, minimum of each group)
Quantized = tuple[codec.Codes, int | Tensor, Tensor, Tensor]

_state: dict[torch.device, Tensor] = {}
_tensors = count()


def _key(device: torch.device) -> codec.Key:
    if device not in _state:
        _state[device] = codec.noise_state(torch.initial_seed() % 2**63, device=device)
    return codec.Key(_state[device], next(_tensors) % 2**32)


def quantize_and_pack(
    data: Tensor, bits: int | Tensor, mn: Tensor | None = None, mx: Tensor | None = None
) -> tuple[codec.Codes, Tensor]:
    """Quantize a tensor and pack its codes, in one pass that finds the ranges itself.

    Args:
        data: (N, ...); elements are grouped in the order of memory.
        bits: 1 to 8, or those of each sample, int (N,).
        mn: Minima, which the codec finds itself; accepted and not read.
        mx: Maxima, likewise.

    Returns:
        The codes, and the scale of each group: the size of a step, (groups,).
    """
    codes = codec.encode(
        data, bits, _key(data.device), group=config.group_size, stochastic=config.stochastic
    )
    return codes, codes.params[:, 1]


def quantize_activation(input: Tensor, scheme: QScheme | None) -> Quantized:
    """Compress what a layer keeps for its backward.

    Args:
        input: (N, ...).
        scheme: Chooses the bits of each sample; None takes the first entry of
            `config.activation_compression_bits`, which must be an integer, for all.

    Returns:
        (codes, bits, scale, minimum). The maximum is minimum + (2^bits - 1) scale, so that it
        need not be kept. Without compression bits are 32, and the codes hold nothing.
    """
    if not config.compress_activation:
        raise ActNNError(
            "Expected config.compress_activation to be True for quantize_activation, got False; "
            "keep the tensor itself"
        )
    if scheme is not None and config.adaptive_scheme:
        bits: int | Tensor = scheme.compute_quantization_bits(input)
    else:
        average = config.activation_compression_bits[0]
        if average != int(average):
            raise ActNNError(
                f"Expected activation_compression_bits to be integers without a scheme, got "
                f"{average}"
            )
        bits = int(average)
    codes, scale = quantize_and_pack(input, bits)
    if config.swap and input.is_cuda:
        codes.data = codes.data.to("cpu", non_blocking=False).pin_memory()
    return codes, bits, scale, codes.params[:, 0]


def dequantize_activation(quantized: Quantized, q_input_shape: torch.Size) -> Tensor:
    """Return the tensor that `quantize_activation` compressed.

    Args:
        quantized: What it returned.
        q_input_shape: Shape of the tensor.

    Raises:
        ActNNError: If the shape is that of another tensor.
    """
    codes, _, scale, _ = quantized
    if torch.Size(q_input_shape) != codes.shape:
        raise ActNNError(
            f"Expected the shape to be {tuple(codes.shape)}, got {tuple(q_input_shape)}"
        )
    if codes.data.device != scale.device:
        codes.data = codes.data.to(scale.device, non_blocking=True)
    return codec.decode(codes)


def __dir__() -> list[str]:
    return sorted(__all__)
