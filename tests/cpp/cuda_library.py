"""The C interface for GPUs, through ctypes, and random GRUs of many sizes to run with it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from c_library import Library
from make_golden import Case, random_input, run, saved
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "interchange"))

from random_grus import HIDDEN, KINDS, random_gru

LARGE = (48, 64, 96, 100, 128, 200, 256, 320, 512)
ROWS = (1, 2, 3, 8, 16, 33, 64, 130)


def nvrtc() -> Path | None:
    """NVRTC of the package nvidia-cuda-nvrtc, or None."""
    try:
        import nvidia
    except ImportError:
        return None
    folders = [Path(each) for each in nvidia.__path__]
    found = [path for folder in folders for path in folder.rglob("libnvrtc.so.1?")]
    return max(found, default=None)


class Options(ctypes.Structure):
    """`qgru_cuda_options`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("h0", ctypes.c_void_p),
        ("h_n", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CudaLibrary(Library):
    """The functions for GPUs of a shared library, with errors as exceptions."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path
        self._functions.qgru_cuda_description.restype = ctypes.c_char_p

    def load_to_gpu(self, file: bytes, device: int = 0) -> ctypes.c_void_p:
        """Load the bytes of a file."""
        model = ctypes.c_void_p()
        size = ctypes.c_size_t(len(file))
        self.call("qgru_cuda_load_bytes", file, size, device, ctypes.byref(model))
        return model

    def prepare(self, file: bytes, T: int, N: int, device: int = 0) -> Prepared:
        """Load a file and prepare calls with T steps of N sequences."""
        model, call = self.load_to_gpu(file, device), ctypes.c_void_p()
        try:
            sizes = (ctypes.c_int64(T), ctypes.c_int64(N))
            self.call("qgru_cuda_prepare", model, *sizes, ctypes.byref(call))
        finally:
            self.free("qgru_cuda_free_model", model)
        return Prepared(self, call)

    def description(self, call: ctypes.c_void_p) -> str:
        """The launches of a call."""
        return str(self._functions.qgru_cuda_description(call).decode())


class Prepared:
    """A prepared call.

    Args:
        library: The library.
        handle: The handle of the call, which this object frees.
    """

    def __init__(self, library: CudaLibrary, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def __del__(self) -> None:
        self._library.free("qgru_cuda_free_call", self._handle)

    def __str__(self) -> str:
        return self._library.description(self._handle)

    def run(
        self,
        x: Tensor,
        y: Tensor,
        h0: Tensor | None = None,
        h_n: Tensor | None = None,
        lengths: Tensor | None = None,
        stream: int = 0,
    ) -> None:
        """Start the call. All tensors are contiguous and on the GPU."""
        places = (_address(each) for each in (h0, h_n, lengths))
        options = Options(ctypes.sizeof(Options), stream, *places)
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (x, y))
        self._library.call("qgru_cuda_run", self._handle, *pointers, ctypes.byref(options))


@dataclass(frozen=True)
class GPUCase:
    """A GRU with an input and what Python computes from it on the CPU.

    Attributes:
        name: How messages call it.
        file: The bytes of its file.
        T: Steps.
        N: Sequences.
        case: The GRU, its input and results.
    """

    name: str
    file: bytes
    T: int
    N: int
    case: Case


def gpu_case(
    seed: int, kind: str, large: bool, hidden: Sequence[int] | None = None, far: bool = False
) -> GPUCase:
    """The same case for the same arguments.

    Args:
        seed: Any number.
        kind: Of the widths.
        large: Whether there are many features, steps and rows.
        hidden: Numbers of units to choose from.
        far: Whether the range of the input may exclude 0.
    """
    hidden = hidden or (LARGE if large and kind != "wide" else HIDDEN)
    features = 200 if large else 20
    gru, rng = random_gru(seed, kind, hidden, features, far)
    wide = kind in ("wide", "mixed")
    T = rng.choice((1, 1, 2, 5, 9, 12 if wide else 40))
    N = rng.choice(ROWS[: 4 if wide else None])
    if not large:
        T, N = rng.randint(1, 6), rng.choice((1, 2, 3, 5))
    x, h0, lengths = random_input(gru, rng, T, N)
    case = Case(gru, x, h0, lengths, *run(gru, x, h0, lengths))
    shape = gru.shape
    sizes = f"T {T}, N {N}, C {shape.input_size}, H {shape.hidden_size}"
    name = (
        f"{kind} {seed}: {sizes}, {shape.num_layers} layers of {shape.directions}"
        f"{', batch first' if gru.batch_first else ''}{', h0' if h0 is not None else ''}"
        f"{', lengths' if lengths is not None else ''}"
    )
    return GPUCase(name, saved(gru), T, N, case)


def difference(what: str, got: Tensor, expected: Tensor) -> str | None:
    """Where the bits of two tensors differ first, NaN being equal to NaN; None if nowhere."""
    got = got.cpu()
    same = (got.view(torch.int32) == expected.view(torch.int32)) | (got.isnan() & expected.isnan())
    wrong = (~same).nonzero()
    if not len(wrong):
        return None
    at = tuple(wrong[0].tolist())
    return (
        f"{what} differs at {len(wrong)} of {same.numel()} places, first at {at}: "
        f"expected {expected[at].item()!r}, got {got[at].item()!r}"
    )


class CudaAccess:
    """The functions of `cpp/tests/cuda_access.cpp`, with errors as exceptions."""

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        function.restype = ctypes.c_char_p

        def call(*arguments: Any) -> str:
            given = (each.encode() if isinstance(each, str) else each for each in arguments)
            text = str(function(*given).decode())
            if text.startswith("!"):
                raise RuntimeError(text[1:])
            return text

        return call


class Tensors:
    """The tensors of a case on a device.

    Args:
        case: The case.
        device: Where they are.
    """

    def __init__(self, case: Case, device: str) -> None:
        self.expected = case.y, case.h_n
        self.x = case.x.contiguous().to(device)
        self.h0 = None if case.h0 is None else case.h0.contiguous().to(device)
        self.lengths = None if case.lengths is None else case.lengths.to(device)
        self.y, self.h_n = (torch.empty(each.shape, device=device) for each in self.expected)
        self.forget()

    def forget(self) -> None:
        """Overwrite the results."""
        self.y.fill_(-1.0)
        self.h_n.fill_(-1.0)

    def run(self, call: Prepared, stream: int = 0) -> None:
        """Start the call."""
        call.run(self.x, self.y, self.h0, self.h_n, self.lengths, stream)

    def differences(self) -> list[str]:
        """What is wrong with the results."""
        found = zip(("y", "h_n"), (self.y, self.h_n), self.expected, strict=True)
        return [text for text in (difference(*each) for each in found) if text]


__all__ = [
    "KINDS",
    "CudaAccess",
    "CudaLibrary",
    "GPUCase",
    "Prepared",
    "Tensors",
    "difference",
    "gpu_case",
    "nvrtc",
]
