"""Generated C computes the codes of the plan, under warnings and sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_grus import KINDS, random_gru, with_weights

from kept import kept
from quant_gru import QuantConfig, QuantGRU, QuantGRUError
from quant_gru.config.fields import ROUNDINGS
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.interchange.c.numbers import Sum, in_words, sum_of
from quant_gru.interchange.c.text import SIZES

pytestmark = pytest.mark.slow

GCC = shutil.which("gcc")
PLANS = int(os.environ.get("QUANT_GRU_PLANS", "2"))  # of each kind
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pedantic"]
SANITIZED = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

needs_gcc = pytest.mark.skipif(GCC is None, reason="needs gcc")


def selftest(directory, name, *flags):
    """What the self-test prints; it fails where a code differs."""
    sources = [f"{name}.c", f"{name}_selftest.c"]
    subprocess.run([GCC, *STRICT, *flags, *sources, "-o", "selftest"], cwd=directory, check=True)
    ran = subprocess.run(["./selftest"], cwd=directory, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def bytes_of_arrays(source):
    """The bytes of the constant arrays of all cells, as the compiler sees them."""
    text = subprocess.run([GCC, "-E", source], check=True, capture_output=True, text=True).stdout
    arrays = re.findall(r"static const (u?int\d+_t) net_l\w+\[(\d+)\] =", text)
    return sum(SIZES[ctype] * int(count) for ctype, count in arrays)


@needs_gcc
@pytest.mark.parametrize("kind", KINDS)
def test_random_plans(kind, tmp_path):
    for seed in range(PLANS):
        gru, _ = random_gru(seed, kind, far=True)
        report = gru.export_c(tmp_path / str(seed), "net")
        said = selftest(report.directory, "net", *SANITIZED)
        assert said.startswith("net: equal (")
        assert said.endswith(f", {report.ram_bytes} bytes of state\n")
        assert report.flash_bytes == bytes_of_arrays(report.directory / "net.c")


@needs_gcc
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [rule for rule in ROUNDINGS if rule != "half_even"])
def test_rules_of_rounding(rule, kind, tmp_path):
    for seed in range(PLANS):
        gru, _ = random_gru(seed, kind, far=True, rounding=rule)
        report = gru.export_c(tmp_path / str(seed), "net")
        options = ["-O0"] if seed else SANITIZED
        assert selftest(report.directory, "net", *options).startswith("net: equal (")


@kept
def quantized(config, *sizes, **options):
    gru = QuantGRU(*sizes, config=config, **options)
    gru.calibrate(torch.randn(20, 4, gru.input_size))
    gru.finalize_calibration()
    return gru


@needs_gcc
@pytest.mark.filterwarnings("ignore:one signed bit")
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("base", ["int8", "w8a16"])
def test_weights_of_few_bits(bits, base, tmp_path):
    for C, H, extreme in ((1, 1, False), (3, 5, True), (17, 6, False), (40, 33, True)):
        report = with_weights(bits, base, C, H, extreme).export_c(tmp_path / f"{C}", "net")
        assert selftest(report.directory, "net", *SANITIZED).startswith("net: equal (")


@pytest.mark.filterwarnings("ignore:one signed bit")
@pytest.mark.parametrize(("bits", "most"), [(8, 22_272), (4, 12_600), (3, 12_600), (2, 7_400)])
def test_bytes(bits, most, tmp_path):
    torch.manual_seed(0)
    config = QuantConfig.int8()
    for name in ("weight.W", "weight.R"):
        config = config.replace(name, bitwidth=bits)
    report = quantized(config, 40, 64).export_c(tmp_path, "net")
    assert report.flash_bytes <= most


@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from([1, 2, 4]), st.integers(0, 1 << 30))
def test_layouts_have_each_code_once(quads, columns, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    weights = torch.randint(-half, half, (3 * quads, columns), generator=generator)
    words = in_words(weights, bits)
    pairs = 4 // bits
    per_row = -(-columns // (2 * pairs))
    for row, column in ((0, 0), (3 * quads - 1, columns - 1), (quads, columns // 2)):
        word = words[row // 4 * per_row + column // (2 * pairs)]
        k, high = divmod(column % (2 * pairs), 2)
        digit = word >> (16 * high + (4 * k + row % 4) * bits) & (2 * half - 1)
        if bits == 4 and row % 4 == 3:
            digit ^= half
        assert digit - half == weights[row, column]


@needs_gcc
@pytest.mark.parametrize("preset", ["int8", "int8_wide", "w8a16", "int16"])
def test_presets(preset, tmp_path):
    config = getattr(QuantConfig, preset)()
    for kind in ("pot", "free"):
        gru = quantized(config.replace_globals(scale_kind=kind), 20, 24)
        report = gru.export_c(tmp_path / kind, "speech_gru")
        assert "speech_gru: equal (" in selftest(report.directory, "speech_gru", "-O2")
        assert report.macs == 3 * 24 * (20 + 24)
        assert report.flash_bytes == report.weight_bytes + report.table_bytes


def test_the_primitives_are_those_of_the_kernels(tmp_path):
    import quant_gru.kernels as kernels

    # an editable install has a second folder, of what was built
    files = [Path(folder, "c99", "fixed_point.h") for folder in kernels.__path__]
    (original,) = {file.resolve() for file in files if file.exists()}
    quantized(None, 3, 4).export_c(tmp_path, "net")
    assert (tmp_path / "fixed_point.h").read_bytes() == original.read_bytes()


def test_what_the_loop_is_made_of(tmp_path):
    """No heap, no libm and no floating point but in the two helpers."""
    quantized(QuantConfig.int16(), 3, 4, num_layers=2, bidirectional=True).export_c(tmp_path, "net")
    for path in tmp_path.glob("*.[ch]"):
        text = path.read_text()
        assert "alloc" not in text
        assert "math.h" not in text
        before, *_ = text.partition("_NO_FLOAT")
        code = "".join(line for line in before.split("/*") if "*/" in line).split("*/")
        assert not any("float " in part or "double " in part for part in code[1:]), path.name


@needs_gcc
@pytest.mark.parametrize("rule", [None, *ROUNDINGS[:-1]])
@pytest.mark.parametrize("offset", [0, 100])
def test_real_values_at_the_ends(tmp_path, offset, rule):
    config = QuantConfig.int8().replace_globals(
        scale_kind="free", input_excludes_zero=True, rounding_input=rule
    )
    gru = QuantGRU(3, 4, config=config, use_quantization=True)
    gru.calibrate(torch.randn(20, 4, 3) + offset)
    gru.finalize_calibration()
    assert gru._plan().is_far == (offset > 0)
    gru.export_c(tmp_path, "net")
    ends = torch.tensor([[torch.inf, -torch.inf, 1e30], [0, -1e30, 1]])
    border = gru._plan().cells[0][0].border
    ties = (torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]).view(2, 3) * border.scale) + offset
    x = torch.cat([torch.randn(3, 3) + offset, ties, ends])
    values = ", ".join(
        "INFINITY" if v == torch.inf else "-INFINITY" if v == -torch.inf else f"{float.hex(v)}f"
        for v in x.flatten().tolist()
    )
    (tmp_path / "main.c").write_text(f"""
#include <math.h>
#include <stdio.h>
#include "net.h"
int main(void) {{
    static const float x[7][3] = {{{values}}};
    static net_state state;
    net_input codes[3];
    net_code y[4];
    int t, i;
    net_init(&state);
    for (t = 0; t < 7; ++t) {{
        for (i = 0; i < 3; ++i) codes[i] = net_quantize(x[t][i]);
        net_step(&state, codes, y);
        for (i = 0; i < 4; ++i) printf("%a\\n", (double)net_dequantize(y[i], 0));
    }}
    return 0;
}}
""")
    subprocess.run(
        [GCC, "-Wno-missing-braces", "net.c", "main.c", "-o", "m"], cwd=tmp_path, check=True
    )
    found = subprocess.run(["./m"], cwd=tmp_path, check=True, capture_output=True, text=True)
    y = torch.tensor([float.fromhex(line) for line in found.stdout.split()])
    assert torch.equal(y, gru(x)[0].flatten())


@pytest.mark.parametrize(
    "name",
    [
        *("", "2x", "a-b", "Net", "a" * 60, 3, "../x"),
        *("int", "string", "features", "newlib"),
        *("qg_net", "l0", "net_l1_reverse", "gru_products", "gru_helium", "fixed_point"),
        *("all", "clean", "help", "install", "package", "test"),
    ],
)
def test_names_are_identifiers(name, tmp_path):
    with pytest.raises(QuantGRUError, match=r"Expected (a )?name"):
        quantized(None, 2, 3).export_c(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_directories(tmp_path):
    gru = quantized(None, 2, 3)
    (tmp_path / "file").write_text("")
    with pytest.raises(QuantGRUError, match="Expected a directory to write to"):
        gru.export_c(tmp_path / "file", "net")
    with pytest.raises(QuantGRUError, match=r"Expected steps to be in 1\.\.10000, got 0"):
        gru.export_c(tmp_path, "net", steps=0)
    gru.export_c(tmp_path / "a" / "b", "net")
    again = gru.export_c(tmp_path / "a" / "b", "net")
    assert {path.name for path in again.directory.iterdir()} == set(again.files)


def test_existing_files_remain_where_one_cannot_be_written(tmp_path, monkeypatch):
    quantized(None, 2, 3).export_c(tmp_path, "net")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls, sync = iter(range(100)), os.fsync

    def fail(file):
        if next(calls) == 4:
            raise OSError(28, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(QuantGRUError, match=r"Expected a writable file, got No space left"):
        quantized(None, 4, 5).export_c(tmp_path, "net")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_sums_take_the_narrowest_integers():
    def kind(Ms, k, *bounds):
        s = WeightedSum(Ms, k, 3, -128, 127, "e")
        return sum_of(s, bounds, [0] * len(bounds))

    assert kind((4, 2), 2, 100, 100) == Sum(2, 1, 0, 0, 1, 32, 1, 3, -128, 127)
    assert kind((1 << 23,), 30, 100).k == 7
    assert kind((3,), -2, 100) == kind((12,), 0, 100)
    assert kind((1 << 20, 1), 20, 1 << 10, 1).bits == 32
    assert kind((1 << 21, 1), 20, 1 << 10, 1).bits == 64
    assert kind((3, 1), 20, 1 << 60, 1).bits == 128
    assert kind((3, 1), 100, 1, 1).bits == 128


def test_products_of_two_words_take_the_multiplier_to_the_factor_with_room():
    def found(M, k, *factors):
        s = WeightedSum((M,), k, 3, -128, 127, "e")
        result = sum_of(s, [factors[0] * factors[1]], [0], factors)
        if result.bits == 33:
            for m, V in zip((result.M1, result.M2), factors, strict=True):
                assert m * V < 1 << 31
            assert result.M1 * result.M2 << k == M << result.k
        return result.bits, result.M1, result.M2, result.k

    M = 12_526_559
    assert found(M, 31, 127, 255) == (33, M, 4, 33)
    assert found(M, 31, 255, 128) == (33, 4, M, 33)
    assert found(M, 31, 255, 255)[0] == 64
    assert found(65_535, 31, 65_535, 32_768) == (33, 4, 65_535, 33)
    assert found(65_535, 31, 65_535, 65_535)[0] == 64


ALL_CODES = """#include <stdio.h>
#include "net.c"

int main(void) {
    for (int code = -(1 << (BITS - 1)); code < 1 << (BITS - 1); ++code)
        printf("%ld %ld\\n", (long)net_l0_z(code), (long)net_l0_g(code));
    return 0;
}
"""


@needs_gcc
@pytest.mark.parametrize(
    ("bits", "out", "blocks"), [(11, 9, True), (12, 10, True), (12, 16, False)]
)
def test_tables_of_all_codes(bits, out, blocks, tmp_path):
    """Tables of many codes are in blocks with 4 bits a code, where the function is flat enough."""
    config = QuantConfig.int8_wide()
    for gate in ("z", "g"):
        config = config.replace(f"gate.{gate}_pre", bitwidth=bits)
        config = config.replace(f"gate.{gate}_out", bitwidth=out)
    for kind in ("pot", "free"):
        gru = quantized(config.replace_globals(scale_kind=kind), 5, 7)
        report = gru.export_c(tmp_path / kind, "net")
        (tmp_path / kind / "all.c").write_text(ALL_CODES)
        flags = (*STRICT, *SANITIZED, "-Wno-unused-function", f"-DBITS={bits}")
        subprocess.run([GCC, *flags, "all.c", "-o", "all"], cwd=tmp_path / kind, check=True)
        said = subprocess.run([tmp_path / kind / "all"], check=True, capture_output=True, text=True)
        found = torch.tensor([[int(n) for n in line.split()] for line in said.stdout.splitlines()])
        tables = gru._plan().cells[0][0].frozen.tables
        codes = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1))
        for column, gate in zip(found.T, ("gate.z_out", "gate.g_out"), strict=True):
            table = tables[gate]
            assert torch.equal(column, table(codes) - table.zero_point)
        assert ("qg_block_table" in (tmp_path / kind / "net.c").read_text()) == blocks
        if blocks:
            assert report.table_bytes < 2 * (1 << bits)
