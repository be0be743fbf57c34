"""The kernels on the host: compiled by a C++ compiler, every CUDA thread a fiber."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import quant_gru

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent
KERNELS = Path(quant_gru.__file__).parent / "kernels"
_FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
_FLAGS += ["-Wl,-Bsymbolic", "-fno-gnu-unique"]  # libraries keep their names to themselves
# structures by function or source
KINDS = dict.fromkeys(("project", "project_bytes", "step", "multiply_case"), "Numbers") | {
    "border": "Border"
}
KINDS |= {"events": "Events"}
KINDS |= dict.fromkeys(("measure", "settle"), "Weights")
KINDS |= {"clear": "Mask", "carry": "Carry"}
KINDS |= {"take": "Take", "between": "Between", "give": "Give"}
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


class Host:
    """Stands in for a GPU with clusters.

    Attributes:
        folder: Where compiled kernels go.
        launched: (function, macros) of all launches.
        resident: Blocks of a cluster -> clusters at once.
    """

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
                (self.folder / f"{name}.cpp").write_text(text)
                folders = (HERE, KERNELS / "cuda", KERNELS)
                includes = [f"-I{folder}" for folder in folders]
                command = [COMPILER, *_FLAGS, *defines, *includes, "-include", "host.hpp"]
                subprocess.run(
                    [*command, f"{name}.cpp", "-o", library.name], cwd=self.folder, check=True
                )
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
