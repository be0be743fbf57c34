"""Encodes tensors in 1 to 8 bits per element with stochastic rounding, and decodes them."""

from actnn.codec.calls import coder_of, decode, decoder_of, encode, fits, group_ranges
from actnn.codec.codes import UNBOUNDED, Bounds, Codes, Key, bytes_of
from actnn.codec.noise import noise_state

__all__ = [
    "UNBOUNDED",
    "Bounds",
    "Codes",
    "Key",
    "bytes_of",
    "coder_of",
    "decode",
    "decoder_of",
    "encode",
    "fits",
    "group_ranges",
    "noise_state",
]
