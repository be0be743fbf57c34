"""The kernels on the host: compiled by a C++ compiler, every CUDA thread a fiber."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import quant_gru

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent
KERNELS = Path(quant_gru.__file__).parent / "kernels"
_FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
_FLAGS += ["-fno-gnu-unique"]  # libraries keep their names to themselves
_LIBRARY = ["-shared", "-Wl,-Bsymbolic"]
# structures by function or source
KINDS = dict.fromkeys(
    ("project", "project_bytes", "project_passing", "step", "multiply_case"),
    "Numbers",
) | {
    "border": "Border",
    "project_reals": "Reals",
    "project_few": "Few",
}
KINDS |= {"events": "Events"}
KINDS |= dict.fromkeys(("measure", "settle"), "Weights")
KINDS |= {"clear": "Mask", "carry": "Carry"}
KINDS |= {"take": "Take", "between": "Between"}
KINDS |= {"operands": "Operands"}
KINDS |= {"back_step": "Numbers", "back_grid": "Numbers"}
_LAUNCH = """
#include "{source}.cu"
extern "C" void launch(const void *p, int x, int y, int threads, int cluster, long shared,
                       bool together) {{
    host::run([p] {{ {function}(*(const {kind} *)p); }}, x, y, threads, cluster, size_t(shared),
              together);
}}
"""


def folder_of(tmp_path_factory) -> Path:
    """Where kernels of this run of the tests go, those of other processes of it included."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    folder.mkdir(exist_ok=True)
    header = folder / "host.hpp.gch"
    if not header.exists():
        _compile(header, ["-x", "c++-header", str(HERE / "host.hpp")])
    return folder


def _compile(result: Path, arguments: list[str]) -> None:
    """Compile in the result's folder, so that others see all of it or nothing."""
    folder = result.parent
    includes = [f"-I{each}" for each in (folder, HERE, KERNELS / "cuda", KERNELS)]
    part = folder / f"{os.getpid()}{result.suffix}"
    command = [COMPILER, *_FLAGS, *includes, *arguments, "-o", part.name]
    subprocess.run(command, cwd=folder, check=True)
    part.replace(result)


class Host:
    """Stands in for a GPU with clusters.

    Attributes:
        folder: Where compiled kernels go.
        launched: (function, macros) of all launches.
        resident: Blocks of a cluster -> clusters at once.
        arch: What kernels are chosen for.
    """

    arch = "sm_80"

    def __init__(self, folder: Path, resident: dict[int, int] | None = None) -> None:
        self.folder = folder
        self.launched: list[tuple[str, dict[str, object]]] = []
        self.resident = resident or {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}
        self._loaded: dict[str, ctypes.CDLL] = {}

    def clusters(self):
        return self.resident

    def launch(self, kernel, grid, arguments):
        source, function, macros = kernel.source, kernel.function, dict(kernel.macros)
        self.launched.append((function, macros))
        kind = KINDS.get(function) or KINDS.get(source, "Pair")
        text = _LAUNCH.format(source=source, function=function, kind=kind)
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        name = hashlib.sha256(repr((text, defines)).encode()).hexdigest()[:24]
        if name not in self._loaded:
            library = self.folder / f"{name}.so"
            if not library.exists():
                source_file = self.folder / f"{name}.{os.getpid()}.cpp"
                source_file.write_text(text)
                _compile(library, [*_LIBRARY, *defines, "-include", "host.hpp", source_file.name])
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
        return Prepared(lambda: self.launch(kernel, grid, arguments))

    def join(self, launches):
        def start():
            for each in launches:
                each.start(0)

        return Prepared(start)

    def stream(self):
        return 0


class Prepared:
    """A launch to be started again and again."""

    def __init__(self, launch) -> None:
        self._launch = launch

    def start(self, stream) -> None:
        self._launch()
