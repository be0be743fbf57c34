"""The codes of a GRU on real inputs from every executor; they are equal bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from c_library import Library, address
from real_common import Call
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from quant_gru import (
    FrozenQuantGRUCell,
    QuantGRU,
    QuantGRUCell,
    export_onnx,
    export_step_onnx,
    onnx_operator_library,
)
from quant_gru.interchange.onnx.profiles import EXACT
from quant_gru.kernels.cpu.executor import choices

GCC = shutil.which("gcc")

# Rows x (T, N, C) one after the other, as a sequence has them; lengths and states of each row.
PROGRAM = """
#include <stdlib.h>
#include "net.h"
void rows(const float *x, const int32_t *h, const int64_t *lengths, size_t steps, size_t count,
    float *y)
{
    enum { C = NET_INPUT_SIZE, H = NET_HIDDEN_SIZE, D = NET_DIRECTIONS };
    net_input *given = malloc(steps * C * sizeof *given + 1);
    net_code *found = malloc(steps * D * H * sizeof *found + 1);
    static net_state state;
    for (size_t n = 0; n < count; ++n) {
        const size_t length = (size_t)lengths[n];
        net_init(&state);
        for (size_t i = 0; h && i < D * H; ++i)
            state.h[i / H][i % H] = (net_code)h[(i / H * count + n) * H + i % H];
        for (size_t i = 0; i < length * C; ++i)
            given[i] = net_quantize(x[(i / C * count + n) * C + i % C]);
        net_run(&state, given, length, found WORK);
        for (size_t i = 0; i < length * D * H; ++i) {
            const size_t t = i / (D * H), j = i % (D * H);
            y[(t * count + n) * D * H + j] = net_dequantize(found[i], (int)(j / H));
        }
    }
    free(given);
    free(found);
}
"""


@dataclass(frozen=True)
class Input:
    """A call as a sequence: x (T, N, C), states (D, N, H) or None, lengths (N,)."""

    x: Tensor
    h0: Tensor | None
    lengths: Tensor

    @property
    def is_padded(self) -> bool:
        """Whether rows end before the last step."""
        return bool((self.lengths < len(self.x)).any())


def input_of(gru: QuantGRU, arguments: tuple[Any, ...], rows: int = 4, steps: int = 100) -> Input:
    """The first rows and steps of a call."""
    x, h0 = (*arguments, None)[:2]
    if isinstance(x, PackedSequence):
        assert h0 is None
        x, lengths = pad_packed_sequence(x)
        x, lengths = x[:, :rows], lengths[:rows]
        return Input(x[: int(lengths.max())].contiguous(), None, lengths)
    if isinstance(gru, QuantGRUCell):
        x, h0 = x[None], None if h0 is None else h0[None]
    x, h0 = x[:steps, :rows].contiguous(), None if h0 is None else h0[:, :rows].contiguous()
    return Input(x, h0, torch.full((x.shape[1],), len(x)))


@torch.no_grad()
def check_executors(
    gru: QuantGRU, call: Call, library: Library, folder: Path, least: int = 20
) -> None:
    """All executors give the same outputs of all steps for a call, at least `least` values."""
    given = input_of(gru, call.arguments)
    with executor("reference"):
        wanted = by_frozen(gru, given)
    there = torch.arange(len(wanted))[:, None] < given.lengths

    def same(found: Tensor, name: str) -> None:
        assert torch.equal(found[there], wanted[there]), name

    assert wanted.unique().numel() >= least
    for name in choices():
        with executor(name):
            same(by_frozen(gru, given), name)
    same(by_module(gru, given), "the module")
    for profile in EXACT:
        same(by_onnx(gru, given, folder, profile), f"ONNX Runtime, {profile}")
    same(by_c(gru, given, folder), "C99")
    same(by_cpp(gru, given, library, folder), "the C++ library")


@contextlib.contextmanager
def executor(name: str) -> Iterator[None]:
    """One of the CPU's executors."""
    before = os.environ.get("QUANT_GRU_CPU")
    os.environ["QUANT_GRU_CPU"] = name
    try:
        yield
    finally:
        os.environ.pop("QUANT_GRU_CPU")
        if before is not None:
            os.environ["QUANT_GRU_CPU"] = before


def by_frozen(gru: QuantGRU, given: Input) -> Tensor:
    """A frozen copy, which has no prepared call of another executor."""
    return by_module(gru.freeze(), given)


def by_module(gru: torch.nn.Module, given: Input) -> Tensor:
    """The output (T, N, D H) of a module."""
    if isinstance(gru, (QuantGRUCell, FrozenQuantGRUCell)):
        return gru(given.x[0], given.h0[0])[None]
    y, _ = gru(packed(given), given.h0)
    return y if isinstance(y, Tensor) else pad_packed_sequence(y)[0]


def packed(given: Input) -> Tensor | PackedSequence:
    """The sequence; a PackedSequence if rows end before the last step."""
    if not given.is_padded:
        return given.x
    return pack_padded_sequence(given.x, given.lengths, enforce_sorted=False)


def by_onnx(gru: QuantGRU, given: Input, folder: Path, profile: str) -> Tensor:
    """A file of a profile in ONNX Runtime."""
    path = folder / "gru.onnx"
    if isinstance(gru, QuantGRUCell):
        export_step_onnx(gru, path, profile)
        (h,) = codes(gru, given.h0)
        return _session(path, given.x[0], h.to(_container(path)))[0][None]
    x = packed(given)
    report = export_onnx(gru, path, x if given.h0 is None else (x, given.h0), profile)
    assert not any(each.differing for each in report.values())
    more = [given.lengths] if given.is_padded else [] if given.h0 is None else [given.h0]
    return _session(path, given.x, *more)[0]


def _loaded(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(onnx_operator_library())
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _session(path: Path, *inputs: Tensor) -> list[Tensor]:
    session = _loaded(path)
    names = [each.name for each in session.get_inputs()]
    feed = {name: each.numpy() for name, each in zip(names, inputs, strict=True)}
    return [torch.from_numpy(each) for each in session.run(None, feed)]


def _container(path: Path) -> torch.dtype:
    kind = _loaded(path).get_inputs()[1].type
    return getattr(torch, kind.removeprefix("tensor(").removesuffix(")"))


def codes(gru: QuantGRU, h0: Tensor) -> Tensor:
    """Codes (D, N, H) of real states."""
    (cells,) = gru._plan().cells
    return torch.stack([cell.h.quantize(h) for cell, h in zip(cells, h0, strict=True)])


def by_c(gru: QuantGRU, given: Input, folder: Path) -> Tensor:
    """C99 source, compiled by gcc."""
    # a folder of its own, since a library that is loaded stays
    report = gru.export_c(tempfile.mkdtemp(dir=folder), "net")
    directions = 2 if gru.bidirectional else 1
    program = PROGRAM.replace("WORK", ", NULL" if directions == 2 else "")
    (report.directory / "rows.c").write_text(program)
    flags = ["-std=c99", "-O2", "-shared", "-fPIC", "-Wall", "-Werror"]
    made = report.directory / "rows.so"
    subprocess.run([str(GCC), *flags, "net.c", "rows.c", "-o", made], cwd=made.parent, check=True)
    T, N, _ = given.x.shape
    y = torch.zeros(T, N, directions * gru.hidden_size)
    h = None if given.h0 is None else codes(gru, given.h0).int().contiguous()
    pointers = [address(each) for each in (given.x, h, given.lengths)]
    ctypes.CDLL(str(made)).rows(
        *map(ctypes.c_void_p, pointers), ctypes.c_size_t(T), ctypes.c_size_t(N),
        ctypes.c_void_p(address(y)),
    )  # fmt: skip
    return y


def by_cpp(gru: QuantGRU, given: Input, library: Library, folder: Path) -> Tensor:
    """The C++ library, from a file of the frozen GRU."""
    frozen = gru.freeze()
    frozen.save(folder / "gru.safetensors")
    model = library.load((folder / "gru.safetensors").read_bytes())
    (T, N, _), D, H = given.x.shape, 2 if gru.bidirectional else 1, gru.hidden_size
    like = torch.zeros(T, N, D * H), torch.zeros(D, N, H)
    y, _ = library.run(model, given.x, given.h0, given.lengths, like, batch_first=False)
    library.free("qgru_free_model", model)
    return y
