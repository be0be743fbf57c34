"""Generated C on other compilers and processors, in emulators, where they are installed.

On Debian: apt-get install clang gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm
gcc-riscv64-linux-gnu qemu-user. QUANT_GRU_PLANS sets the number of plans of each of the 5 kinds, 1
if it is not set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from random_grus import KINDS, random_gru, with_weights

pytestmark = pytest.mark.slow

CORTEX = Path(__file__).parents[2] / "benchmarks" / "cortex_m"
PLANS = int(os.environ.get("QUANT_GRU_PLANS", "1"))
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pedantic"]
SOURCES = ["net.c", "net_selftest.c"]


def bare_metal(cpu: str, board: str, abi: str, *more: str) -> dict[str, list[str]]:
    """How to build and run for a board without an operating system."""
    build = ["arm-none-eabi-gcc", "-O3", f"-mcpu={cpu}", "-mthumb", f"-mfloat-abi={abi}", *more]
    link = ["--specs=rdimon.specs", "-nostartfiles", "-T", str(CORTEX / "flat.ld"), "startup.o"]
    run = ["qemu-system-arm", "-M", board, "-nographic", "-kernel", "program"]
    run += ["-semihosting-config", "enable=on,target=native"]
    return {
        "first": [*build, "-c", str(CORTEX / "startup.c")],
        "build": [*build, *link],
        "run": run,
    }


TARGETS = {
    "gcc": {"build": ["gcc", "-O2"], "run": ["./program"]},
    "clang": {
        "build": ["clang", "-O2", "-fsanitize=undefined", "-fsanitize-trap=undefined"],
        "run": ["./program"],
    },
    "riscv64": {
        "build": ["riscv64-linux-gnu-gcc", "-O2", "-static"],
        "run": ["qemu-riscv64", "./program"],
    },
    "cortex-m4": bare_metal("cortex-m4", "mps2-an386", "soft"),
    "cortex-m33": bare_metal("cortex-m33", "mps3-an547", "soft"),
    "cortex-m55": bare_metal("cortex-m55", "mps3-an547", "hard"),
    "cortex-m55-O0": bare_metal("cortex-m55", "mps3-an547", "hard", "-O0"),
    "cortex-m55-portable": bare_metal("cortex-m55", "mps3-an547", "hard", "-DQG_PORTABLE"),
}


def prepared(target, folder):
    """How to build and run for a target whose tools are installed."""
    steps = TARGETS[target]
    for tool in (steps["build"][0], steps["run"][0]):
        if not tool.startswith("./") and shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if "first" in steps:
        subprocess.run(steps["first"], cwd=folder, check=True)
    return steps


# C, H and whether most weights are at the ends of their range. Each preset has all of them, each
# width two; test_c.py has four sizes for each width.
SIZES = ((3, 5, True), (24, 17, False), (70, 40, True))
FEW_BITS = [
    pytest.param(base, bits, *SIZES[(place + shift) % len(SIZES)], id=f"{base}-{bits}")
    for shift, base in enumerate(("int8", "w8a16"))
    for place, bits in enumerate((1, 2, 4))
]


@pytest.mark.filterwarnings("ignore:one signed bit")
@pytest.mark.parametrize(("base", "bits", "C", "H", "extreme"), FEW_BITS)
@pytest.mark.parametrize("target", TARGETS)
def test_weights_of_few_bits(target, base, bits, C, H, extreme, tmp_path):
    steps = prepared(target, tmp_path)
    with_weights(bits, base, C, H, extreme).export_c(tmp_path, "net")
    built = [*steps["build"], *STRICT, *SOURCES, "-o", "program"]
    subprocess.run(built, cwd=tmp_path, check=True)
    done = subprocess.run(
        steps["run"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60
    )
    assert "net: equal (" in done.stdout, done


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_random_plans(target, kind, tmp_path):
    steps = prepared(target, tmp_path)
    too_large = 0
    for seed in range(PLANS):
        gru, _ = random_gru(seed, kind)
        gru.export_c(tmp_path, "net")
        command = [*steps["build"], *STRICT, *SOURCES, "-o", "program"]
        built = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
        if "overflowed by" in built.stderr:
            too_large += 1  # tables of more than 24 bits may exceed the memory of the boards
            continue
        assert built.returncode == 0, built.stderr
        done = subprocess.run(
            steps["run"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60
        )
        assert "net: equal (" in done.stdout, (seed, done)
    assert too_large == 0 or (kind == "wide" and too_large <= PLANS // 2)
