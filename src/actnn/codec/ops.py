"""The codec as PyTorch operators, for compilers: `actnn::encode` and `actnn::decode`.

Partitioners of forward and backward recompute only operators that they know, so they keep the codes
and never recompute them. The tag of `encode` has the same effect where they recompute others, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actnn.codec import executors
from actnn.codec.codes import UNBOUNDED, Bounds, data_bytes

_LIBRARY = torch.library.Library("actnn", "DEF")
_LIBRARY.define(
    "encode(Tensor x, int bits, int group, Tensor state, int tensor, bool stochastic,"
    " float[2]? bounds=None) -> (Tensor data, Tensor params)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_LIBRARY.define(
    "decode(Tensor data, Tensor params, int bits, int group, int n, ScalarType dtype,"
    " float[2]? bounds=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _encode(
    x: Tensor,
    bits: int,
    group: int,
    state: Tensor,
    tensor: int,
    stochastic: bool,
    bounds: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode a dense tensor, see `codes.dense`. Return data, and parameters (groups, 2)."""
    return executors.encode_flat(x, bits, state, tensor, group, stochastic, bounds_of(bounds))


def _decode(
    data: Tensor,
    params: Tensor,
    bits: int,
    group: int,
    n: int,
    dtype: torch.dtype,
    bounds: Sequence[float] | None = None,
) -> Tensor:
    """Decode elements (n,) in the order of memory."""
    return executors.decode_flat(data, params, bits, group, n, dtype, bounds_of(bounds))


def bounds_of(given: Sequence[float] | None) -> Bounds:
    """Return the bounds in an argument of an operator."""
    return UNBOUNDED if given is None else (given[0], given[1])


def fake_encode(x: Tensor, bits: int, group: int, *_: object) -> tuple[Tensor, Tensor]:
    """Return tensors like those of `encode`, without data."""
    n = x.numel()
    return (
        x.new_empty(data_bytes(n, bits), dtype=torch.uint8),
        x.new_empty((-(-n // group), 2), dtype=torch.bfloat16),
    )


def _fake_decode(
    data: Tensor, params: Tensor, bits: int, group: int, n: int, dtype: torch.dtype, *_: object
) -> Tensor:
    return data.new_empty(n, dtype=dtype)


_LIBRARY.impl("encode", _encode, "CompositeExplicitAutograd")
_LIBRARY.impl("decode", _decode, "CompositeExplicitAutograd")
torch.library.register_fake("actnn::encode", fake_encode, lib=_LIBRARY)
torch.library.register_fake("actnn::decode", _fake_decode, lib=_LIBRARY)

encode = torch.ops.actnn.encode.default
decode = torch.ops.actnn.decode.default
