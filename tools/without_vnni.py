"""Runs a command as on a processor with AVX2, without AVX-512, AVX-VNNI and AMX, at full speed.

    .venv/bin/python tools/without_vnni.py .venv/bin/python -m pytest -q tests/gru/test_onnx.py

The libraries that this Python has installed (PyTorch, ONNX Runtime, OpenVINO, NumPy, this one) get
the answers of such a processor from `cpuid`, in child processes too. Programs that a test compiles
get the real ones. Files stay as they are; only memory changes. It needs Linux on x86-64 with glibc,
a C compiler and objdump.
"""

import mmap
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CPUID = b"\x0f\xa2"
WINDOW = 64
"""Bytes before a candidate from which instructions are decoded: enough to be in step with them."""
STARTS = (WINDOW, WINDOW - 9, WINDOW - 22)


def candidates(library: Path) -> list[tuple[int, bytes]]:
    """Places of the bytes of `cpuid`, which may be part of others, with the bytes before."""
    with library.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return []
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        places = [match.start() for match in re.finditer(CPUID, content)]
        return [(at, content[at - WINDOW : at + len(CPUID)]) for at in places if at >= WINDOW]


def sections(library: Path) -> list[tuple[int, int, int]]:
    """Sections of code: offset in the file, address, size."""
    command = ["objdump", "-h", "-w", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^ +\d+ \S+ +(\w+) +(\w+) +\w+ +(\w+) .*CODE", text, re.M)
    return [(int(offset, 16), int(address, 16), int(size, 16)) for size, address, offset in found]


def are_instructions(windows: list[bytes], folder: Path) -> list[bool]:
    """Whether each window ends with the instruction, by most of several starts of decoding."""
    nop, code = b"\x90" * 16, b""
    for window in windows:
        for start in STARTS:
            few = window[-start - len(CPUID) :]
            code += nop * (WINDOW // len(nop)) + few.rjust(WINDOW + len(CPUID), nop[:1]) + nop
    (folder / "code").write_bytes(code)
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", str(folder / "code")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {int(at, 16) for at in re.findall(r"^ *(\w+):\t0f a2 +\tcpuid", text, re.M)}
    size, count = 2 * WINDOW + len(CPUID) + len(nop), len(STARTS)
    votes = [i * size + 2 * WINDOW in found for i in range(count * len(windows))]
    return [sum(votes[i : i + count]) > count // 2 for i in range(0, len(votes), count)]


def instructions(folder: Path) -> dict[Path, list[int]]:
    """Addresses of `cpuid` in the libraries of this Python."""
    places = []
    for library in sorted({path.resolve() for path in Path(sys.prefix).rglob("*.so*")}):
        here = candidates(library)
        for offset, address, size in sections(library) if here else []:
            inside = [each for each in here if offset <= each[0] < offset + size]
            places += [(library, at - offset + address, window) for at, window in inside]
    found: dict[Path, list[int]] = {}
    right = are_instructions([window for _, _, window in places], folder)
    for (library, address, _), yes in zip(places, right, strict=True):
        if yes:
            found.setdefault(library, []).append(address)
    return found


def main() -> int:
    """Run the command, and return its exit status."""
    if len(sys.argv) < 2:
        print("Expected a command, got none: see the head of this file")
        return 2
    with tempfile.TemporaryDirectory() as name:
        names, built = Path(name) / "list", Path(name) / "without_vnni.so"
        found, lines = instructions(Path(name)), list[str]()
        lines = [
            "\t".join([str(path), *(f"{at:x}" for at in all_)]) for path, all_ in found.items()
        ]
        names.write_text("\n".join(lines))
        compiler, source = os.environ.get("CC", "cc"), Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", built], check=True)
        print(
            f"== {sum(map(len, found.values()))} times cpuid in {len(found)} libraries", flush=True
        )
        variables = {"LD_AUDIT": str(built), "LD_PRELOAD": str(built), "WITHOUT_VNNI": str(names)}
        asan = [os.environ.get("ASAN_OPTIONS", ""), "verify_asan_link_order=0"]  # with a preload
        variables["ASAN_OPTIONS"] = ":".join(filter(None, asan))
        return subprocess.run(sys.argv[1:], env={**os.environ, **variables}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
