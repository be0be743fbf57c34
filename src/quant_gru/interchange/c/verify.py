"""Verification of C source: a compiler of this machine builds it with new golden vectors."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from quant_gru.config.file_sets import settle
from quant_gru.config.files import name_of
from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import GRUPlan
from quant_gru.interchange.c.export import Model, check

_LIMIT = 600.0  # seconds for the compiler, and for the program


def verify_c(
    plan: GRUPlan, directory: str | os.PathLike[str], steps: int = 64, seed: int = 1
) -> tuple[int, int]:
    """Compile the C source of a directory and compare its codes with a plan.

    The compiler is the value of the environment variable CC, or else cc, gcc or clang. The code of
    the directory runs on this machine.

    Args:
        plan: The plan, on the CPU.
        directory: What `export_c` wrote; its code may have been changed since.
        steps: Steps of the golden vectors.
        seed: Of the golden vectors.

    Returns:
        How many codes differ, and how many were compared.

    Raises:
        QuantGRUError: The directory has no source of such a GRU, there is no compiler, or the
            source does not compile or run.
    """
    folder = Path(name_of(directory)).absolute()
    name = _name_in(folder)
    where = f"directory {str(directory)!r}"
    check(plan, name, steps)
    with tempfile.TemporaryDirectory() as work:
        main = Path(work, f"{name}_selftest.c")
        main.write_text(Model(plan, name).selftest(steps, seed), encoding="utf-8")
        program = str(Path(work, "program"))
        sources = [str(folder / f"{name}.c"), str(main)]
        command = [*_compiler(), "-std=c99", "-O2", f"-I{folder}", *sources, "-o", program]
        built = _done(command, where)
        if built.returncode:
            raise QuantGRUError(_reason_of(built.stderr, name, where))
        ran = _done([program], where)
    said = rf"{name}: (?:(\d+) of (\d+) codes differ|equal \((\d+) codes\))"
    found = re.match(said, ran.stdout)
    if not found or ran.returncode not in (0, 1):
        raise QuantGRUError(
            f"Expected a program that counts codes, got exit status {ran.returncode} ({where})"
        )
    return int(found[1] or 0), int(found[2] or found[3])


def _name_in(folder: Path) -> str:
    """Return the name of the GRU in a directory of C source."""
    settle(folder)
    found = sorted(path.name.removesuffix("_selftest.c") for path in folder.glob("*_selftest.c"))
    if len(found) != 1:
        got = ", ".join(found) if found else "none"
        raise QuantGRUError(
            f"Expected a directory with the C source of one GRU, got {got} "
            f"(directory {str(folder)!r})"
        )
    return found[0]


def _compiler() -> list[str]:
    chosen = os.environ.get("CC")
    for command in [chosen] if chosen else ["cc", "gcc", "clang"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise QuantGRUError(
        f"Expected a C compiler, got none named {chosen or 'cc, gcc or clang'}; the environment "
        "variable CC names one"
    )


def _done(command: list[str], where: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", timeout=_LIMIT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QuantGRUError(f"Expected a program that runs, got: {error} ({where})") from error


def _reason_of(messages: str, name: str, where: str) -> str:
    if "qg_shape_is_equal" in messages:
        return (
            "Expected the C source of a GRU with the same sizes, layers and directions, got "
            f"another {name!r} ({where})"
        )
    first = next((line for line in messages.splitlines() if "error" in line), messages[:200])
    return f"Expected C source that compiles, got: {first.strip()} ({where})"
