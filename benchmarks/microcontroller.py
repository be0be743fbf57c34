"""Count the instructions of a step of exported C on emulated Cortex-M boards.

    python benchmarks/microcontroller.py [--quick]

Needs arm-none-eabi-gcc, its newlib and qemu-system-arm (on Debian: apt-get install
gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm). Each program first compares golden
vectors with the plan.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from quant_gru import QuantConfig, QuantGRU

HERE = Path(__file__).parent / "cortex_m"
# processor -> board, float ABI, instructions (1 ns each) per tick of its clock
BOARDS = {
    "cortex-m4": ("mps2-an386", "soft", 40.0),
    "cortex-m55": ("mps3-an547", "hard", 31.25),
}
SIZES = ((40, 64), (64, 128))
PRESETS = ("int8", "int8_wide", "w8a16")
NAME = "net"


def quantized(preset: str, scale_kind: str, C: int, H: int) -> QuantGRU:
    """Return a calibrated GRU of seed 0."""
    torch.manual_seed(0)
    config = getattr(QuantConfig, preset)().replace_globals(scale_kind=scale_kind)
    gru = QuantGRU(C, H, config=config)
    gru.calibrate(torch.randn(50, 8, C))
    gru.finalize_calibration()
    return gru


def run(folder: Path, cpu: str, main: str, *flags: str) -> str:
    """Build a program, run it in the emulator and return its output."""
    board, abi, _ = BOARDS[cpu]
    common = ["-std=c99", f"-mcpu={cpu}", "-mthumb", f"-mfloat-abi={abi}", *flags]
    common += ["--specs=rdimon.specs", "-nostartfiles", "-T", str(HERE / "flat.ld")]
    sources = [str(HERE / "startup.c"), f"{NAME}.c", main]
    subprocess.run(
        ["arm-none-eabi-gcc", *common, "-std=gnu99", *sources, "-o", "program"],
        cwd=folder, check=True,
    )  # fmt: skip
    emulator = ["qemu-system-arm", "-M", board, "-nographic", "-icount", "shift=0"]
    emulator += ["-semihosting-config", "enable=on,target=native", "-kernel", "program"]
    done = subprocess.run(
        emulator, cwd=folder, check=True, capture_output=True, text=True, timeout=300
    )
    return done.stdout


def instructions(folder: Path, cpu: str, *flags: str) -> float:
    """Return the instructions of a step, after a check of its codes."""
    said = run(folder, cpu, f"{NAME}_selftest.c", *flags)
    assert f"{NAME}: equal (" in said, said
    text = (HERE / "count.c.in").read_text()
    (folder / "count.c").write_text(text.replace("@{name}", NAME).replace("@{NAME}", NAME.upper()))
    found = re.search(r"ticks (\d+) steps (\d+)", run(folder, cpu, "count.c", *flags))
    assert found
    return int(found[1]) * BOARDS[cpu][2] / int(found[2])


def code_size(folder: Path) -> int:
    """Return the bytes of code and constants of the model's object file."""
    said = subprocess.run(
        ["arm-none-eabi-size", "model.o"], cwd=folder, check=True, capture_output=True, text=True
    )
    return int(said.stdout.splitlines()[1].split()[0])


def main() -> None:
    """Print a row for each size, preset, scale kind and processor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smaller size only")
    parser.add_argument("--presets", nargs="+", default=PRESETS, choices=PRESETS)
    parser.add_argument("--processors", nargs="+", default=list(BOARDS), choices=list(BOARDS))
    parser.add_argument("--optimize", default="-O3", help="the compiler's level")
    options = parser.parse_args()
    print(platform.platform(), subprocess.getoutput("arm-none-eabi-gcc --version").split("\n")[0])
    print("| C, H | preset | scales | processor | instructions | per MAC | portable C | per MAC |")
    print("|---|---|---|---|---|---|---|---|")
    for C, H in SIZES[: 1 if options.quick else 2]:
        for preset in options.presets:
            for kind in ("pot", "free"):
                with tempfile.TemporaryDirectory() as folder:
                    report = quantized(preset, kind, C, H).export_c(folder, NAME)
                    for cpu in options.processors:
                        cells = [f"{C}, {H}", preset, kind, cpu]
                        for flags in ((), ("-DQG_PORTABLE",)):
                            n = instructions(Path(folder), cpu, options.optimize, *flags)
                            cells += [f"{n:.0f}", f"{n / report.macs:.2f}"]
                        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
