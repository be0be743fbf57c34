"""What is read from a tool's report, without a GPU."""

import os
import re
import sys
import time

import pytest
import sanitize
import sanitized_calls

from quant_gru.kernels._native import choose_warpgroups

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
========= Error: Race reported between Write access at void quantize_input(QuantizeInput)+0x10
=========     and Read access at void quantize_input(QuantizeInput)+0x20 [4 hazards]
========= ERROR SUMMARY: 2 errors
"""
NAMELESS = "int8: call: equal\n========= Error: process didn't terminate successfully\n"


def test_our_kernels_are_those_of_the_sources():
    found = sanitize.our_kernels()
    sources = [path.read_text() for path in sanitize.SOURCES.folder.rglob("*.cu")]
    assert len(found) == sum(source.count("__global__") for source in sources)
    assert {"recurrent", "quantize_input", "project_reals", "back_grid"} <= found


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        (OF_OTHERS, 0, (1, 0, (), ("nvjet_sm90_tss_64x16_h_bz_splitK_NNT",))),
        (OF_OURS, 0, (1, 0, ("quantize_input", "recurrent"), ())),
        (NAMELESS, 0, (1, 0, ("?",), ())),
        ("int8: call: equal\n", 0, (1, 0, (), ())),
        ("int8: a: begins\nint8: a: equal\nint8: b: begins\nint8: b: equal\n", 0, (2, 0, (), ())),
        ("int8: call: equal\n", 1, (1, 1, (), ())),
        ("int8: a: equal\nint8: b: begins\nAssertionError: 3 codes\n", 1, (1, 1, (), ())),
        ("", 0, (0, 0, (), ())),
    ],
    ids=["others", "ours", "nameless", "clean", "two", "failed", "failed later", "silent"],
)
def test_outcomes(log, code, expected):
    found = sanitize.read(log, code, sanitize.our_kernels())
    assert (found.ended, found.code, found.ours, found.others) == expected


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A function that makes a script the tool, and the file of arguments it was started with."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def make(script):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/started\n{script}')
        path.chmod(0o755)
        return tmp_path / "started"

    return make


JOB = sanitize.Job("racecheck", "int8", (1, 3))


def test_a_tool_that_cannot_attach_starts_again(tool):
    started = tool(
        f'if [ $(wc -l < "$(dirname "$0")/started") -lt 3 ]; then echo "{ATTACH.strip()}"; exit 1\n'
        "fi\necho 'int8: call: equal'\n"
    )
    found = sanitize.run(JOB, time.time() + 60)
    assert (found.ended, found.ours) == (1, ())
    lines = started.read_text().splitlines()
    assert len(lines) == 3
    assert re.search(r"sanitized_calls.py --only int8 --cases 1 3 --until [0-9.]+$", lines[0])


def test_nothing_starts_when_time_is_up(tool):
    started = tool("echo 'int8: call: equal'\n")
    assert sanitize.run(JOB, time.time() - 1).ended == 0
    assert not started.exists()


def test_a_process_that_does_not_end_counts_for_nothing(tool, monkeypatch):
    monkeypatch.setattr(sanitize, "_LAST", 0)
    tool("echo 'int8: call: equal'\nsleep 50 &\nwait\n")
    start = time.time()
    found = sanitize.run(JOB, start + 1)
    assert (found.ended, found.log) == (0, "int8: call: equal\nstopped\n")
    assert time.time() - start < 40


@pytest.mark.parametrize(("cases", "code"), [(6, 0), (5, 1)], ids=["all", "one is missing"])
def test_what_is_printed(tool, monkeypatch, capsys, tmp_path, cases, code):
    tool(f"for i in $(seq {cases}); do echo 'many: call: equal'; done\n")
    logs = tmp_path / "logs"
    arguments = ["--tools", "memcheck", "--only", "many", "--logs", str(logs)]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *arguments])
    assert sanitize.main() == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert f"memcheck-many-0: {cases} of 6 cases; ours: none; others: none" in lines[0] + lines[1]
    assert lines[2] == f"  memcheck    many: {2 * cases} of 12 cases; ours: none; others: none"
    assert {path.name for path in logs.iterdir()} == {"memcheck-many-0.txt", "memcheck-many-1.txt"}


def test_a_process_that_fails_after_its_cases_fails(tool, monkeypatch, capsys):
    tool("for i in $(seq 6); do echo 'many: call: equal'; done\nexit 3\n")
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--tools", "memcheck", "--only", "many"])
    assert sanitize.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("none; exited with an error")


def test_cases_that_begin_in_time_alone_run(monkeypatch, capsys):
    monkeypatch.setattr(sanitized_calls.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sanitized_calls, "cases", lambda what: {name: list for name in "abc"})
    for given, names in (["--cases", "0", "2"], "ac"), (["--until", "1"], ""), ([], "abc"):
        monkeypatch.setattr(sys, "argv", ["sanitized_calls.py", "--only", "int8", *given])
        sanitized_calls.main()
        expected = [f"int8: {name}: {does}" for name in names for does in ("begins", "equal")]
        assert capsys.readouterr().out.splitlines() == expected


def test_every_kind_has_cases():
    for what in sanitize.WHAT:
        names = sanitize.cases(what)
        assert len(names) >= 6
        assert any("training" in name for name in names) or what in ("beside", "many")


@pytest.mark.parametrize(("T", "N", "C", "H"), sanitized_calls.MANY)
def test_many_rows_take_groups_of_warps(T, N, C, H):
    units, padded = (-(-each // 16) * 16 for each in (H, C))
    for planes in (1, 2):
        assert choose_warpgroups(units, T * N, padded, planes, 132) is not None
