"""With QUANT_GRU_CI, a test that lacks something other than a GPU fails instead of skipping."""

from __future__ import annotations

import os

import pytest

# The rest of a machine can be installed. "not for" are tests that do not apply to a parameter.
MAY_SKIP = ("needs a GPU", "needs two GPUs", "not for ")


def fail_if_skipped(report):
    """Return the report, a failure that names what is missing if it was a skip for that."""
    if "QUANT_GRU_CI" in os.environ and report.skipped and not hasattr(report, "wasxfail"):
        path, line, reason = report.longrepr
        reason = reason.removeprefix("Skipped: ")
        if not reason.startswith(MAY_SKIP):
            report.outcome = "failed"
            report.longrepr = (
                f"Expected nothing to be missing, got a skip: {reason} ({path}:{line})"
            )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return fail_if_skipped((yield))
