"""compute-sanitizer over every kind of plan: some processes for each kind, and some at a time.

    python tests/cuda/sanitize.py [--tools memcheck racecheck] [--only int8] [--minutes 9]

Prints of each process, and at the end of each tool and kind, how many cases ran to their end, what
was reported of our kernels, and of others (products of cuBLAS). Exits with 1 where a kernel of ours
was reported, or a case or a process failed or was not run: no case begins after `--minutes`. A tool
that cannot attach to a process is started again.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sanitized_calls import WHAT, cases

from quant_gru.kernels.cuda.machine import SOURCES

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_ATTEMPTS = 3
_LAST = 120  # seconds for a case that has begun in time
_REPORT = re.compile(r"^=+ (?=Error|Warning|Invalid|Uninitialized|Barrier|Race)", re.MULTILINE)
_PLACE = re.compile(r"\bat ([\w:<>~ ]+?)(?:\([^)]*\))?\+0x[0-9a-f]+")


@dataclass(frozen=True)
class Job:
    """A process: cases of a kind under a tool."""

    tool: str
    what: str
    cases: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.tool}-{self.what}-{self.cases[0]}"


@dataclass(frozen=True)
class Outcome:
    """What a tool says of a process.

    Attributes:
        ended: How many cases came to their end with right results.
        code: What the process exited with.
        ours: Names of our kernels that were reported.
        others: Those of others.
        log: All that was printed.
    """

    ended: int = 0
    code: int = 0
    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    log: str = field(default="", repr=False)


@cache
def our_kernels() -> frozenset[str]:
    """The functions that our sources launch."""
    return frozenset(
        name
        for source in SOURCES.folder.rglob("*.cu")
        for name in re.findall(
            r"__global__[^;{]*?\b(\w+)\s*\(\s*(?:const __grid_constant__|\))", source.read_text()
        )
    )


def read(log: str, code: int, ours: Iterable[str]) -> Outcome:
    """The outcome by what was printed; a report that names no kernel is taken for ours."""
    known, places = set(ours), set()
    for report in _REPORT.split(log)[1:]:
        found = _PLACE.search(report)
        places.add(found[1].split()[-1] if found else "?")
    mine = {place for place in places if place in known or place == "?"}
    ended = log.count(": equal\n")
    return Outcome(ended, code, tuple(sorted(mine)), tuple(sorted(places - mine)), log)


def run(job: Job, deadline: float) -> Outcome:
    """A process under its tool, none of whose cases begins after the deadline.

    What a tool has found may be lost where a case has not come to its end for long: none counts.
    """
    here = Path(__file__).parent
    # a process that takes long to start is waited for
    command = ["compute-sanitizer", "--tool", job.tool, "--launch-timeout", "0"]
    if job.tool == "memcheck":
        # functions that a driver does not have are asked for
        command += ["--report-api-errors", "no"]
    command += [sys.executable, str(here / "sanitized_calls.py"), "--only", job.what]
    command += ["--cases", *map(str, job.cases), "--until", str(deadline)]
    for _ in range(_ATTEMPTS):
        left = deadline - time.time()
        if left <= 0:
            return Outcome(log="not run\n")
        with subprocess.Popen(
            command,
            cwd=here,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                log, _ = process.communicate(timeout=left + _LAST)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                log, _ = process.communicate()
                return Outcome(log=f"{log}stopped\n")
        if "attach" not in log:
            break
    return read(log, process.returncode, our_kernels())


def told(outcomes: Iterable[Outcome], cases: int) -> str:
    """A line of what was found."""
    outcomes = list(outcomes)
    named = [
        ", ".join(sorted({name for each in outcomes for name in getattr(each, of)})) or "none"
        for of in ("ours", "others")
    ]
    ended, failed = sum(each.ended for each in outcomes), any(each.code for each in outcomes)
    exited = "; exited with an error" if failed else ""
    return f"{ended} of {cases} cases; ours: {named[0]}; others: {named[1]}{exited}"


def main() -> int:
    """Run all of it and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS[:2])
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--workers", type=int, default=6, help="processes at a time")
    parser.add_argument("--split", type=int, default=2, help="processes of a tool and kind")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--logs", type=Path, help="a folder for what is printed")
    args = parser.parse_args()
    start = time.time()
    deadline = start + 60 * args.minutes
    jobs = [
        Job(tool, what, tuple(range(part, len(cases(what)), args.split)))
        for tool in args.tools
        for part in range(args.split)
        for what in args.only
        if part < len(cases(what))
    ]
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)

    def done(job: Job) -> Outcome:
        outcome = run(job, deadline)
        took = time.time() - start
        print(f"{took:5.0f} s {job}: {told([outcome], len(job.cases))}", flush=True)
        if args.logs:
            (args.logs / f"{job}.txt").write_text(outcome.log)
        return outcome

    with ThreadPoolExecutor(args.workers) as pool:
        outcomes = dict(zip(jobs, pool.map(done, jobs), strict=True))
    failed = False
    for tool in args.tools:
        for what in args.only:
            of = [each for job, each in outcomes.items() if (job.tool, job.what) == (tool, what)]
            expected = len(cases(what))
            failed |= any(each.ours or each.code for each in of)
            failed |= sum(each.ended for each in of) < expected
            print(f"{tool:>10} {what:>7}: {told(of, expected)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
