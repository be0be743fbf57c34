"""The kernels on the host: compiled by a C++ compiler, every CUDA thread a fiber."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from fake_driver import FakeDriver

import quant_gru
from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda.launch import Grid
from quant_gru.kernel_runtime.cuda.sources import Sources

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent
KERNELS = Path(quant_gru.__file__).parent / "kernels"
_FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
_FLAGS += ["-fno-gnu-unique"]  # libraries keep their names to themselves
_LIBRARY = ["-shared", "-Wl,-Bsymbolic"]
# structures by function
KINDS = dict.fromkeys(
    ("split", "finish", "project", "project_bytes", "project_passing", "step", "multiply_case"),
    "Numbers",
) | {
    "quantize": "Border",
    "dequantize": "Border",
    "project_reals": "Reals",
    "project_groups": "Reals",
    "project_few": "Few",
}
KINDS |= {"events": "Events", "sum_bits": "Sums", "sweep": "Sweep"}
DERIVED = ("begin_derived", "derive_weights")
UPDATES = ("row_scales", "correct_bias", "requantize_weights")
KINDS |= dict.fromkeys((*DERIVED, *UPDATES), "Weights") | {"contents": "Contents"}
KINDS |= {"mask_clamped": "Mask", "requantize_codes": "RequantizeCodes"}
KINDS |= {"quantize_input": "QuantizeInput", "requantize_layers": "RequantizeLayers"}
KINDS |= {"operands": "Operands", "convert": "Conversions", "upload": "Upload"}
KINDS |= dict.fromkeys(("back_step", "back_grid", "saturated_case"), "Numbers")
KINDS |= dict.fromkeys(("encode", "decode"), "Codec")
_POINTWISE = ("rectify", "pass", "restore", "dropout", "slopes", "times")
KINDS |= dict.fromkeys(_POINTWISE, "Pointwise")
KINDS |= dict.fromkeys(("window_offsets", "window_indices"), "Windows")
KINDS |= dict.fromkeys(("largest_steps", "row_squares", "limit_rows"), "Rows")
# macros come behind the header: with them it would have to be compiled again
_LAUNCH = """
#include "host.hpp"
{macros}
#include "{source}"
extern "C" void launch(const void *p, int x, int y, int threads, int cluster, long shared,
                       bool together) {{
    host::run([](const void *p) {{ {function}(*(const {kind} *)p); }}, p, x, y, threads, cluster,
              size_t(shared), together);
}}
"""


def folder_of(tmp_path_factory) -> Path:
    """Where kernels of this run of the tests go, those of other processes of it included."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    folder.mkdir(exist_ok=True)
    return prepared(folder)


def prepared(folder: Path) -> Path:
    """The folder, with what all kernels need."""
    header, scheduler = folder / "host.hpp.gch", folder / "host.o"
    if not header.exists():
        _compile(header, ["-x", "c++-header", str(HERE / "host.hpp")])
    if not scheduler.exists():
        _compile(scheduler, ["-O3", "-c", str(HERE / "host.cpp")])
    return folder


def _compile(result: Path, arguments: list[str]) -> None:
    """Compile in the result's folder, so that others see all of it or nothing."""
    folder = result.parent
    roots = (folder, HERE, KERNELS / "cuda", KERNELS, KERNELS.parent, KERNELS.parents[1])
    includes = [f"-I{each}" for each in roots]
    part = folder / f"{os.getpid()}{result.suffix}"
    command = [COMPILER, *_FLAGS, *includes, *arguments, "-o", part.name]
    subprocess.run(command, cwd=folder, check=True)
    part.replace(result)


class Host:
    """Stands in for a GPU with clusters.

    Attributes:
        folder: Where compiled kernels go.
        launched: (function, macros) of all launches but those that derive arrays of weights.
        functions: What prepared launches start, by the handles that native code has.
        failed: What they raised.
        resident: Blocks of a cluster -> clusters at once.
        sources: Where kernels are found; None for those of quant_gru.
        arch: What kernels are chosen for.
    """

    arch = "sm_80"

    def __init__(
        self,
        folder: Path,
        resident: dict[int, int] | None = None,
        sources: Sources | None = None,
    ) -> None:
        self.folder, self.sources = folder, sources
        self.launched: list[tuple[str, dict[str, object]]] = []
        self.resident = resident or {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}
        self._loaded: dict[str, ctypes.CDLL] = {}
        self._device = None
        self.functions: dict[int, Callable[[], None]] = {}
        self.failed: list[Exception] = []

    def clusters(self):
        return self.resident

    def expect(self, kernel):
        pass

    def launch(self, kernel, grid, arguments):
        source, function, macros = kernel.source, kernel.function, dict(kernel.macros)
        if function not in DERIVED:
            self.launched.append((function, macros))
        kind = KINDS.get(function, "Pair")
        defines = "\n".join(f"#define {name} {value}" for name, value in macros.items())
        source = f"{source}.cu" if self.sources is None else self.sources.folder / f"{source}.cu"
        text = _LAUNCH.format(source=source, macros=defines, function=function, kind=kind)
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        if name not in self._loaded:
            library = self.folder / f"{name}.so"
            if not library.exists():
                source_file = self.folder / f"{name}.{os.getpid()}.cpp"
                source_file.write_text(text)
                _compile(library, [*_LIBRARY, source_file.name, "host.o"])
            self._loaded[name] = ctypes.CDLL(str(library))
        self._loaded[name].launch(
            ctypes.byref(arguments),
            *grid.blocks,
            grid.threads,
            grid.cluster,
            ctypes.c_long(grid.shared_bytes),
            ctypes.c_bool(grid.together),
        )

    def prepare(self, kernel, grid, arguments):
        return Prepared(self, [lambda: self.launch(kernel, grid, arguments)])

    def multiply(self, product):
        return None

    def join(self, launches):
        return Prepared(self, [each for launch in launches for each in launch.launches])

    def raise_for(self, status):
        raise self.failed.pop()

    def stream(self):
        return 0

    def native(self):
        """A GPU of native code; a function's handle is its place in `functions`."""
        if self._device is None:
            self._driver = _Driver(self)
            self._device = self._driver.device()
        return self._device


class _Driver(FakeDriver):
    def __init__(self, host):
        super().__init__()
        self._host = host

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        try:
            self._host.functions[function]()
        except Exception as error:
            self._host.failed.append(error)
            return 1


class Prepared:
    """Launches to be started again and again."""

    def __init__(self, host, launches) -> None:
        self.launches = launches
        self.native = _native.Launches(host.native())
        for each in launches:
            host.functions[len(host.functions) + 1] = each
            self.native.add(len(host.functions), Grid((1, 1), 1), 0)

    def start(self, stream) -> None:
        for each in self.launches:
            each()
