"""The shared library of the C interface, through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor


class Options(ctypes.Structure):
    """`qgru_options`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("h0", ctypes.c_void_p),
        ("h_n", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class Library:
    """The functions of a shared library, with errors as exceptions."""

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))
        self._functions.qgru_last_error.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; a status other than 0 is a RuntimeError."""
        if getattr(self._functions, name)(*arguments):
            raise RuntimeError(self._functions.qgru_last_error().decode())

    def free(self, name: str, handle: ctypes.c_void_p) -> None:
        """Call a function without a result."""
        function = getattr(self._functions, name)
        function.restype = None
        function(handle)

    def load(self, file: bytes) -> ctypes.c_void_p:
        """Load the bytes of a file."""
        model = ctypes.c_void_p()
        self.call("qgru_load_bytes", file, ctypes.c_size_t(len(file)), ctypes.byref(model))
        return model

    def run(
        self,
        model: ctypes.c_void_p,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
        like: tuple[Tensor, Tensor],
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run a model; the results have the shapes of `like`."""
        y, h_n = (torch.full(each.shape, -1.0) for each in like)
        T, N = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
        x, h0 = x.contiguous(), None if h0 is None else h0.contiguous()
        options = Options(ctypes.sizeof(Options), address(h0), address(h_n), address(lengths), 1)
        sizes = (ctypes.c_int64(T), ctypes.c_int64(N))
        given = (ctypes.c_void_p(address(x)), *sizes, ctypes.c_void_p(address(y)))
        self.call("qgru_run", model, *given, ctypes.byref(options))
        return y, h_n


def address(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor, None for None."""
    return None if tensor is None else tensor.data_ptr()
