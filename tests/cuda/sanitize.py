"""compute-sanitizer over every kind of plan: a process for each case, some of them at a time.

    python tests/cuda/sanitize.py [--tools memcheck racecheck] [--only int8] [--workers 6]

Prints for each tool and kind how many cases ran to their end, what was reported of our kernels, and
of others (products of cuBLAS). Exits with 1 where a case of ours was reported, failed or was not
run within `--minutes`. A tool that cannot attach to a process is started again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sanitized_calls import WHAT, cases

from quant_gru.kernels.cuda.compiler import _HERE

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_ATTEMPTS = 3
_REPORT = re.compile(r"^=+ (?=Error|Warning|Invalid|Uninitialized|Barrier|Race)", re.MULTILINE)
_PLACE = re.compile(r"\bat ([\w:<>~ ]+?)(?:\([^)]*\))?\+0x[0-9a-f]+")


@dataclass(frozen=True)
class Outcome:
    """What a tool says of a case.

    Attributes:
        ended: The case came to its end and its results were right.
        ours: Names of our kernels that were reported.
        others: Those of others.
        log: All that was printed.
    """

    ended: bool
    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    log: str = field(default="", repr=False)


@cache
def our_kernels() -> frozenset[str]:
    """The functions that our sources launch."""
    return frozenset(
        name
        for source in _HERE.rglob("*.cu")
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
    return Outcome(
        code == 0 and ": equal" in log, tuple(sorted(mine)), tuple(sorted(places - mine)), log
    )


def run(tool: str, what: str, index: int, deadline: float) -> Outcome | None:
    """A case under a tool; None where there was no time for it."""
    here = Path(__file__).parent
    command = ["compute-sanitizer", "--tool", tool]
    if tool == "memcheck":
        # functions that a driver does not have are asked for
        command += ["--report-api-errors", "no"]
    command += [
        sys.executable,
        str(here / "sanitized_calls.py"),
        "--only",
        what,
        "--case",
        str(index),
    ]
    for _ in range(_ATTEMPTS):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            done = subprocess.run(
                command, cwd=here, capture_output=True, text=True, errors="replace", timeout=left
            )
        except subprocess.TimeoutExpired:
            return None
        log = done.stdout + done.stderr
        if "attach" not in log:
            break
    return read(log, done.returncode, our_kernels())


def main() -> int:
    """Run all of it and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS[:2])
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--logs", type=Path, help="a folder for what is printed")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    jobs = [
        (tool, what, index)
        for tool in args.tools
        for index in range(max(len(cases(what)) for what in args.only))
        for what in args.only
        if index < len(cases(what))
    ]
    with ThreadPoolExecutor(args.workers) as pool:
        outcomes = dict(zip(jobs, pool.map(lambda job: run(*job, deadline), jobs), strict=True))
    failed = False
    for tool in args.tools:
        for what in args.only:
            of = [each for (t, w, _), each in outcomes.items() if (t, w) == (tool, what)]
            ended = sum(each is not None and each.ended for each in of)
            ours = sorted({name for each in of if each for name in each.ours})
            others = sorted({name for each in of if each for name in each.others})
            failed |= bool(ours) or ended < len(of)
            named = [", ".join(names) or "none" for names in (ours, others)]
            print(
                f"{tool:>10} {what:>7}: {ended} of {len(of)} cases; ours: {named[0]}; "
                f"others: {named[1]}"
            )
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
        for (tool, what, index), each in outcomes.items():
            text = "not run\n" if each is None else each.log
            (args.logs / f"{tool}-{what}-{index}.txt").write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
