"""Where generated C is compiled: beside other models, without a C library, under any good name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from quant_gru import QuantConfig, QuantGRU

STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pedantic"]
BARE = ["-ffreestanding", "-nostdlib", "-O2"]
# what GCC and clang expect of every environment, with a C library or without
EXPECTED_OF_ALL = {"memcpy", "memset", "memmove"}

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def exported(folder: Path, name: str, config: QuantConfig, seed: int = 0, **options) -> QuantGRU:
    torch.manual_seed(seed)
    gru = QuantGRU(5, 6, config=config, use_quantization=True, **options)
    gru.calibrate(torch.randn(20, 3, 5))
    gru.finalize_calibration()
    gru.export_c(folder, name)
    return gru


def compiled(*command: str | Path) -> str:
    """What the compiler says; '' if it is content."""
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    assert done.returncode == 0 or done.stderr
    return done.stderr


MAIN = """
#include <stdio.h>
#include "first.c"
#include "second.c"
int main(void) {
    static first_state one;
    static second_state two;
    first_code y[6], z[12], work[12];
    first_input x[5] = {1, 2, 3, 4, 5};
    int i;
    first_init(&one);
    second_init(&two);
    first_step(&one, x, y);
    second_run(&two, x, 1, z, work);
    for (i = 0; i < 6; ++i) printf("%d ", y[i]);
    for (i = 0; i < 12; ++i) printf("%d ", z[i]);
    return 0;
}
"""


@needs_gcc
def test_two_models_in_one_translation_unit(tmp_path):
    """As a unity build compiles them."""
    first = exported(tmp_path, "first", QuantConfig.int8())
    second = exported(tmp_path, "second", QuantConfig.int8_wide(), 1, bidirectional=True)
    (tmp_path / "main.c").write_text(MAIN)
    program = tmp_path / "program"
    assert compiled("gcc", *STRICT, tmp_path / "main.c", "-o", program) == ""
    x = torch.arange(1, 6).reshape(1, 1, 5)
    codes = [gru.forward_integer(x)[0].flatten().tolist() for gru in (first, second)]
    found = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [int(each) for each in found.split()] == codes[0] + codes[1]


@pytest.mark.slow
@needs_gcc
def test_models_whose_arithmetic_differs_do_not_share_a_translation_unit(tmp_path):
    exported(tmp_path, "narrow", QuantConfig.int8())
    exported(tmp_path, "wide", QuantConfig.uniform(32))
    exported(tmp_path, "wider", QuantConfig.uniform(31))

    def both(first, second, *options):
        (tmp_path / "main.c").write_text(f'#include "{first}.c"\n#include "{second}.c"\n')
        return compiled("gcc", *options, "-c", tmp_path / "main.c", "-o", tmp_path / "main.o")

    assert "compile wide.c on its own" in both("narrow", "wide", "-w")
    assert "compile narrow.c on its own" in both("wide", "narrow", "-w")
    assert both("wide", "wider", *STRICT) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler",
    [["gcc", "-nostdinc"], ["riscv64-unknown-elf-gcc", "-march=rv32imc", "-mabi=ilp32"]],
    ids=["gcc", "riscv"],
)
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 2}], ids=str)
def test_no_c_library(compiler, options, tmp_path):
    """Only the headers that come with a compiler, and no function of a library."""
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"needs {compiler[0]}")
    exported(tmp_path, "net", QuantConfig.int16(), **options)
    if "-nostdinc" in compiler:
        own = subprocess.run(["gcc", "-print-file-name=include"], capture_output=True, text=True)
        compiler = [*compiler, "-isystem", own.stdout.strip()]
    target = tmp_path / "net.o"
    assert compiled(*compiler, *BARE, *STRICT, "-c", tmp_path / "net.c", "-o", target) == ""
    names = subprocess.run(["nm", "-u", target], capture_output=True, text=True, check=True).stdout
    wanted = {line.split()[-1] for line in names.splitlines()}
    assert {name for name in wanted if not name.startswith("__")} <= EXPECTED_OF_ALL
