"""The C++ library for tests from Python: `cpp/tests/access.cpp`, by ctypes."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from random_calibrations import Calibration
from torch import Tensor

from quant_gru.calibration.float_run import FloatWeights
from quant_gru.integer.quantizer import Quantizer
from quant_gru.parameters.schema import Shape


class Access:
    """The functions of the library.

    Args:
        path: The shared library of `access.cpp`.
    """

    def __init__(self, path: Path) -> None:
        self.native = ctypes.CDLL(str(path))
        self.native.result.restype = ctypes.c_void_p

    def call(self, function: str, *arguments: Any) -> bytes:
        """Call a function and return its result; an error is a ValueError."""
        call = getattr(self.native, function)
        call.restype = ctypes.c_int64
        size = call(*arguments)
        address = self.native.result()
        if size < 0:
            raise ValueError(ctypes.string_at(address).decode(errors="replace"))
        return ctypes.string_at(address, size)

    def config_text(self, text: bytes) -> bytes:
        """Read a configuration and write it."""
        return self.call("config_text", ctypes.c_char_p(text))

    def parameters_text(self, text: bytes) -> bytes:
        """Read a parameter document and write it."""
        return self.call("parameters_text", ctypes.c_char_p(text))

    def frozen_bytes(
        self, parameters: bytes, weights: Sequence[FloatWeights], batch_first: bool
    ) -> bytes:
        """Return the file of the frozen GRU."""
        return self.call(
            "frozen_bytes",
            ctypes.c_char_p(parameters),
            cells(weights),
            ctypes.c_int64(len(weights)),
            int(batch_first),
        )

    def cut_biases(
        self, parameters: bytes, weights: Sequence[FloatWeights]
    ) -> list[tuple[int, str, int]]:
        """Return the cell, name and count of cut biases."""
        found = self.call(
            "cut_numbers",
            ctypes.c_char_p(parameters),
            cells(weights),
            ctypes.c_int64(len(weights)),
        )
        words = memoryview(found).cast("q").tolist()
        return [
            (words[i], ("weight.bw", "weight.br")[words[i + 1]], words[i + 2])
            for i in range(0, len(words), 3)
        ]

    def calibrated(self, case: Calibration) -> bytes:
        """Return the parameter document after the calibration of a case."""
        xs, h0s, lengths = zip(*case.batches, strict=True)
        sizes = torch.tensor([list(x.shape[:2]) for x in xs])
        return self.call(
            "calibrated",
            ctypes.c_char_p(json.dumps(case.gru.config.to_dict()).encode()),
            numbers(case.shape),
            ctypes.c_double(case.shape.zoneout),
            cells(case.weights),
            ctypes.c_int64(len(case.weights)),
            ctypes.c_char_p(case.method.encode()),
            ctypes.c_double(case.gru.percentile_value),
            ctypes.c_int64(len(xs)),
            addresses(xs),
            address(sizes),
            addresses(h0s),
            addresses(lengths),
        )

    def observed(
        self,
        method: str,
        percentile: float,
        batches: Sequence[Tensor],
        bits: int,
        symmetric: bool,
        unsigned: bool,
        free: bool,
    ) -> tuple[float, int]:
        """Return scale and zero point from batches of values."""
        scale, zero = ctypes.c_double(), ctypes.c_int64()
        sizes = torch.tensor([batch.numel() for batch in batches])
        self.call(
            "observed",
            ctypes.c_char_p(method.encode()),
            ctypes.c_double(percentile),
            ctypes.c_int64(len(batches)),
            addresses(batches),
            address(sizes),
            *map(int, (bits, symmetric, unsigned, free)),
            ctypes.byref(scale),
            ctypes.byref(zero),
        )
        return scale.value, zero.value

    def table_words(
        self, op: str, pre: Quantizer, out: Quantizer, activation: str, segments: int | None
    ) -> list[int]:
        """Return the numbers of a table, then its bounds and coefficients."""
        kinds = ("exact", "pwl", "quadratic")
        found = self.call(
            "table_words",
            ctypes.c_char_p(op.encode()),
            (ctypes.c_int64 * 3)(pre.bits, pre.signed, pre.zero_point),
            ctypes.c_double(pre.scale),
            (ctypes.c_int64 * 3)(out.bits, out.signed, out.zero_point),
            ctypes.c_double(out.scale),
            kinds.index(activation),
            segments or 0,
        )
        return torch.frombuffer(bytearray(found), dtype=torch.int64).tolist()

    def two_terms(
        self, ratios: Sequence[float], bounds: Sequence[int], bits: int, pot: bool
    ) -> tuple[int, list[int]]:
        """Return the shift and the multipliers of a sum of two terms."""
        words = [word for V in bounds for word in (V & ((1 << 64) - 1), V >> 64)]
        found = (ctypes.c_int64 * 2)()
        k = self.native.two_terms(
            (ctypes.c_double * 2)(*ratios), (ctypes.c_uint64 * 4)(*words), bits, int(pot), found
        )
        return int(k), list(found)


def address(tensor: Tensor | None) -> ctypes.c_void_p | None:
    """The address of the data of a contiguous tensor."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def addresses(tensors: Sequence[Tensor | None]) -> Any:
    """An array of addresses."""
    found = [None if t is None else t.data_ptr() for t in tensors]
    return (ctypes.c_void_p * len(found))(*found)


def cells(weights: Sequence[FloatWeights]) -> Any:
    """The addresses of W, R, bw and br of each cell."""
    return addresses([each for w in weights for each in (w.W, w.R, w.bw, w.br)])


def numbers(shape: Shape) -> Any:
    """The integers of a shape."""
    return (ctypes.c_int64 * 5)(
        shape.input_size, shape.hidden_size, shape.num_layers, shape.bias, shape.bidirectional
    )
