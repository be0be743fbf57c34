"""What is read from a tool's report, without a GPU."""

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sanitize
import sanitized_calls

from quant_gru.kernels.cuda.real_projection import choose_groups

ATTACH = "========= Error: Target application failed to attach\n"
OF_OTHERS = """========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument"
int8: call (7, 1, 12, 40): equal
========= Error: Race reported between Read access at nvjet_sm90_tss_64x16_h_bz_splitK_NNT+0xb20
=========     and Write access at nvjet_sm90_tss_64x16_h_bz_splitK_NNT+0x2f30 [32 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
OF_OURS = """int8: call (7, 1, 12, 40): equal
========= Invalid __global__ read of size 4 bytes
=========     at recurrent+0x1230
=========     by thread (3,0,0) in block (0,0,0)
========= Error: Race reported between Write access at void take(Take)+0x10
=========     and Read access at void take(Take)+0x20 [4 hazards]
========= ERROR SUMMARY: 2 errors
"""
NAMELESS = "int8: call: equal\n========= Error: process didn't terminate successfully\n"


def test_our_kernels_are_those_of_the_sources():
    found = sanitize.our_kernels()
    sources = [path.read_text() for path in sanitize._HERE.rglob("*.cu")]
    assert len(found) == sum(source.count("__global__") for source in sources)
    assert {"recurrent", "take", "project_reals", "back_grid"} <= found


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        (OF_OTHERS, 0, (True, (), ("nvjet_sm90_tss_64x16_h_bz_splitK_NNT",))),
        (OF_OURS, 0, (True, ("recurrent", "take"), ())),
        (NAMELESS, 0, (True, ("?",), ())),
        ("int8: call: equal\n", 0, (True, (), ())),
        ("int8: call: equal\n", 1, (False, (), ())),
        ("", 0, (False, (), ())),
    ],
    ids=["others", "ours", "nameless", "clean", "failed", "silent"],
)
def test_outcomes(log, code, expected):
    found = sanitize.read(log, code, sanitize.our_kernels())
    assert (found.ended, found.ours, found.others) == expected


def test_a_tool_that_cannot_attach_starts_again(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/started\n'
        f'if [ $(wc -l < {tmp_path}/started) -lt 3 ]; then echo "{ATTACH.strip()}"; exit 1; fi\n'
        "echo 'int8: call: equal'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = sanitize.run("racecheck", "int8", 2, time.monotonic() + 60)
    assert found is not None
    assert (found.ended, found.ours) == (True, ())
    started = (tmp_path / "started").read_text().splitlines()
    assert len(started) == 3
    assert started[0].endswith("sanitized_calls.py --only int8 --case 2")
    assert sanitize.run("racecheck", "int8", 2, time.monotonic() - 1) is None


def test_every_kind_has_cases():
    for what in sanitize.WHAT:
        names = sanitize.cases(what)
        assert len(names) >= 6
        assert any("training" in name for name in names) or what in ("beside", "many")


@pytest.mark.parametrize(("T", "N", "C", "H"), sanitized_calls.MANY)
def test_many_rows_take_groups_of_warps(T, N, C, H):
    units, padded = (-(-each // 16) * 16 for each in (H, C))
    for planes in (1, 2):
        assert choose_groups(units, T * N, padded, planes, 132) is not None
